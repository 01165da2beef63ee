# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges of what a model answered: each raises Faulty with the name of what is wrong, or returns."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ._openai import Answer, Fault, Faulty

THINKING = ("enable_thinking", "thinking")
"""Template arguments that switch thinking, by the names that vLLM's DeepSeek V4.1 renderer takes."""
THOUGHT_MARKS = re.compile(r"</?think(ing)?>|<\|?(begin|end)_of_thought", re.IGNORECASE)
CALL_MARKS = re.compile(r"<｜|</?tool_calls?>|\binvoke name=|<function|\"(arguments|name)\"\s*:|get_weather\s*[({]", re.IGNORECASE)
"""What a tool call looks like where no parser took it out of the text: XML, DeepSeek's DSML, JSON or a call. The function's name alone may be prose."""
REPEATED = re.compile(r"(.{1,24}?)\1{5,}", re.DOTALL)
LEAST_FOREIGN = 3
"""Fewer tokens that are the other stream's may be chance: a comma is in many answers."""
SUSPECTS = "suspects, in the order in which they were the cause elsewhere: the MoE back end, CUDA graphs, the draft model"
"""MiaAI-Lab (one FP4 MoE path), tonyd2wild (bisected to graphs and to the draft model), vllm#14126 (NaN read as exclamation marks)."""


def thinks(template: Mapping[str, Any] | None) -> bool | None:
    """Whether template arguments ask for thinking; None where they say nothing of it."""
    said = [bool(value) for name, value in (template or {}).items() if name in THINKING]
    return said[0] if said else None


def judge_text(answer: Answer, prompt: str, expect: str, thinking: bool | None) -> None:
    """A known answer in the content; thoughts where they belong: in their own field with thinking, nowhere without."""
    text, question = answer.text, f"the answer to {prompt!r}"
    if THOUGHT_MARKS.search(text):
        raise Faulty(Fault("reasoning-in-content", f"{question} has thoughts in its content: {text[:120]!r}; is the reasoning parser set?"))
    if not text.strip():
        if answer.finish == "length" and answer.reasoning:
            raise Faulty(
                Fault(
                    "budget-spent",
                    f"{question} is empty: all {answer.count('completion_tokens')} tokens went into thoughts, raise max_tokens",
                )
            )
        if answer.reasoning:
            raise Faulty(Fault("answer-in-reasoning", f"{question} is empty, and its thoughts end with {answer.reasoning[-80:]!r}"))
        raise Faulty(Fault("empty-answer", f"{question} is empty, it ended with {answer.finish!r}"))
    if thinking is False and answer.reasoning:
        raise Faulty(Fault("reasoning-not-off", f"{question} has thoughts although thinking is off: {answer.reasoning[:80]!r}"))
    matches = re.search(expect, text, re.IGNORECASE)
    if thinking and not answer.reasoning:
        if not matches and len(text.split()) > 12:
            raise Faulty(
                Fault("reasoning-in-content", f"{question} has its thoughts in the content: {text[:120]!r}; is the reasoning parser set?")
            )
        raise Faulty(Fault("no-reasoning", f"{question} has no thoughts although thinking is on"))
    if not matches:
        if what := garbled(text):
            raise Faulty(Fault("token-soup", f"{question} is {what}, {text[:60]!r}; {SUSPECTS}"))
        raise Faulty(Fault("wrong-answer", f"{question} is {text!r}, which does not match {expect!r}"))


def garbled(text: str) -> str:
    """In what way a text is none: empty for an ordinary one. Only of use where the answer is known: a song may repeat itself."""
    packed = "".join(text.split())
    if "\ufffd" in text:
        return "broken characters"
    if len(packed) >= 8 and max(packed.count(character) for character in set(packed)) >= 0.8 * len(packed):
        return "one character again and again"
    repeated = REPEATED.search(text)
    if repeated and len(repeated[0]) >= 0.6 * len(text):
        return f"{repeated[1]!r} again and again"
    return ""


def judge_logprobs(answer: Answer) -> None:
    """As many as tokens, each a finite number that is no probability above one (a thousandth is rounding's)."""
    values = answer.logprobs
    if not values:
        raise Faulty(Fault("empty-logprobs", "log probabilities were asked for, and none came"))
    tokens = answer.count("completion_tokens")
    if len(values) != tokens:
        raise Faulty(Fault("empty-logprobs", f"{tokens} tokens have {len(values)} log probabilities"))
    for place, value in enumerate(values, 1):
        if value is None or not math.isfinite(value):
            raise Faulty(Fault("nan-logprobs", f"token {place} of {tokens} has the log probability {value}"))
        if value > 0.001:
            raise Faulty(Fault("impossible-logprobs", f"token {place} of {tokens} has the log probability {value:g}, which is above 0"))


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Where two sequences part; the shorter one's length where it is the beginning of the other."""
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def judge_same(answers: Sequence[Answer], code: str, what: str) -> None:
    """All answers are the first one."""
    for number, answer in enumerate(answers[1:], 2):
        if answer.symbols != answers[0].symbols:
            unit = "token" if answer.token_ids else "character"
            place = first_difference(answers[0].symbols, answer.symbols)
            where = f"{unit} {place + 1} of {len(answers[0].symbols)}"
            raise Faulty(Fault(code, f"{what} has another answer the time {number}: {where}, {answers[0].text!r} and {answer.text!r}"))


