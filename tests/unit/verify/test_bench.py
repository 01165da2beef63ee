# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which repetitions count and what is said of them; the client against an endpoint without a model. Times are never asserted."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.filter.bench_compare import bench_compare
from ansible_collections.gb10.cluster.plugins.module_utils import _bench, _bench_schema, _endpoint, _openai, _provenance
from ansible_collections.gb10.cluster.plugins.modules import serving_bench
from ansible_collections.gb10.cluster.plugins.plugin_utils import _report
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from .fake_engine import KEY, MODEL, Engine

DECODE = _bench.Step("decode", 256)


def repetition(value: float | None, refused: str = "") -> dict[str, Any]:
    """As `measured` gives it."""
    return {"requests": [], "value": value, "refused": refused}


def concluded(*values: float) -> dict[str, Any]:
    """A decode's result of these values."""
    return _bench.concluded(DECODE, [repetition(value) for value in values])


def test_what_comes_before_a_speed_is_steady_does_not_count() -> None:
    """z-lab/dflash#135: 43 right after the launch, 69 after some requests."""
    result = concluded(42, 44, 51, 63, 68, 70, 69, 69, 69, 70)
    assert (result["median"], result["steady"]) == (69, True)
    assert [repetition["counts"] for repetition in result["repetitions"]] == [False] * 4 + [True] * 6


def test_a_speed_that_never_gets_steady_says_so() -> None:
    result = concluded(10, 20, 10, 20, 10)
    assert not result["steady"] and result["median"] == 10 and (result["least"], result["most"]) == (10, 20)


def test_too_few_repetitions_are_no_median() -> None:
    result = _bench.concluded(DECODE, [repetition(70), repetition(None, "window-not-filled: 12 of 256 tokens came"), repetition(70)])
    assert result["median"] is None and "2 of 3 repetitions count" in result["refused"] and "12 of 256" in result["refused"]


@given(st.lists(st.floats(1, 1000), min_size=3, max_size=12))
def test_a_median_lies_within_what_counts(values: list[float]) -> None:
    result = concluded(*values)
    kept = [repetition["value"] for repetition in result["repetitions"] if repetition["counts"]]
    assert len(kept) >= 3 and result["least"] == min(kept) <= result["median"] <= max(kept) == result["most"]
    assert values[-len(kept) :] == kept
    if result["steady"]:
        assert all(abs(value - result["median"]) <= _bench.STEADY * result["median"] for value in kept)


def reply(prompt: int, completion: int, times: list[float], finish: str = "length", cut: bool = False) -> _openai.Reply:
    """A stream with so many tokens in events of equal size; the first six carry thoughts only."""
    ids = [list(range(completion))[i :: len(times)] for i in range(len(times))]
    chunks: list[dict[str, Any]] = [{"choices": [{"text": "x", "token_ids": piece}]} for piece in ids]
    chunks.append({"choices": [{"text": "", "finish_reason": finish}]})
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    chunks.append({"choices": [], "usage": usage})
    stamps = [*times, times[-1], times[-1]]
    said = [_openai.Event(at, json.dumps({"id": "a", "model": "m"} | chunk)) for at, chunk in zip(stamps, chunks, strict=True)]
    events = tuple(said if cut else [*said, _openai.Event(stamps[-1], "[DONE]")])
    return _openai.Reply(200, "", events, seconds=stamps[-1])


def measured(step: _bench.Step, replies: list[_openai.Reply], cached: float | None = 0) -> dict[str, Any]:
    """One repetition of scripted replies."""
    return _bench.measured(step, _bench.requests(step, "m", "salt", 1.3), replies, cached)


def test_tokens_are_counted_and_not_events() -> None:
    """eugr/llama-benchy#11: ten events of several tokens each."""
    times = [0.5 + 0.2 * place for place in range(10)]
    got = measured(DECODE, [reply(30, 256, times)])
    assert got["value"] == pytest.approx(255 / 1.8)
    assert got["requests"][0]["first_s"] == 0.5


