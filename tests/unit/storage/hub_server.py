# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A hub on this machine: as much of the Hub's API as a download needs, over a folder of real files, with faults on request.

    python -m tests.unit.storage.hub_server FOLDER ADDRESS PORT [RATE]

serves FOLDER as the repository lab/checkpoint, at RATE bytes per second per file. Files of 1 KiB and more are what the Hub holds
as LFS objects: listed with their SHA-256, and given out by another host to which no token may go.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

REPOSITORY = "lab/checkpoint"
COMMIT = hashlib.sha1(b"lab").hexdigest()
LFS_BYTES = 1024
BLOCK = 64 * 1024

# What a request of a file meets: ("status", 503), ("cut", bytes that come through), ("wrong", position of a turned byte), ("slow", seconds).
Fault = tuple[str, int]


def lfs(content: bytes) -> bool:
    return len(content) >= LFS_BYTES


class Hub:
    """The server; its address, what it was asked for, and the faults that are still to come."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0, rate: int = 0, token: str = "") -> None:
        self.folder, self.rate, self.token = folder, rate, token
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: dict[str, int] = {}
        self.open = 0
        self.guard = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.server.daemon_threads = True
        self.port = int(self.server.server_address[1])
        self.url = f"http://{address}:{self.port}"
        # For the address of this machine by another name: another origin to an HTTP client.
        self.files_url = f"http://localhost:{self.port}" if address == "127.0.0.1" else self.url

    def start(self) -> None:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A file is on its way."""
        with self.guard:
            self.open += 1
        try:
            yield
        finally:
            with self.guard:
                self.open -= 1

    def forget(self) -> None:
        """What was sent until now, once it has noticed that nobody takes any more of it."""
        while self.open:
            time.sleep(0.02)
        self.sent.clear()

    def fault(self, path: str) -> Fault | None:
        with self.guard:
            waiting = self.faults.get(path, [])
            return waiting.pop(0) if waiting else None

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        with self.guard:
            self.requests.append((request.command, path, {key.lower(): value for key, value in request.headers.items()}))
        resolve = f"/{REPOSITORY}/resolve/{'main' if path.startswith(f'/{REPOSITORY}/resolve/main/') else COMMIT}/"
        if path.startswith("/files/"):
            self.send_file(request, path.removeprefix("/files/"))
        elif self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.reply(request, 403 if request.headers.get("Authorization") else 401)
        elif path in (f"/api/models/{REPOSITORY}/revision/{name}" for name in ("main", COMMIT)):
            fault = self.fault("listing")
            self.reply(request, fault[1] if fault else 200, b"" if fault else json.dumps(self.listing()).encode())
        elif path.startswith(resolve) and (self.folder / path.removeprefix(resolve)).is_file():
            name = path.removeprefix(resolve)
            if lfs((self.folder / name).read_bytes()):
                self.reply(request, 302, headers={"Location": f"{self.files_url}/files/{quote(name)}?signature=secret"})
            else:
                self.send_file(request, name)
        else:
            self.reply(request, 404)

    def listing(self) -> dict[str, object]:
        siblings = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            entry: dict[str, object] = {
                "rfilename": str(path.relative_to(self.folder)),
                "size": len(content),
                "blobId": hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest(),
            }
            if lfs(content):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            siblings.append(entry)
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    def reply(self, request: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Retry-After": "0", **(headers or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body)

    def send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            self.reply(request, 404)
            return
        content = bytearray(path.read_bytes())
        fault, value = self.fault(name) or ("", 0)
        if fault == "status":
            self.reply(request, value)
            return
        if fault == "wrong":
            content[value] ^= 1
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        request.send_response(206 if begin else 200)
        if begin:
            request.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(content) - begin))
        request.end_headers()
        if fault == "slow":
            time.sleep(value)
        body = content[begin : begin + value] if fault == "cut" else content[begin:]
        with self.sending():
            for start in range(0, len(body), BLOCK):
                request.wfile.write(body[start : start + BLOCK])
                with self.guard:
                    self.sent[name] = self.sent.get(name, 0) + len(body[start : start + BLOCK])
                if self.rate:
                    time.sleep(BLOCK / self.rate)
        if fault == "cut":
            request.close_connection = True


def main(folder: str, address: str, port: str, rate: str = "0", announce: Callable[[str], None] = print) -> None:
    """Serve until the process ends."""
    hub = Hub(Path(folder), address, int(port), int(rate))
    announce(hub.url)
    hub.server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
