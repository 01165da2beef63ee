# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real registry (Debian's docker-registry) in the namespace of the lab's controller, and one that lies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from extensions.molecule.tests.lab_hosts import ROOT
from tests.lab import cache, progress

ADDRESS = "10.99.0.1"
USER, TOKEN = "cluster", "not-a-real-token"
# bcrypt of TOKEN, made by crypt(3).
HTPASSWD = "cluster:$2b$12$uW6ns4c0IAvtsXlnAPzLKOldHcsrhhiyXvKRsL2o41k3Xeh0ArZRm\n"


def program() -> Path:
    """The registry's program, from its package, which is unpacked and not installed: it would start a service."""
    return cache.build("registry", {"package": "docker-registry"}, _unpack) / "usr/bin/docker-registry"


def _unpack(destination: Path) -> None:
    progress.run_long(
        ["apt-get", "-o", "APT::Sandbox::User=root", "download", "docker-registry"], title="registry: download", cwd=destination
    )
    (package,) = destination.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, destination], check=True)
    package.unlink()


@contextmanager
def registry(folder: Path, port: int, login: bool = False) -> Iterator[str]:
    """A registry over one folder, as long as the block lasts; yields its name in references."""
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(folder)}}, "http": {"addr": f"{ADDRESS}:{port}"}}
    if login:
        (folder / "htpasswd").write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "lab", "path": str(folder / "htpasswd")}}
    file = folder / f"{port}.json"  # JSON is YAML
    file.write_text(json.dumps(config))
    with serving([str(program()), "serve", str(file)], port):
        yield f"{ADDRESS}:{port}"


@contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """A program in the controller's namespace that listens, as long as the block lasts."""
    lab = [sys.executable, "-m", "tests.lab", "run", "--"]
    with subprocess.Popen(
        [*lab, *command], cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            probe = f"import socket; socket.create_connection(('{ADDRESS}', {port}), 1)"
            deadline = time.monotonic() + 60
            while subprocess.run([*lab, sys.executable, "-c", probe], cwd=ROOT, check=False, stderr=subprocess.DEVNULL).returncode:
                assert time.monotonic() < deadline and server.poll() is None, f"nothing listens on {port}"
                time.sleep(0.2)
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)


# Run as a program: a registry that answers every question for a manifest with the same one.
LIAR = """
import http.server, json, sys

MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": [],
    "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": "sha256:" + "1" * 64}}).encode()

class Registry(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = MANIFEST if "/manifests/" in self.path else b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.docker.distribution.manifest.v2+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Registry).serve_forever()
"""
