# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees of a transfer, and when a disk may take it."""

from __future__ import annotations

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _progress
from ansible_collections.gb10.cluster.plugins.module_utils._space import Disk, shortage
from hypothesis import given
from hypothesis import strategies as st

GIB = 2**30
SIZES = {"a": 4 * GIB, "b": 4 * GIB, "c": 2 * GIB}


def test_a_line_says_files_bytes_rate_time_left_and_what_is_under_way() -> None:
    report = _progress.report(SIZES, {"a": 4 * GIB, "b": GIB}, ["a"], 0.5 * GIB)
    assert _progress.line(report) == "1 of 3 files, 5.0 GiB of 10.0 GiB (50 %), 512.0 MiB/s, 10 s left | b 25 %"


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert _progress.line({}) == "starting"
    assert _progress.line(_progress.report(SIZES, {}, [], 0.0)) == "0 of 3 files, 0 bytes of 10.0 GiB (0 %)"
    assert _progress.line(_progress.report(SIZES, SIZES, list(SIZES), 9.0)) == "3 of 3 files, 10.0 GiB of 10.0 GiB (100 %), 9 bytes/s"
    assert _progress.line(_progress.report({"empty": 0}, {}, ["empty"], 0.0)) == "1 of 1 files, 0 bytes of 0 bytes (100 %)"


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 100)), st.dictionaries(st.text("abc", min_size=1), st.integers(0, 200)))
def test_no_more_is_done_than_there_is_to_do(sizes: dict[str, int], there: dict[str, int]) -> None:
    report = _progress.report(sizes, there, [], 1.0)
    assert 0 <= report["bytes_done"] <= report["bytes"]
    assert report["seconds_left"] >= 0
    assert _progress.line(report)


def test_a_rate_is_that_of_the_newest_seconds() -> None:
    meter = _progress.Meter(window=10)
    assert meter.rate(0, 0) == 0
    assert meter.rate(5, 50) == 10
    assert [meter.rate(now, 50 + 100 * (now - 5)) for now in (10, 15, 20, 25)][-1] == 100
    assert meter.rate(25, 0) == 0  # files that were dropped are no negative speed


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3600 * 26 + 125, "26 h 2 min")])
def test_a_time_has_two_units(seconds: float, text: str) -> None:
    assert _progress.time_text(seconds) == text


def test_a_disk_is_filled_to_its_limit_and_not_further() -> None:
    disk = Disk(size=1000 * GIB, free=400 * GIB)
    assert not shortage("/models", 250 * GIB, disk)
    assert shortage("/models", 251 * GIB, disk) == (
        "/models has 400.0 GiB of 1000.0 GiB left and needs 251.0 GiB more, which would fill the disk above 85 %: free 1.0 GiB there"
    )
    assert not shortage("/models", 400 * GIB, disk, 100)


def test_a_full_disk_with_the_whole_copy_on_it_is_no_problem() -> None:
    assert not shortage("/models", 0, Disk(size=1000 * GIB, free=0))