def counter(exposition: str, name: str) -> float | None:
    """Sum of a Prometheus counter over its labels; None where the text has none of that name."""
    values = [line.rsplit(" ", 1)[1] for line in exposition.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
    return sum(map(float, values)) if values else None


def stop_string(text: str) -> str:
    """A piece from the middle of an answer; Faulty where it is too short to have one."""
    middle = text[len(text) // 2 :][:4]
    if len(middle) < 4 or len(text) < 16:
        raise Faulty(Fault("empty-answer", f"the answer {text!r} is too short to be stopped within"))
    return middle


def judge_stop(free: str, word: str, answer: Answer, streamed: bool) -> None:
    """The answer is what the free one has before the stop string."""
    how, expected = "streamed" if streamed else "whole", free[: free.index(word)]
    if answer.finish != "stop" and word not in answer.text and answer.text == expected:
        raise Faulty(Fault("wrong-finish-reason", f"an answer ({how}) that a stop string ended says {answer.finish!r}, expected 'stop'"))
    if word in answer.text:
        name = "stop-included" if answer.text.endswith(word) else "stop-ignored"
        raise Faulty(Fault(name, f"the answer ({how}) has the stop string {word!r} in it: {answer.text!r}"))
    if answer.text != expected:
        raise Faulty(Fault("stop-elsewhere", f"the answer ({how}) with the stop string {word!r} is {answer.text!r}, expected {expected!r}"))


def judge_streams(alone: Sequence[Answer], together: Sequence[Answer], exact: bool) -> None:
    """Each stream has its own answer.

    Batching may change an answer from some token on (other sums in floating point); what follows is then new. A stream that got tokens of the
    other one has them in the other's order: what is not its own is then a part of the other's answer.
    """
    for place, (own, other, got) in enumerate(zip(alone, reversed(alone), together, strict=True), 1):
        mine, theirs, came = (answer.token_ids or answer.pieces for answer in (own, other, got))
        if came == mine:
            continue
        foreign = without(came, mine)
        if len(foreign) >= LEAST_FOREIGN and not without(foreign, theirs):
            raise Faulty(
                Fault("mixed-streams", f"stream {place} of 2 carries tokens of the other one: {got.text!r} instead of {own.text!r}")
            )
        if exact:
            raise Faulty(Fault("batch-changes-answer", f"stream {place} of 2 is {got.text!r} beside another, and alone {own.text!r}"))


def without(sequence: Sequence[Any], part: Sequence[Any]) -> list[Any]:
    """What is left of a sequence without its longest common subsequence with `part`."""
    # lengths[i][j]: of the longest one of sequence[i:] and part[j:].
    lengths = [[0] * (len(part) + 1) for _row in range(len(sequence) + 1)]
    for i in reversed(range(len(sequence))):
        for j in reversed(range(len(part))):
            lengths[i][j] = lengths[i + 1][j + 1] + 1 if sequence[i] == part[j] else max(lengths[i + 1][j], lengths[i][j + 1])
    left, i, j = [], 0, 0
    while i < len(sequence):
        if j < len(part) and sequence[i] == part[j]:
            i, j = i + 1, j + 1
        elif j < len(part) and lengths[i][j + 1] >= lengths[i + 1][j]:
            j += 1
        else:
            left.append(sequence[i])
            i += 1
    return left


def judge_tool_call(answer: Answer, name: str, arguments: Mapping[str, str]) -> None:
    """One call of the function with these arguments (any case of letters), in its field and not in the text."""
    if not answer.tool_calls:
        if CALL_MARKS.search(answer.text + answer.reasoning):
            raise Faulty(Fault("tool-call-as-text", f"the call of {name} came as text: {answer.text[:120]!r}; is the tool parser set?"))
        raise Faulty(Fault("no-tool-call", f"{name} was not called, the answer is {answer.text[:120]!r}"))
    call = answer.tool_calls[0]
    if call.name != name:
        raise Faulty(Fault("wrong-tool", f"{call.name!r} was called, the only function is {name!r}"))
    if not call.id:
        raise Faulty(Fault("bad-tool-call", "the call has no id, so no result can answer it"))
    try:
        given = json.loads(call.arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise Faulty(Fault("bad-tool-arguments", f"the call's arguments are no JSON object: {call.arguments!r}"))
    wrong = {key: given.get(key) for key, value in arguments.items() if value not in str(given.get(key, "")).lower()}
    if wrong:
        raise Faulty(Fault("bad-tool-arguments", f"the call's arguments are {call.arguments}, expected {json.dumps(dict(arguments))}"))
    if answer.finish != "tool_calls":
        raise Faulty(Fault("wrong-finish-reason", f"an answer with a call ended with {answer.finish!r}, expected 'tool_calls'"))
    if CALL_MARKS.search(answer.text):
        raise Faulty(Fault("tool-call-as-text", f"the call also came as text: {answer.text[:120]!r}"))


def number(salt: str) -> str:
    """Five digits that follow from a salt: what a needle is, and no model can guess."""
    return str(10000 + int(hashlib.sha256(salt.encode()).hexdigest(), 16) % 90000)
