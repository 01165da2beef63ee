# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends requests to an OpenAI endpoint: the I/O below _openai.py, and nothing of its rules.

The standard library's client in threads: it runs on the head, where the API key stays and where nothing may have to be installed. Each
request is a connection of its own, as a client's is that comes once; each read is one of the socket, so an event has its own time.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import _host, _serving, _tls
from ._openai import Event, Reply, Request
from ._sse import Parser

SLOWEST_PREFILL = 200
"""Tokens per second that a long prompt is given time by. The slowest published figure is a failure at 244 (MiaAI-Lab, a 455K prompt)."""
PIECE = 1 << 16


@dataclass(frozen=True)
class Endpoint:
    """An API and how long it may take for one request, in seconds, its prefill apart."""

    host: str
    port: int
    key: str
    timeout: float
    tls: bool = False

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls:
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout, context=_tls.unchecked())
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def ask_all(self, requests: Sequence[Request]) -> list[Reply]:
        """All at once; replies in the order of the requests."""
        if len(requests) == 1:
            return [self.ask(requests[0])]
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            return list(pool.map(self.ask, requests))

    def ask(self, request: Request) -> Reply:
        """One request to its end, whatever that is: nothing is raised."""
        begin = time.monotonic()
        deadline = begin + self.timeout + request.prompt_tokens / SLOWEST_PREFILL
        connection = self._connection()
        parser, events, received = Parser(), [], bytearray()
        status, error, timed_out, cut = 0, "", False, False
        try:
            headers = {"Authorization": f"Bearer {self.key}"} if request.with_key else {}
            if request.body is None:
                connection.request("GET", request.path, headers=headers)
            else:
                connection.request("POST", request.path, json.dumps(request.body), headers | {"Content-Type": "application/json"})
            socket = connection.sock
            socket.settimeout(max(deadline - time.monotonic(), 0.001))
            response = connection.getresponse()
            status = response.status
            streams = (response.getheader("Content-Type") or "").startswith("text/event-stream")
            while piece := response.read1(PIECE):
                now = time.monotonic()
                if streams:
                    events += [Event(now - begin, data) for data in parser.feed(piece)]
                else:
                    received += piece
                if now > deadline:
                    raise TimeoutError("the time was over")
                if not response.isclosed():
                    socket.settimeout(max(deadline - now, 0.001))
            cut = bool(response.length)
            error = f"{response.length} bytes are missing" if cut else ""
        except TimeoutError as late:
            timed_out, error = True, str(late)
        except (OSError, http.client.HTTPException, ValueError) as broken:
            cut, error = status != 0, f"{type(broken).__name__}: {broken}"
        finally:
            connection.close()
        text = received.decode("utf-8", "replace")
        return Reply(status, text, tuple(events), error, timed_out, time.monotonic() - begin, cut)


def of_group(group: str, port: int, timeout: float) -> Endpoint:
    """The endpoint of a group, from its head, where alone its key is. Raises LookupError, one sentence, elsewhere."""
    path = f"/etc/gb10/{group}/api-key"
    if key := _host.read(path):
        return Endpoint("127.0.0.1", port, key, timeout, Path(f"/etc/gb10/{group}/{_serving.TLS_FOLDER}/{_serving.CERTIFICATE}").exists())
    raise LookupError(f"{path} is absent or empty on this member: run the service role, and this on the head")
