# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page says what the screen says, draws what was kept and nothing else, and lets nothing that a member said become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _status
from ansible_collections.gb10.cluster.plugins.plugin_utils import _status_page
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.monitoring import sample

NOW = 1_700_000_000.0
VOID = {"meta", "path"}
PLAN: dict[str, Any] = {
    "cluster": {"name": "lab", "head": "t1", "topology": "ring", "members": ["t1", "t2", "t3"], "profile": "p"},
    "service": {"url": "http://10.0.0.1:8000", "served_model_name": "m"},
    "members": {name: {"rank": rank} for rank, name in enumerate(("t1", "t2", "t3"))},
}


def record(at: float, **more: Any) -> dict[str, Any]:
    return {"at": at, "free": 2048, "available": 4096, "legs": {"enp1s0f0np0": 1_000_000}} | more


def member(**more: Any) -> dict[str, Any]:
    """A member that serves, with an hour of history."""
    return {
        "active": "active", "phase": "serving", "detail": "", "failure": None, "leg_problems": [], "legs": 4, "mem_free_mib": 2048,
        "mem_total_mib": 4096, "swaps": [], "guard": None, "events": [], "at_boot": True, "lock": "",
        "history": [record(NOW - 300 * step) for step in range(12, 0, -1)],
    } | more  # fmt: skip


class Reader(HTMLParser):
    """Elements, attributes and text of a page; every element that is opened is closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


GOOD = dict.fromkeys(("t1", "t2", "t3"), member())
FAILURE = {"reason": "rank 1 on t2 exited with status 3", "culprit": "t2", "at": NOW - 60, "log": ["first", "last"], "evidence": "/e"}
BAD = {
    "t1": member(phase="waiting", detail="for rank 1", active="activating", lock="ann@desk runs site, since 40 s"),
    "t2": member(
        phase="stopped", active="failed", failure=FAILURE, leg_problems=["enp1s0f0np0 has no carrier"], swaps=["/swap.img"], at_boot=False,
        guard={"action": "rank told to stop", "reason": "MemAvailable 900 MiB"}, events=[{"at": 0, "what": "GID moved"}],
    ),
    "t3": None,
}  # fmt: skip


@pytest.mark.parametrize("members", [GOOD, BAD], ids=["good", "bad"])
def test_it_says_every_line_and_every_command_of_the_screen(members: dict[str, Any]) -> None:
    text = Reader(_status_page.page(PLAN, members, NOW)).text
    for line in _status.lines(PLAN, members):
        assert line.text in text and line.command in text, line
    assert ("Nothing is to be done." in text) == (members is GOOD)
    assert ("first\nlast" in text) == (members is BAD)


def test_it_needs_no_script_and_fetches_nothing() -> None:
    reader = Reader(_status_page.page(PLAN, BAD, NOW))
    assert not reader.names & {"script", "link", "img", "iframe", "object", "form", "a"}
    assert not {name for name, _value in reader.attributes} & {"src", "href", "onload", "onclick", "style"}
    assert "url(" not in _status_page.STYLE and "@import" not in _status_page.STYLE


HOSTILE = """</pre></style><script>alert(1)</script><img src=x onerror='a("b")'>&lt;b"""


@pytest.mark.parametrize(
    "where", ["log", "reason", "culprit", "detail", "problem", "event", "swap", "guard", "lock", "leg", "model", "phase"]
)
def test_what_a_member_says_stays_text(where: str) -> None:
    failure = FAILURE | {key: value for key, value in {"reason": HOSTILE, "culprit": HOSTILE, "log": [HOSTILE]}.items() if where == key}
    said = {
        "detail": {"phase": "waiting", "detail": HOSTILE},
        "problem": {"leg_problems": [HOSTILE]},
        "event": {"events": [{"at": 0, "what": HOSTILE}]},
        "swap": {"swaps": [HOSTILE]},
        "guard": {"guard": {"action": HOSTILE, "reason": HOSTILE}},
        "lock": {"lock": HOSTILE},
        "leg": {"history": [record(NOW, legs={HOSTILE: 1})]},
        "phase": {"phase": HOSTILE},
    }.get(where, {})
    plan = PLAN | {"service": PLAN["service"] | {"served_model_name": HOSTILE}} if where == "model" else PLAN
    reader = Reader(
        _status_page.page(
            plan,
            {"t1": member(phase="waiting", failure=failure, **said) if where not in ("detail", "phase") else member(**said), "t2": None},
            NOW,
        )
    )
    assert not reader.names & {"script", "img"}
    assert HOSTILE in reader.text


def test_a_whole_day_is_one_small_file_and_the_same_input_gives_the_same_bytes() -> None:
    page = sample.page()
    assert Reader(page).text.count("leg enp1s0f0np0") == 3
    assert page == sample.page() and len(page) < 150_000


def test_what_was_not_looked_at_is_a_gap_and_what_is_older_than_a_day_is_left_out() -> None:
    times = [NOW - 90_000, NOW - 50_000, NOW - 49_700, NOW - 900, NOW - 600, NOW - 300]
    page = _status_page.page(PLAN, {"t1": member(history=[record(at, legs={}) for at in times])}, NOW)
    lines = re.findall(r'class="line" d="(M[^"]+)"', page)
    assert [path.count("L") for path in lines] == [1, 2]
    assert all(0 <= float(x) <= _status_page.WIDTH for path in lines for x in re.findall(r"[ML](-?[\d.]+)", path))


def test_a_slow_leg_is_drawn_on_the_scale_of_the_others() -> None:
    members = {
        "t1": member(history=[record(NOW - 300, legs={"a": 1000}), record(NOW, legs={"a": 1000})]),
        "t2": member(history=[record(NOW - 300, legs={"b": 250}), record(NOW, legs={"b": 250})]),
    }
    page = _status_page.page(PLAN, members, NOW)
    height = {
        leg: float(re.search(rf'aria-label="leg {leg}:.*?class="line" d="M[\d.]+ ([\d.]+)', page)[1])  # type: ignore[index]
        for leg in ("a", "b")
    }
    drawn = {leg: _status_page.HEIGHT - value for leg, value in height.items()}
    assert drawn["a"] == pytest.approx(4 * drawn["b"], rel=0.02)


def test_a_member_without_history_says_so() -> None:
    assert "has kept nothing" in _status_page.page(PLAN, {"t1": member(history=[])}, NOW)
    without = member()
    del without["history"]
    assert "has kept nothing" in _status_page.page(PLAN, {"t1": without}, NOW)


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"at": st.floats(NOW - 100_000, NOW + 1000), "free": st.integers(0, 130_000), "available": st.integers(0, 130_000)},
            optional={"kv": st.floats(0, 1), "canary": st.floats(0, 4000)},
        ).flatmap(
            lambda one: st.dictionaries(st.text(max_size=8), st.integers(0, 10**11), max_size=3).map(lambda legs: {**one, "legs": legs})
        ),
        max_size=12,
    ),
    st.text(max_size=30),
)
def test_any_history_and_any_text_is_a_page(history: list[dict[str, Any]], text: str) -> None:
    history.sort(key=lambda one: one["at"])
    page = _status_page.page(PLAN, {"t1": member(history=history, phase="waiting", detail=text), "t2": None}, NOW)
    reader = Reader(page)
    assert "script" not in reader.names and "nan" not in "".join(re.findall(r' d="([^"]*)"', page))