def test_the_first_thought_is_the_first_token() -> None:
    """noonghunna/club-3090#1096."""
    chunks = [{"choices": [{"delta": {"reasoning": "a"}}]}, {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}]
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    events = [
        _openai.Event(at, json.dumps({"id": "a", "model": "m", "object": "chat.completion.chunk"} | chunk))
        for at, chunk in zip((1.0, 2.0, 2.0), [*chunks, usage], strict=True)
    ]
    answer = _openai.read(_openai.chat("m", "x", 9, stream=True), _openai.Reply(200, "", (*events, _openai.Event(2.0, "[DONE]"))))
    assert (answer.first_seconds, answer.last_seconds) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("replies", "cached", "why"),
    [
        ([reply(30, 255, [1.0, 2.0])], 0, "window-not-filled: 255 of 256"),
        ([reply(30, 256, [1.0, 2.0], finish="stop")], 0, "window-not-filled"),
        ([reply(30, 256, [1.0])], 0, "no-times"),
        ([reply(30, 256, [1.0, 2.0], cut=True)], 0, "truncated-stream"),
        ([reply(3000, 256, [1.0, 2.0])], 1024, "that is no cold measurement"),
    ],
)
def test_what_may_not_count_says_why(replies: list[_openai.Reply], cached: float, why: str) -> None:
    got = measured(DECODE, replies, cached)
    assert got["value"] is None and why in got["refused"]


def test_streams_together_are_timed_from_the_first_token_to_the_last() -> None:
    got = measured(_bench.Step("decode", 256, 2), [reply(30, 256, [1.0, 11.0]), reply(30, 256, [2.0, 12.0])])
    assert got["value"] == pytest.approx(2 * 255 / 11)


def test_a_prefill_beside_a_decode_must_be_beside_it() -> None:
    step = _bench.Step("mixed", 256, beside=1000)
    assert measured(step, [reply(30, 256, [1.0, 11.0]), reply(1000, 1, [5.0])])["value"] == pytest.approx(25.5)
    assert "was over before" in measured(step, [reply(30, 256, [1.0, 11.0]), reply(1000, 1, [0.9])])["refused"]


