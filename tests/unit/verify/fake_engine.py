# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small OpenAI endpoint without a model: it answers well, or with one named fault. No answer of it says anything about a real engine.

Its "tokens" are pieces of text; its "greedy answer" follows from the prompt's hash. What it knows: 17*19, get_weather, the colours of a PNG,
numbers of lighthouses.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL, KEY, CONTEXT = "fake-model", "a-key-of-the-test", 4096
PIECES = re.compile(r"\s*\S{1,6}")
FILLERS = ("the", "sea", "was", "calm", "and", "grey", "gulls", "flew", "over", "boats", "near", "shore", "while", "old", "men", "spoke")


def tokens_of(text: str) -> list[int]:
    """Ids of a text's pieces."""
    return [zlib.crc32(piece.encode()) % 50_000 for piece in PIECES.findall(text)]


def continuation(prompt: str, count: int) -> list[str]:
    """The "greedy" pieces that follow a prompt; two prompts share no order of them."""
    seed = hashlib.sha256(prompt.encode()).digest()
    return [f" {FILLERS[seed[place % 32] % 16]}{(seed[(place * 7 + 3) % 32] + place) % 97}" for place in range(count)]


def colours_of(url: str) -> list[str]:
    """Colours at the middle of each third of a PNG's first row."""
    data = base64.b64decode(url.partition(",")[2])
    [width] = struct.unpack(">I", data[16:20])
    packed, place = b"", 8
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        packed += data[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += 12 + size
    row = zlib.decompress(packed)[1:]
    names = {b"\xff\0\0": "red", b"\0\xff\0": "green", b"\0\0\xff": "blue"}
    return [names[row[3 * x : 3 * x + 3]] for x in (width // 6, width // 2, 5 * width // 6)]


class Engine(ThreadingHTTPServer):
    """The server with its fault; `with Engine("nan-logprobs") as engine` runs it."""

    daemon_threads = True

    def __init__(self, fault: str = "", token_s: float = 0.0, prefill_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.token_s, self.prefill_s = fault, token_s, prefill_s
        self.dead = False
        self.asked = 0
        self.cached: set[str] = set()
        self.hits = 0
        self.lock = threading.Lock()
        self.others: list[list[str]] = []
        self.halfway = threading.Event()

    def __enter__(self) -> Engine:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def port(self) -> int:
        return self.server_address[1]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""

    def send(self, status: int, content: Any, kind: str = "application/json") -> None:
        """A whole answer."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        engine = self.server
        if self.path == "/health":
            return self.send(503 if engine.dead or engine.fault == "unhealthy" else 200, b"")
        if self.path == "/metrics":
            text = f'# HELP vllm:prefix_cache_hits_total Hits\nvllm:prefix_cache_hits_total{{engine="0"}} {engine.hits}.0\n'
            return self.send(200, text.encode(), "text/plain")
        name = "another-model" if engine.fault == "wrong-model" else MODEL
        context = 2048 if engine.fault == "wrong-context" else CONTEXT
        self.send(200, {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": context}]})

    def do_POST(self) -> None:
        engine, fault = self.server, self.server.fault
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {KEY}" and fault != "open-endpoint":
            return self.send(401, {"error": "Unauthorized"})
        if fault == "connection-lost":
            return self.connection.shutdown(socket.SHUT_RDWR)
        with engine.lock:
            engine.asked += 1
        time.sleep(3600 if fault == "no-answer" else 0)
        if self.path.endswith("/chat/completions"):
            return self.chat(request)
        return self.complete(request)

    def complete(self, request: dict[str, Any]) -> None:
        engine, fault, prompt = self.server, self.server.fault, request["prompt"]
        ids = prompt if isinstance(prompt, list) else tokens_of(prompt)
        if len(ids) + request["max_tokens"] > CONTEXT + (fault == "limit-exceeded") - (fault == "limit-too-low"):
            engine.dead = fault == "limit-kills"
            return self.send(400, {"error": {"message": f"This model's context is {CONTEXT} tokens", "code": 400}})
        time.sleep(engine.prefill_s * len(ids))
        if fault == "prefill-beside" and request["max_tokens"] == 1 and request.get("stream"):
            engine.halfway.wait(30)
            engine.halfway.clear()
        text = json.dumps(prompt)
        pieces = continuation(text, request["max_tokens"])
        if fault == "window-not-filled":
            pieces = pieces[: max(len(pieces) - 10, 1)]
        if fault == "not-deterministic" and engine.asked % 2:
            pieces[-3] = " else"
        if text in engine.cached:
            engine.hits += 0 if fault == "cache-cold" else len(ids)
            if fault == "cache-changes-answer" and len(ids) > 100:
                pieces[1] = " stale"
        engine.cached.add(text)
        finish = "length"
        for word in request.get("stop") or []:
            place = "".join(pieces).find(word)
            if place >= 0 and fault != "stop-ignored":
                place += len(word) if fault == "stop-included" else -3 if fault == "stop-elsewhere" else 0
                pieces, finish = PIECES.findall("".join(pieces)[:place]), "length" if fault == "wrong-stop-reason" else "stop"
                pieces += ["".join(continuation(text, 99))[:place][len("".join(pieces)) :]]
        self.answer(request, pieces, finish, prompt_ids=ids)

    def chat(self, request: dict[str, Any]) -> None:
        fault, content = self.server.fault, request["messages"][-1]["content"]
        template = request.get("chat_template_kwargs") or {}
        words = content if isinstance(content, str) else content[0]["text"]
        reasoning = "17*19 is 17*20 less 17, so 340 less 17." if template.get("thinking") else ""
        calls, finish, text = [], "stop", "Hello."
        if request.get("tools"):
            arguments = {"broken-arguments": '{"city": "Paris", ', "wrong-arguments": '{"city": "Rome"}'}.get(fault)
            call = {"name": "get_weather", "arguments": arguments or '{"city": "Paris", "unit": "celsius"}'}
            calls, finish, text = [{"id": "call-1", "type": "function", "function": call}], "tool_calls", ""
            if fault == "tool-call-as-text":
                calls, finish, text = [], "stop", f"<tool_call>{json.dumps(call)}</tool_call>"
            if fault == "no-tool-call":
                calls, finish, text = [], "stop", "It is sunny."
            if fault == "wrong-tool":
                call["name"] = "get_time"
            if fault == "call-without-id":
                calls[0]["id"] = ""
            if fault == "wrong-call-reason":
                finish = "stop"
        elif isinstance(content, list):
            if fault == "image-refused":
                return self.send(400, {"error": {"message": "At most 0 image(s) may be provided"}})
            if fault == "image-kills":
                self.server.dead = True
                return self.send(500, {"error": {"message": "EngineCore died"}})
            text = ", ".join(
                reversed(colours_of(content[1]["image_url"]["url"]))
                if fault == "wrong-colours"
                else colours_of(content[1]["image_url"]["url"])
            )
        elif "17*19" in words:
            text = {
                "wrong-answer": "324",
                "token-soup": "care" * 16,
                "one-character": "!" * 16,
                "broken-characters": "\ufffd care",
                "empty-answer": "",
            }.get(fault, "323")
            if fault == "answer-in-reasoning" and template.get("thinking"):
                reasoning, text = reasoning + " So 323.", ""
            if fault == "budget-spent" and template.get("thinking"):
                text, finish = "", "length"
            if fault == "reasoning-in-content" and reasoning:
                reasoning, text = "", f"{reasoning} So the answer that was asked for is 323"
            if fault == "think-marks" and reasoning:
                text, reasoning = f"<think>{reasoning}</think>323", ""
            if fault == "reasoning-not-off" and not reasoning:
                reasoning = "Let me see."
            if fault == "no-reasoning":
                reasoning = ""
        elif found := re.search(r"blue lighthouse is (\d+)", words):
            text = "12345 or so" if fault == "needle-lost" else found[1]
        prompt_ids = tokens_of(words)
        pieces = PIECES.findall(text) if request["max_tokens"] > 1 else [" x"]
        self.answer(request, pieces, finish, prompt_ids, reasoning, calls)

    def answer(
        self,
        request: dict[str, Any],
        pieces: list[str],
        finish: str,
        prompt_ids: list[int],
        reasoning: str = "",
        calls: list[dict[str, Any]] | None = None,
    ) -> None:
        """The pieces as an answer of the kind that was asked for."""
        engine, fault, is_chat = self.server, self.server.fault, self.path.endswith("chat/completions")
        thoughts = PIECES.findall(reasoning)
        ids = [zlib.crc32(piece.encode()) % 50_000 for piece in [*thoughts, *pieces]] or ([7] if calls else [])
        shown = len(pieces) + len(thoughts) + (8 if calls else 0)
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": shown, "total_tokens": shown + len(prompt_ids)}
        if fault == "wrong-usage":
            usage["completion_tokens"] += 1
        if fault == "no-usage":
            usage = {}
        common = {"id": f"answer-{engine.asked}", "created": 1, "model": "another-model" if fault == "wrong-answer-model" else MODEL}
        extra = {"token_ids": ids, "prompt_token_ids": prompt_ids} if request.get("return_token_ids") and not is_chat else {}
        if "logprobs" in request:
            value = {"nan-logprobs": float("nan"), "null-logprobs": None, "impossible-logprobs": 0.5}.get(fault, -0.25)
            extra["logprobs"] = {
                "tokens": pieces,
                "token_logprobs": [] if fault == "empty-logprobs" else [-0.5] * (len(pieces) - 1) + [value],
            }
        if "logprobs" in request and fault == "nan-refused":
            return self.send(500, {"error": {"message": "Out of range float values are not JSON compliant: nan"}})
        if request.get("stream"):
            return self.stream(request, common, pieces, thoughts, calls or [], finish, usage, is_chat)
        time.sleep(engine.token_s * shown)
        message = {"role": "assistant", "content": "".join(pieces) or None, "reasoning": reasoning or None, "tool_calls": calls or []}
        choice = {"index": 0, "finish_reason": finish, **({"message": message} if is_chat else {"text": "".join(pieces)}), **extra}
        kind = "chat.completion" if is_chat else "text_completion"
        whole = common | {"object": kind, "choices": [] if fault == "empty-choices" else [choice], "usage": usage}
        body = json.dumps(whole).encode()
        if fault == "not-json":
            body = b"<html>Bad gateway</html>"
        if fault == "truncated-answer":
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return None
        if fault == "slow-trickle":
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(0.3)
        return self.send(200, body)

    def stream(
        self, request: dict[str, Any], common: dict[str, Any], pieces: list[str], thoughts: list[str], calls: list[dict[str, Any]], finish: str,
        usage: dict[str, int], is_chat: bool,
    ) -> None:  # fmt: skip
        """The same as events, in HTTP chunks that do not end where events do."""
        engine, fault = self.server, self.server.fault
        if fault in ("mixed-tokens", "swapped-streams") and not is_chat:
            pieces = self.mixed(pieces)
        if fault == "batch-changes-answer" and not is_chat and self.mixed(pieces) != pieces:
            pieces = [*pieces[:-2], " new", " end"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        common |= {"object": "chat.completion.chunk" if is_chat and fault != "wrong-object" else "text_completion"}
        times = []
        for place, event in enumerate(self.events(request, common, pieces, thoughts, calls, finish, is_chat)):
            if fault == "truncated-stream" and place >= 3:
                self.close_connection = True
                return
            if fault == "error-in-stream" and place == 2:
                self.chunk({"error": {"message": "EngineCore died", "code": 500}})
                break
            self.chunk(event)
            times.append(time.monotonic())
            if place == len(pieces) // 2 > 1:
                engine.halfway.set()
            time.sleep(0.5 if fault == "slow-trickle" else engine.token_s)
        # The last event but the usage ends the answer and has no token.
        clock = {"first_at": times[0], "last_at": times[-2]} if len(times) > 1 and usage else {}
        self.chunk(common | {"choices": [], "usage": usage | clock})
        if fault != "no-end-mark":
            self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def events(
        self,
        request: dict[str, Any],
        common: dict[str, Any],
        pieces: list[str],
        thoughts: list[str],
        calls: list[dict[str, Any]],
        finish: str,
        is_chat: bool,
    ) -> Iterator[dict[str, Any]]:
        """Chunks with choices."""
        if self.server.fault == "empty-choices":
            return
        deltas: list[dict[str, Any]] = [{"reasoning": piece} for piece in thoughts] + [{"content": piece} for piece in pieces]
        for index, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            deltas.append({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + 5]}}]} for i in range(0, len(arguments), 5)
            ]
        for place, delta in enumerate([*deltas, {}]):
            ids = (
                {"token_ids": [zlib.crc32(delta["content"].encode()) % 50_000]}
                if request.get("return_token_ids") and "content" in delta
                else {}
            )
            part = {"delta": delta} if is_chat else {"text": delta.get("content", ""), **ids}
            answer_id = "answer-0" if self.server.fault == "mixed-ids" and place == 2 else common["id"]
            yield {**common, "id": answer_id, "choices": [{"index": 0, "finish_reason": None if delta else finish, **part}]}

    def mixed(self, pieces: list[str]) -> list[str]:
        """The pieces of a stream beside which another one runs: every other one is that one's, or all are."""
        engine = self.server
        with engine.lock:
            engine.others.append(pieces)
            number = len(engine.others)
        # The first two streams of the probe come alone, one after the other.
        if number <= 2:
            return pieces
        while len(engine.others) < number + number % 2:
            time.sleep(0.01)
        other = next(theirs for theirs in engine.others if theirs != pieces)
        if engine.fault == "swapped-streams":
            return other
        return [theirs if place % 2 else own for place, (own, theirs) in enumerate(zip(pieces, other, strict=True))]

    def chunk(self, event: Any) -> None:
        """One event in two HTTP chunks."""
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
