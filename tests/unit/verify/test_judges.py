# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What answers are taken for, from public failure reports and from scripted replies; no server."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _answers, _openai, _probes, _stripes
from ansible_collections.gb10.cluster.plugins.module_utils._openai import Answer, Faulty
from hypothesis import given
from hypothesis import strategies as st

PROMPT = "What is 17*3? Reply with the integer only."


def code(text: str = "", reasoning: str = "", finish: str = "stop", thinking: bool | None = None, expect: str = "51") -> str:
    """The name that an answer's fault gets; empty for none."""
    try:
        _answers.judge_text(
            Answer(text=text, reasoning=reasoning, finish=finish, usage={"completion_tokens": 64}), PROMPT, expect, thinking
        )
    except Faulty as faulty:
        return faulty.faults[0].code
    return ""


def reply_of(message: dict[str, Any], finish: str) -> Answer:
    """A chat's answer as read from its JSON."""
    request = _openai.chat("m", PROMPT, 64)
    usage = {"prompt_tokens": 5, "completion_tokens": 64, "total_tokens": 69}
    body = {"id": "a", "model": "m", "choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}], "usage": usage}
    return _openai.read(request, _openai.Reply(200, json.dumps(body)))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_are_read_by_both_names_and_null_is_no_text(field: str) -> None:
    """NVIDIA/NemoClaw#8878, sgl-project/sglang#37645."""
    answer = reply_of({"content": None, field: "First, 17*3 is 51..."}, "length")
    assert (answer.text, answer.reasoning) == ("", "First, 17*3 is 51...")
    assert code(answer.text, answer.reasoning, answer.finish) == "budget-spent"
    assert code("", "First, 17*3 is 51", "stop") == "answer-in-reasoning"
    assert code("") == "empty-answer"
    assert code("51") == ""


@pytest.mark.parametrize("soup", ["care" * 16, "!!!!!!!!", "\ufffd the the the"])
def test_token_soup_is_told_from_a_wrong_answer(soup: str) -> None:
    """MiaAI-Lab's GLM kit #1, tonyd2wild's V4.1 #2, vllm#14126. A song that was asked for may repeat itself."""
    assert code(soup) == "token-soup"
    assert code("It is 52.") == "wrong-answer"
    assert code("ha ha ha ha ha ha ha ha", expect="ha ha ha") == ""


CALL = _openai.ToolCall("call-1", "get_weather", '{"city": "Paris", "unit": "celsius"}')


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get_weather"}</tool_call>',
        '<｜DSML｜invoke name="get_weather">',
        'get_weather(city="Paris")',
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    ],
)
def test_a_call_in_the_text_is_seen_in_any_form_and_prose_about_one_is_none(text: str) -> None:
    for answer in (Answer(text=text, finish="stop"), Answer(text=text, tool_calls=(CALL,), finish="tool_calls")):
        with pytest.raises(Faulty) as caught:
            _answers.judge_tool_call(answer, "get_weather", {"city": "paris"})
        assert caught.value.faults[0].code == "tool-call-as-text"
    said = Answer(text="I shall ask get_weather about Paris.", tool_calls=(CALL,), finish="tool_calls")
    _answers.judge_tool_call(said, "get_weather", {"city": "paris", "unit": "celsius"})


def test_thoughts_belong_into_their_field() -> None:
    assert code("<think>17*3</think>51") == "reasoning-in-content"
    assert code("51", "let me see", thinking=False) == "reasoning-not-off"
    assert code("51", thinking=True) == "no-reasoning"
    assert code("51", "17*3 is 51", thinking=True) == ""


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_what_is_left_of_a_sequence_keeps_its_order_and_nothing_of_a_whole_part_is_left(one: list[int], other: list[int]) -> None:
    left = _answers.without(one, other)
    assert _answers.without(left, one) == []
    assert _answers.without(one, one) == []
    assert (left == one) == (not set(one) & set(other))


