# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The comparison of templates against a server with a tokenizer of characters, which renders as the encoder does, or not quite. Both are made up."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "runtime/parity/gb10_template.py"

ENCODER = """
import json

EFFORTS = {"low": 50, "high": 75, "max": 100}


def encode_messages(messages, thinking_mode, reasoning_effort):
    effort = EFFORTS.get(reasoning_effort, reasoning_effort)
    out = f"[effort {effort}]" if thinking_mode == "thinking" else ""
    for message in messages:
        out += f"<{message['role']}>{message['content']}{json.dumps(message.get('tools', []))}{json.dumps(message.get('tool_calls', []))}"
    return out + ("<think>" if thinking_mode == "thinking" else "</think>")
"""


def encoder() -> Callable[..., str]:
    """The made-up encoder, here."""
    names: dict[str, Any] = {}
    exec(ENCODER, names)
    encode: Callable[..., str] = names["encode_messages"]
    return encode


class Handler(BaseHTTPRequestHandler):
    """`/v1/models`, `/tokenize` and `/detokenize` as vLLM has them."""

    fault = ""

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""

    def answer(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            return self.answer(200, {"prompt": "".join(map(chr, body["tokens"]))})
        if "prompt" in body:
            assert body["add_special_tokens"] is False
            return self.answer(200, {"tokens": [ord(letter) for letter in body["prompt"]]})
        arguments, messages = body["chat_template_kwargs"], body["messages"]
        effort = arguments.get("reasoning_effort", "high")
        if self.fault != "accepts-all" and effort not in ("low", "high", "max", *range(1, 101)):
            return self.answer(400, {"error": "no such effort"})
        if body.get("tools"):
            messages = messages if messages[0]["role"] == "system" else [{"role": "system", "content": ""}, *messages]
            messages = [{**messages[0], "tools": body["tools"]}, *messages[1:]]
        if self.fault == "loses-a-result":
            messages = [message for message in messages if message.get("tool_call_id") != "call-Oslo"]
        if self.fault == "low-is-25" and effort == "low":
            effort = 25
        thinking = arguments["thinking"] or self.fault == "always-thinks"
        text = encoder()(messages, "thinking" if thinking else "chat", effort)
        self.answer(200, {"tokens": [ord(letter) for letter in text]})


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs the program, from standard input as in a container, against a server with this fault."""
    (tmp_path / "encoder.py").write_text(ENCODER)
    servers = []

    def run(fault: str) -> subprocess.CompletedProcess[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Faulty", (Handler,), {"fault": fault}))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        command = [sys.executable, "-", "--encoder", str(tmp_path / "encoder.py"), "--url", f"http://127.0.0.1:{server.server_address[1]}"]
        return subprocess.run(command, input=PROGRAM.read_text(), capture_output=True, text=True, timeout=60, check=False)

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_that_renders_as_the_encoder_does_has_no_difference(compare: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = compare("")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 differ"
    assert "same     tools called, thinking on" in done.stdout and "same     effort 33" in done.stdout


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("loses-a-result", ["tools called, thinking off", "tools called, then a turn, thinking on"]),
        ("low-is-25", ["effort low", "effort low is 50"]),
        ("always-thinks", ["user, thinking off"]),
        ("accepts-all", ["effort 0 is none", "effort 101 is none"]),
    ],
)
def test_what_a_server_renders_otherwise_is_named(
    compare: Callable[[str], subprocess.CompletedProcess[str]], fault: str, names: list[str]
) -> None:
    done = compare(fault)
    assert done.returncode == 1
    for name in names:
        assert f"differs  {name}: " in done.stdout, done.stdout


def test_the_program_needs_no_package() -> None:
    """It runs in whatever image serves."""
    specification = importlib.util.spec_from_file_location("gb10_template", PROGRAM)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    names = [case[0] for case in module.cases()]
    assert len(names) == len(set(names)) == 2 * 8 + 6
