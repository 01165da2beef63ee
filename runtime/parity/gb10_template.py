# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether the server renders conversations as the model's own encoder does. Runs in the serving container; needs nothing but Python and the encoder.

usage: docker exec -i gb10-GROUP python3 - [--encoder FILE.py] [--url URL] [--model NAME] < runtime/parity/gb10_template.py

The encoder is a file with `encode_messages(messages, thinking_mode, reasoning_effort)`, as the checkpoint's own, or, unless one is named, vLLM's copy of it for
DeepSeek V4.1. Both sides become tokens by the server's tokenizer. One line per conversation; status 1 where one differs. The key is the container's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

Conversation = list[dict[str, Any]]

EFFORTS = {"low": 50, "high": 75, "max": 100}
"""What the words stand for in the reference encoder; any number from 1 to 100 is an effort too."""
OTHER_EFFORTS = (1, 33, 99)
NO_EFFORTS = (0, 101, "little")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM, USER = {"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is 17*19?"}
ANSWER = {"role": "assistant", "content": "323"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": f"call-{city}", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for city in ("Oslo", "Rome")
    ],
}
# Results in the other order than the calls.
RESULTS = [{"role": "tool", "tool_call_id": f"call-{city}", "content": f"{city}: mild"} for city in ("Rome", "Oslo")]
CONVERSATIONS: dict[str, tuple[Conversation, bool]] = {
    "user": ([USER], False),
    "system, user": ([SYSTEM, USER], False),
    "a second turn": ([SYSTEM, USER, ANSWER, {"role": "user", "content": "And 17*20?"}], False),
    "user, user": ([USER, {"role": "user", "content": "Digits only."}], False),
    "tools offered": ([SYSTEM, USER], True),
    "tools called": ([SYSTEM, {"role": "user", "content": "Weather in Oslo and Rome?"}, CALLS, *RESULTS], True),
    "tools called, then a turn": (
        [{"role": "user", "content": "Weather in Oslo and Rome?"}, CALLS, *RESULTS, {"role": "assistant", "content": "Mild."}, USER],
        True,
    ),
    "letters beyond ASCII": ([{"role": "user", "content": "Größe ≥ 5 µm, 東京?\n\n"}], False),
}


class Server:
    """The tokenizer behind the API."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.key = url, os.environ.get("VLLM_API_KEY", "")
        self.model = model or self.ask("/v1/models", None)["data"][0]["id"]

    def ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One request; raises HTTPError."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: dict[str, Any] = json.load(answer)
            return said

    def rendered(self, messages: Conversation, tools: bool, thinking: bool, effort: str | int | None) -> list[int]:
        """Tokens of a conversation by the server's own template. The two names of the switch are those that templates of this model take."""
        arguments: dict[str, Any] = {"thinking": thinking, "enable_thinking": thinking}
        arguments |= {} if effort is None else {"reasoning_effort": effort}
        body = {"model": self.model, "messages": messages, "add_generation_prompt": True, "chat_template_kwargs": arguments}
        tokens: list[int] = self.ask("/tokenize", body | ({"tools": [TOOL]} if tools else {}))["tokens"]
        return tokens

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text that has its special tokens in it."""
        tokens: list[int] = self.ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})["tokens"]
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Text of tokens."""
        return str(self.ask("/detokenize", {"model": self.model, "tokens": tokens})["prompt"])


def reference(path: str) -> Callable[..., str]:
    """`encode_messages` of a file, or of vLLM's copy."""
    if not path:
        from vllm.tokenizers.deepseek_v41_encoding import encode_messages

        return encode_messages  # type: ignore[no-any-return]
    specification = importlib.util.spec_from_file_location("encoder", path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.encode_messages  # type: ignore[no-any-return]


def encoded(encode: Callable[..., str], messages: Conversation, tools: bool, thinking: bool, effort: str | int | None) -> str:
    """The text that the model's encoder makes; tools belong to the system's turn there."""
    messages = json.loads(json.dumps(messages))
    if tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = [TOOL]
    return encode(messages, thinking_mode="thinking" if thinking else "chat", reasoning_effort="high" if effort is None else effort)


def difference(server: Server, ours: list[int], theirs: list[int]) -> str:
    """Where two renderings part, as text."""
    place = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))  # noqa: B905
    begin = max(place - 4, 0)
    said, wanted = (server.text(side[begin : place + 8]) for side in (ours, theirs))
    return f"token {place + 1}: the server has {said!r}, the encoder {wanted!r}"


def cases() -> list[tuple[str, Conversation, bool, bool, str | int | None]]:
    """Everything that is compared: name, messages, tools, thinking, effort."""
    listed: list[tuple[str, Conversation, bool, bool, str | int | None]] = [
        (f"{name}, thinking {'on' if thinking else 'off'}", messages, tools, thinking, None)
        for name, (messages, tools) in CONVERSATIONS.items()
        for thinking in (False, True)
    ]
    return listed + [(f"effort {effort}", [SYSTEM, USER], False, True, effort) for effort in (*EFFORTS, *OTHER_EFFORTS)]


def main() -> int:
    """Compare, print, say how many differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--encoder", default="")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    encode, server, wrong = reference(options.encoder), Server(options.url, options.model), 0

    def line(name: str, problem: str) -> None:
        nonlocal wrong
        wrong += bool(problem)
        print(f"{'differs' if problem else 'same':<8} {name}{': ' if problem else ''}{problem}", flush=True)

    for name, messages, tools, thinking, effort in cases():
        try:
            ours = server.rendered(messages, tools, thinking, effort)
            theirs = server.tokens(encoded(encode, messages, tools, thinking, effort))
            line(name, "" if ours == theirs else difference(server, ours, theirs))
        except urllib.error.HTTPError as error:
            line(name, f"the server refuses it with {error.code}: {error.read(200).decode('utf-8', 'replace')}")
    for word, number in EFFORTS.items():
        same = server.rendered([USER], False, True, word) == server.rendered([USER], False, True, number)
        line(f"effort {word} is {number}", "" if same else "the server renders them differently")
    for effort in NO_EFFORTS:
        try:
            server.rendered([USER], False, True, effort)
            line(f"effort {effort} is none", "the server accepts it")
        except urllib.error.HTTPError as error:
            line(f"effort {effort} is none", "" if 400 <= error.code < 500 else f"the server fails with {error.code}")
    print(f"{wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