@given(st.lists(st.booleans(), min_size=12, max_size=30))
def test_any_interleaving_of_two_streams_is_called_mixed(turns: list[bool]) -> None:
    """Own tokens 0, 1, 2 ... and foreign ones 100, 101 ...: what came is some of each, in their order."""
    own, other = range(30), range(100, 130)
    came = [own[place] if mine else other[place] for place, mine in enumerate(turns)]
    answers = [Answer(token_ids=tuple(tokens)) for tokens in (own, other, came)]
    together = [answers[2], answers[1]]
    if turns.count(False) < _answers.LEAST_FOREIGN:
        return
    with pytest.raises(Faulty, match="carries tokens of the other one"):
        _answers.judge_streams(answers[:2], together, exact=False)


def test_a_batch_that_changes_an_answer_is_no_mixing() -> None:
    own, other = Answer(token_ids=tuple(range(30))), Answer(token_ids=tuple(range(100, 130)))
    changed = Answer(token_ids=(*range(20), *range(200, 210)))
    _answers.judge_streams([own, other], [changed, other], exact=False)
    with pytest.raises(Faulty) as caught:
        _answers.judge_streams([own, other], [changed, other], exact=True)
    assert caught.value.faults[0].code == "batch-changes-answer"


def test_parity_names_the_token_that_differs() -> None:
    target = _probes.Target("m", 0, "", {"prompt": "p", "token_ids": [1, 2, 3]})

    def verdict(ids: list[int]) -> dict[str, Any]:
        usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
        body = {"id": "a", "model": "m", "choices": [{"text": "x", "token_ids": ids, "finish_reason": "length"}], "usage": usage}
        return _probes.conduct(_probes.parity(target, {}), lambda requests: [_openai.Reply(200, json.dumps(body)) for dummy in requests])

    assert verdict([1, 2, 3])["verdict"] == "passed"
    assert "token 2 of 3" in verdict([1, 5, 3])["faults"][0]["sentence"]
    assert "token 3 of 3" in verdict([1, 2])["faults"][0]["sentence"]


def test_the_image_is_a_png_of_three_stripes() -> None:
    data = _stripes.png()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND" + struct.pack(">I", zlib.crc32(b"IEND")))
    place = data.index(b"IDAT")
    [size] = struct.unpack(">I", data[place - 4 : place])
    rows = zlib.decompress(data[place + 4 : place + 4 + size])
    assert len(rows) == 30 * (1 + 3 * 90)
    assert rows[1:271] == b"\xff\0\0" * 30 + b"\0\xff\0" * 30 + b"\0\0\xff" * 30


def test_what_is_not_probed_says_why() -> None:
    said = {name: why for name, settings, why in _probes.selection({"chat": {}, "vision": None}, {}, []) if settings is None}
    assert said["vision"] == "null in the profile"
    assert said["tools"] == "not in the profile"
    assert said["parity"] == "no reference tokens were given"
    assert "health" not in said and "chat" not in said
    assert {why for _name, settings, why in _probes.selection({"chat": {}}, {}, ["key"]) if settings is None} == {"not asked for"}


def test_only_a_group_that_began_after_the_change_is_believed() -> None:
    """defilantech/LLMKube: verification passed against the old ring, for it ran before the drop."""
    assert _probes.not_yet({}, 0) == ""
    assert "absent" in _probes.not_yet({}, 100)
    assert "loading" in _probes.not_yet({"phase": "loading", "since": 200}, 100)
    assert "still the old one: it began 10 s before" in _probes.not_yet({"phase": "serving", "since": 90}, 100)
    assert _probes.not_yet({"phase": "serving", "since": 101}, 100) == ""


def test_evidence_can_always_be_written_and_stays_small() -> None:
    request = _openai.completion("m", list(range(100_000)), 1)
    body = '{"choices": [{"logprobs": {"token_logprobs": [NaN, -Infinity]}}], "text": "' + "x" * 50_000 + '"}'
    kept = json.dumps(_openai.evidence(request, _openai.Reply(200, body)), allow_nan=False)
    assert len(kept) < 6000 and '"nan"' in kept and '"-inf"' in kept
