# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to an OpenAI endpoint and its replies as data, and what is wrong with a reply's form, whatever it says.

Field names are those of OpenAI's API; vLLM adds `reasoning` (`reasoning_content` before 0.12), `return_token_ids`, `ignore_eos` and `cached_tokens`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, MODELS, HEALTH, METRICS = "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"
DONE = "[DONE]"
CHUNK = "chat.completion.chunk"
KEEP_TEXT, KEEP_ITEMS, KEEP_EVENTS = 2000, 64, 400
"""What evidence keeps of a long text, list or stream: enough to see what went wrong, without the 500,000 tokens of a long prompt."""


@dataclass(frozen=True)
class Request:
    """What is to be asked. A GET has no body; `prompt_tokens` (about) gives a long prompt its time."""

    path: str
    body: Mapping[str, Any] | None = None
    with_key: bool = True
    prompt_tokens: int = 0

    @property
    def is_stream(self) -> bool:
        return bool(self.body and self.body.get("stream"))


@dataclass(frozen=True)
class Event:
    """Data of one event and when it came, in seconds after the request."""

    seconds: float
    data: str


@dataclass(frozen=True)
class Reply:
    """What came back: `status` 0 where nothing did. `text` is the body of an answer that was no stream; `error` says what ended it early."""

    status: int = 0
    text: str = ""
    events: tuple[Event, ...] = ()
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    cut: bool = False  # the connection ended before the answer did


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: a name that documentation and tests know, and a sentence."""

    code: str
    sentence: str


class Faulty(Exception):
    """Ends a probe with the faults that were found."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.sentence for fault in faults))
        self.faults = faults


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, its arguments as the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """What a chat or completion said, streamed or not. `logprobs` has None where a value was null; it is None where there were none at all."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    model: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()  # of the text, as they came
    first_seconds: float | None = None  # to the first delta of any kind
    last_seconds: float = 0.0

    @property
    def symbols(self) -> tuple[Any, ...]:
        """Token ids where the server gives them, else characters: what two answers are compared by."""
        return self.token_ids or tuple(self.text)

    def count(self, name: str) -> int:
        """A count of `usage`; -1 where it is absent or no number."""
        value = self.usage.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else -1


def document(reply: Reply) -> Any:
    """The JSON of an answer that was no stream. Raises Faulty."""
    _arrived(reply)
    try:
        return json.loads(reply.text)
    except ValueError:
        raise Faulty(Fault("not-json", f"the answer is no JSON but begins with {reply.text[:60]!r}")) from None


def read(request: Request, reply: Reply) -> Answer:
    """The answer to a chat or completion. Raises Faulty with everything that is wrong with its form."""
    chunks, whole = _chunks(reply) if request.is_stream else ([(reply.seconds, document(reply))], True)
    if (
        request.is_stream
        and request.path == CHAT
        and (strange := [chunk.get("object") for _seconds, chunk in chunks if chunk.get("object") != CHUNK])
    ):
        raise Faulty(Fault("wrong-object", f"an event is a {strange[0]!r} and no {CHUNK!r}: OpenAI's own client passes over it"))
    answer = _joined(chunks, "delta" if request.is_stream else "message")
    faults = [*_form_faults(request, answer), *(_usage_faults(request.body or {}, answer) if whole else [])]
    if not any(chunk.get("choices") for _seconds, chunk in chunks):
        faults = [Fault("empty-choices", "the answer has status 200 and no choices")]
    elif not whole or (request.is_stream and not answer.finish):
        faults.insert(
            0, Fault("truncated-stream", f"the stream ended after {len(chunks)} events without its end mark; so far {answer.text[-60:]!r}")
        )
    if faults:
        raise Faulty(*faults)
    return answer


def _arrived(reply: Reply) -> None:
    """A reply with status 200 that is whole; else Faulty says how far it came."""
    begun = len(reply.text) + len(reply.events)
    if reply.timed_out:
        name, what = ("slow-trickle", "the answer was still coming") if begun or reply.status else ("no-answer", "no answer")
        raise Faulty(Fault(name, f"{what} after {reply.seconds:.0f} s"))
    if not reply.status:
        raise Faulty(Fault("connection-lost", f"no answer: {reply.error}"))
    if reply.status != 200:
        name = "refused" if 400 <= reply.status < 500 else "server-error"
        raise Faulty(Fault(name, f"the request ended with {reply.status}: {_message(reply.text)}"))
    if reply.cut and not reply.events:
        raise Faulty(Fault("truncated-answer", f"the connection ended within the answer: {reply.error}"))


def _message(text: str) -> str:
    """What an error says: its message where it is JSON."""
    try:
        said = json.loads(text)
        said = said.get("error", said)
        return str(said.get("message", said) if isinstance(said, Mapping) else said)[:300]
    except (ValueError, AttributeError):
        return text[:300]


def _chunks(reply: Reply) -> tuple[list[tuple[float, dict[str, Any]]], bool]:
    """The chunks of a stream with their times, and whether its end mark came."""
    _arrived(reply)
    chunks = []
    for event in reply.events:
        if event.data == DONE:
            return chunks, True
        try:
            chunk = json.loads(event.data)
        except ValueError:
            raise Faulty(Fault("not-json", f"an event is no JSON but begins with {event.data[:60]!r}")) from None
        if not isinstance(chunk, dict):
            raise Faulty(Fault("not-json", f"an event is no object but {event.data[:60]!r}"))
        if "error" in chunk:
            raise Faulty(Fault("server-error", f"the stream reports an error: {_message(event.data)}"))
        chunks.append((event.seconds, chunk))
    return chunks, False


def _joined(chunks: Sequence[tuple[float, Any]], part: str) -> Answer:
    """One answer of its chunks: texts in their order, tool calls by their index."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: dict[int, dict[str, str]] = {}
    token_ids: list[int] = []
    logprobs: list[float | None] | None = None
    said: dict[str, Any] = {"finish": "", "usage": {}, "prompt_token_ids": (), "model": ""}
    ids: dict[str, None] = {}
    first = last = None
    for seconds, chunk in chunks:
        if not isinstance(chunk, Mapping):
            raise Faulty(Fault("not-json", "the answer is no JSON object"))
        ids[str(chunk.get("id"))] = None
        said["model"] = said["model"] or str(chunk.get("model") or "")
        said["usage"] = chunk.get("usage") or said["usage"]
        choice = next(iter(chunk.get("choices") or []), {})
        message = choice.get(part) or {}
        pieces = {
            "text": choice.get("text") or message.get("content") or "",
            "reasoning": message.get("reasoning") or message.get("reasoning_content") or "",
        }
        for name, piece in pieces.items():
            texts[name].append(str(piece))
        for place, call in enumerate(message.get("tool_calls") or []):
            known = calls.setdefault(call.get("index", place), {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            known["id"] += call.get("id") or ""
            known["name"] += function.get("name") or ""
            known["arguments"] += function.get("arguments") or ""
        token_ids += choice.get("token_ids") or []
        said["prompt_token_ids"] = tuple(choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or said["prompt_token_ids"])
        said["finish"] = choice.get("finish_reason") or said["finish"]
        if (values := (choice.get("logprobs") or {}).get("token_logprobs")) is not None:
            logprobs = [*(logprobs or []), *values]
        if any(pieces.values()) or message.get("tool_calls") or choice.get("token_ids"):
            first, last = (seconds if first is None else first), seconds
    return Answer(
        text="".join(texts["text"]),
        reasoning="".join(texts["reasoning"]),
        tool_calls=tuple(ToolCall(**calls[index]) for index in sorted(calls)),
        token_ids=tuple(token_ids),
        logprobs=None if logprobs is None else tuple(logprobs),
        ids=tuple(ids),
        pieces=tuple(filter(None, texts["text"])),
        first_seconds=first,
        last_seconds=last or 0.0,
        **said,
    )


def _form_faults(request: Request, answer: Answer) -> list[Fault]:
    faults = []
    asked = (request.body or {}).get("model")
    if answer.model != asked:
        faults.append(Fault("wrong-model", f"the answer is of model {answer.model!r}, asked was {asked!r}"))
    if len(answer.ids) > 1:
        faults.append(Fault("mixed-streams", f"one stream carries the answers {', '.join(answer.ids[:3])}"))
    if not request.is_stream and not answer.finish:
        faults.append(Fault("no-finish-reason", "the answer does not say why it ended"))
    return faults


def _usage_faults(body: Mapping[str, Any], answer: Answer) -> list[Fault]:
    """Counts that are absent, do not add up, or are not those of what was asked and came."""
    prompt, completion, total = (answer.count(f"{name}_tokens") for name in ("prompt", "completion", "total"))
    prompted = body.get("prompt")
    said = f"usage says {prompt} + {completion} = {total} tokens"
    wrong = None
    if min(prompt, completion, total) < 0:
        wrong = "the answer has no usage with prompt_tokens, completion_tokens and total_tokens"
    elif prompt + completion != total:
        wrong = f"{said}, which does not add up"
    elif answer.token_ids and completion != len(answer.token_ids):
        wrong = f"{said}, but {len(answer.token_ids)} tokens came"
    elif completion > body.get("max_tokens", math.inf):
        wrong = f"{said}, but at most {body['max_tokens']} were asked for"
    elif isinstance(prompted, list) and prompt != len(prompted):
        wrong = f"{said}, but the prompt has {len(prompted)} tokens"
    elif completion == 0 and (answer.text or answer.reasoning or answer.tool_calls):
        wrong = f"{said}, but text came"
    return [Fault("wrong-usage", wrong)] if wrong else []


def completion(model: str, prompt: str | Sequence[int], tokens: int, **more: Any) -> Request:
    """Greedy completion of exactly `tokens` tokens, with their ids where the server gives them."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    size = len(prompt) if not isinstance(prompt, str) else len(prompt) // 2
    return Request(COMPLETIONS, _with_usage(body | more), prompt_tokens=size)


def chat(model: str, content: Any, tokens: int, template: Mapping[str, Any] | None = None, **more: Any) -> Request:
    """Greedy chat of one user turn, with the template arguments of the profile's probe."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0}
    size = len(content) // 2 if isinstance(content, str) else 0
    return Request(CHAT, _with_usage(body | ({"chat_template_kwargs": dict(template)} if template else {}) | more), prompt_tokens=size)


def _with_usage(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream_options": {"include_usage": True}} if body.get("stream") else body


def evidence(request: Request, reply: Reply) -> dict[str, Any]:
    """Both as JSON that can be kept: long texts, lists and streams shortened, NaN and infinities as words."""
    answer: Any = reply.text
    if not reply.events:
        try:
            answer = json.loads(reply.text)
        except ValueError:
            answer = reply.text
    kept = {"status": reply.status, "seconds": round(reply.seconds, 3)}
    kept |= {"error": reply.error} if reply.error else {}
    kept |= {"events": [[round(event.seconds, 3), event.data] for event in reply.events]} if reply.events else {"body": answer}
    return {"path": request.path, "request": _short(request.body), "reply": _short(kept)}


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= KEEP_TEXT else f"{value[:KEEP_TEXT]}… ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        most = KEEP_EVENTS if value and isinstance(value[0], list) else KEEP_ITEMS
        return [_short(item) for item in value[:most]] + ([f"… ({len(value)} items)"] if len(value) > most else [])
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
