# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a failed group may start again, and what counts as movement of an engine."""

from __future__ import annotations

from pathlib import Path

from gb10_node import canary, recovery
from gb10_node.recovery import Book, Failure, judge
from hypothesis import given
from hypothesis import strategies as st

BACKOFF = (120.0, 300.0, 900.0)
HOUR = 3600.0


def failures(*times: float) -> list[Failure]:
    return [Failure(at, f"reason {number}") for number, at in enumerate(times)]


def test_each_failure_makes_the_next_start_wait_longer_until_the_breaker_opens() -> None:
    assert judge([], BACKOFF, 0.0).wait_s == 0
    assert judge(failures(0), BACKOFF, 20.0).wait_s == 100
    assert judge(failures(0, 500), BACKOFF, 500.0).wait_s == 300
    assert judge(failures(0, 500, 1500), BACKOFF, 1500.0).wait_s == 900
    opened = judge(failures(0, 500, 1500, 3000), BACKOFF, 4000.0)
    assert opened.is_open and opened.reason == "reason 3"


def test_failures_of_another_day_do_not_count() -> None:
    assert judge(failures(0, 1, 2, 3), BACKOFF, 7 * HOUR).wait_s == 0
    assert judge(failures(0, 7 * HOUR), BACKOFF, 7 * HOUR).wait_s == 120


@given(st.lists(st.floats(0, 1e6), max_size=8).map(sorted), st.floats(0, 1e6))
def test_whatever_the_clock_does_a_wait_is_one_of_the_list_at_most(times: list[float], now: float) -> None:
    verdict = judge(failures(*times), BACKOFF, now)
    assert 0 <= verdict.wait_s <= max(BACKOFF)
    assert verdict.is_open == (sum(now - at < recovery.WINDOW_S for at in times) > len(BACKOFF))


def test_the_book_keeps_what_counts_and_survives_a_file_that_is_none(tmp_path: Path) -> None:
    book = Book(tmp_path / "recovery/lab.json")
    for failure in failures(0, HOUR, 6.5 * HOUR):
        book.add(failure)
    assert [failure.at for failure in book.read()] == [HOUR, 6.5 * HOUR]
    book.path.write_text("{")
    assert book.read() == []


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:prompt_tokens_total{engine="0",model_name="m"} 17.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
process_cpu_seconds_total 12.5
"""


def test_an_engine_moves_when_a_figure_of_its_work_changes() -> None:
    silence = canary.Silence(0.0)
    assert silence.look(5.0, canary.figures(METRICS)) == 0
    assert silence.look(10.0, canary.figures(METRICS.replace("12.5", "99"))) == 5, "time of the processor is spent by a stuck rank as well"
    assert silence.look(12.0, None) == 7, "an engine that says nothing does not move"
    assert silence.look(15.0, canary.figures(METRICS.replace("0.125", "0.25"))) == 0
    assert "kv_cache_usage_perc 0.25" in str(silence)
