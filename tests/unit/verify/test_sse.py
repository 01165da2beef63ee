# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events come out whole and in order, however the network cuts them."""

from __future__ import annotations

from ansible_collections.gb10.cluster.plugins.module_utils._sse import Parser
from hypothesis import given
from hypothesis import strategies as st

LINES = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=12)
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)


@given(EVENTS, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_any_cut_gives_the_same_events(events: list[list[str]], end: str, sizes: list[int], comments: bool) -> None:
    said = "".join(
        (f": ping{end}event: x{end}" if comments else "") + "".join(f"data: {line}{end}" for line in event) + end for event in events
    ).encode()
    parser, out, place = Parser(), [], 0
    for turn in range(len(said)):
        size = sizes[turn % len(sizes)]
        out += parser.feed(said[place : place + size])
        place += size
    assert out == ["\n".join(event) for event in events]


def test_an_event_that_is_cut_off_never_comes_out() -> None:
    parser = Parser()
    assert parser.feed(b"data: one\n\ndata: two\n") == ["one"]
    assert parser.feed(b"") == []


def test_a_byte_order_mark_and_a_missing_space_are_no_data() -> None:
    assert Parser().feed(b"\xef\xbb\xbfdata:x\n\n") == ["x"]