@given(st.text(max_size=8), st.text(max_size=8))
def test_another_salt_is_another_prompt_from_its_first_words_on(one: str, other: str) -> None:
    words = [_bench.text(salt, 200, 1.0).split() for salt in (one, other)]
    assert len(words[0]) == len(words[1]) == 200
    assert (words[0][:16] == words[1][:16]) == (one == other)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"kind": "decode", "tokens": 64}, "window of 64 tokens"),
        ({"kind": "warm", "tokens": 64}, "expected prefill, decode or mixed"),
        ({"kind": "prefill", "tokens": 64, "beside": 5}, "`beside` goes with mixed"),
        ({"kind": "mixed", "tokens": 256}, "`beside` goes with mixed"),
    ],
)
def test_a_step_that_would_mislead_is_refused(step: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _bench.step_of(step)


def document(**steps: list[float]) -> dict[str, Any]:
    """A document of decode steps with these values, synthetic."""
    provenance = {
        "image": "1659", "arguments": ["vllm", "serve", "--max-num-seqs", "2"], "environment": {"NCCL_PROTO": "aaa"}, "checkpoint": "c0",
        "kernel": "6.17", "driver": "", "nccl": ["2.30.7 abc"],
    }  # fmt: skip
    results = [
        _bench.concluded(_bench.Step("decode", 256, int(name[1:])), [repetition(value) for value in values])
        | {"memory_floor": {"t1": {"free_mib": 900, "available_mib": 2000}}, "client_cpu_share": 0.01}
        for name, values in steps.items()
    ]
    return {
        "version": 1, "utc": "2026-11-29T000000Z", "group": "g", "model": "<m>", "gate": "fabric gate passed", "gpu": "0 of 1 GPUs measured",
        "settings": {"profile": "p", "topology": "pair", "members": ["t1"]}, "provenance": {"t1": provenance}, "steps": results,
    }  # fmt: skip


def test_a_difference_within_the_spread_is_none() -> None:
    """0xBakeer/qwen38-flash-next-spark#6: six equal runs spread by 6.9 %."""
    before, after = document(x1=[35.3, 35.7, 34.7, 35.2, 36.1, 37.1]), document(x1=[36.2, 36.4, 35.9, 36.8, 36.0, 36.5])
    [same, figures] = bench_compare(before, after)
    assert same == "nothing that is known differs"
    assert "no difference shown" in figures


def test_what_differs_comes_before_how_fast() -> None:
    before, after = document(x1=[30, 30, 30], x2=[50, 50, 50]), document(x1=[40, 40, 40], x4=[9, 9, 9])
    after["provenance"]["t1"] |= {
        "kernel": "7.0",
        "arguments": ["vllm", "serve", "--max-num-seqs", "4"],
        "environment": {"NCCL_PROTO": "bbb", "NEW": "c"},
    }
    lines = bench_compare(before, after)
    assert lines[:4] == [
        "t1.arguments: 2 became 4",
        "t1.environment.NCCL_PROTO: aaa became bbb",
        "t1.environment.NEW: None became c",
        "t1.kernel: 6.17 became 7.0",
    ]
    assert "30 to 40 (+33.3%), faster" in lines[4]
    assert "only before" in lines[5] and "only after" in lines[6]


def test_a_value_that_another_option_has_as_well_is_told_apart() -> None:
    before, after = document(x1=[30, 30, 30]), document(x1=[30, 30, 30])
    for side, tokens in ((before, "64"), (after, "512")):
        side["provenance"]["t1"]["arguments"] = ["--max-model-len", "512", "--max-num-batched-tokens", tokens]
    assert bench_compare(before, after)[0] == "t1.arguments: 64 became 512"


def test_a_figure_that_was_refused_is_compared_with_nothing() -> None:
    lines = bench_compare(document(x1=[30, 30]), document(x1=[40, 40, 40]))
    assert "no figure before: 2 of 2 repetitions count" in lines[-1]


def test_documents_follow_the_schema_and_a_report_shows_everything() -> None:
    whole = document(x1=[20, 30, 30, 30.4], x2=[50, 50])
    Draft202012Validator(_bench_schema.DOCUMENT).validate(whole)
    broken = copy.deepcopy(whole)
    broken["steps"][0]["median"] = "fast"
    assert not Draft202012Validator(_bench_schema.DOCUMENT).is_valid(broken)
    pictures = _report.plots(whole)
    assert set(pictures) == {"decode"} and pictures == _report.plots(whole)
    page = _report.html(whole, pictures)
    assert "<script" not in page and not re.search(r"(src|href)=[\"'](?!#)", page) and "&lt;m&gt;" in page
    assert "!20" in page and "2 of 2 repetitions count" in page


def test_variables_are_told_apart_by_hashes_and_secrets_not_at_all() -> None:
    kept = _provenance.hashed(b"NCCL_PROTO=LL\0VLLM_API_KEY=secret\0HF_TOKEN=t\0HOSTNAME=t1\0broken\0")
    assert list(kept) == ["NCCL_PROTO"] and len(kept["NCCL_PROTO"]) == 12
    assert _provenance.hashed(b"NCCL_PROTO=Simple\0") != kept


def test_a_checkpoint_is_told_by_its_verified_files() -> None:
    stamps = {"files": {"a": {"sha256": "1"}, "b": {"sha256": "2"}}}
    assert _provenance.checkpoint_digest("") == "" == _provenance.checkpoint_digest("{}")
    assert _provenance.checkpoint_digest(json.dumps(stamps)) != _provenance.checkpoint_digest(json.dumps({"files": {"a": {"sha256": "1"}}}))


@pytest.mark.parametrize(
    "step",
    [_bench.Step("prefill", 300), _bench.Step("decode", 256), _bench.Step("decode", 256, 4), _bench.Step("mixed", 256, beside=2000)],
    ids=lambda step: step.name,
)
def test_the_client_measures_an_endpoint(step: _bench.Step) -> None:
    # What has to be beside a decode ends when that is halfway, and no stream is so short that a thread which waits for its turn sees it in one piece.
    fault = "prefill-beside" if step.kind == "mixed" else ""
    with Engine(fault, token_s=0.003, prefill_s=0.0001) as engine:
        result = serving_bench.measure(_endpoint.Endpoint("127.0.0.1", engine.port, KEY, 30), MODEL, step, 3)
    assert result["refused"] == "" and result["median"] > 0
    wanted = step.beside if step.kind == "mixed" else step.tokens if step.kind == "prefill" else None
    if wanted:
        assert abs(result["repetitions"][0]["requests"][-1]["prompt_tokens"] - wanted) < wanted / 5
    Draft202012Validator(_bench_schema.STEP).validate(result | {"memory_floor": {}, "client_cpu_share": 0.0})


def test_a_server_that_does_not_fill_the_window_gives_no_figure() -> None:
    with Engine("window-not-filled", token_s=0.0001) as engine:
        result = serving_bench.measure(_endpoint.Endpoint("127.0.0.1", engine.port, KEY, 30), MODEL, DECODE, 3)
    assert result["median"] is None and "window-not-filled: 246 of 256 tokens" in result["refused"]
