# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the probes read out of an answer is what a client of the openai library reads, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _endpoint, _openai, _probes
from openai import OpenAI

from .fake_engine import KEY, MODEL, Engine

PROMPT = "What is 17*19? Reply with the integer only."


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A good one."""
    with Engine() as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[OpenAI]:
    """The library, at that engine."""
    with OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def ours(engine: Engine, request: _openai.Request) -> _openai.Answer:
    """The same answer by the probes' reader."""
    return _openai.read(request, _endpoint.Endpoint("127.0.0.1", engine.port, KEY, 20).ask(request))


def body(**more: Any) -> dict[str, Any]:
    """Arguments that both take."""
    return {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64, "temperature": 0, **more}


def test_a_tool_call_is_the_same(engine: Engine, client: OpenAI) -> None:
    theirs = client.chat.completions.create(**body(tools=[_probes.WEATHER])).choices[0]
    answer = ours(engine, _openai.chat(MODEL, PROMPT, 64, tools=[_probes.WEATHER]))
    assert theirs.message.tool_calls
    [call] = theirs.message.tool_calls
    assert call.type == "function"
    assert answer.tool_calls == (_openai.ToolCall(call.id, call.function.name, call.function.arguments),)
    assert answer.finish == theirs.finish_reason == "tool_calls"


def test_a_streamed_tool_call_is_the_same(engine: Engine, client: OpenAI) -> None:
    with client.chat.completions.stream(**body(tools=[_probes.WEATHER])) as stream:
        stream.until_done()
        theirs = stream.get_final_completion().choices[0]
    answer = ours(engine, _openai.chat(MODEL, PROMPT, 64, tools=[_probes.WEATHER], stream=True))
    assert theirs.message.tool_calls
    [call] = theirs.message.tool_calls
    assert answer.tool_calls == (_openai.ToolCall(call.id, call.function.name, call.function.arguments),)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_text_are_the_same(engine: Engine, client: OpenAI, stream: bool) -> None:
    thinking = {"thinking": True}
    answer = ours(engine, _openai.chat(MODEL, PROMPT, 64, thinking, stream=stream))
    arguments = body(extra_body={"chat_template_kwargs": thinking})
    if stream:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**arguments, stream=True) if chunk.choices]
        text, thoughts = ("".join(getattr(delta, name, None) or "" for delta in deltas) for name in ("content", "reasoning"))
    else:
        message = client.chat.completions.create(**arguments).choices[0].message
        text, thoughts = message.content or "", getattr(message, "reasoning", "")
    assert (answer.text, answer.reasoning) == (text, thoughts)
    assert text == "323" and thoughts.startswith("17*19 is 17*20")


def test_a_completion_and_its_counts_are_the_same(engine: Engine, client: OpenAI) -> None:
    theirs = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1)
    answer = ours(engine, _openai.completion(MODEL, PROMPT, 8, logprobs=1))
    assert theirs.usage and theirs.choices[0].logprobs
    assert (answer.text, dict(answer.usage)) == (theirs.choices[0].text, theirs.usage.model_dump(exclude_none=True))
    assert list(answer.logprobs or ()) == theirs.choices[0].logprobs.token_logprobs
