# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint on a hub, and its copies on the members. The hub is tests/unit/storage/hub_server.py, in the network namespace of the lab's controller."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import ROOT, begin
from tests.lab.paths import lab_name, state_directory

HUB = ("10.99.0.1", 8800)


def weights(index: int, size: int = 4_000_000) -> bytes:
    """A tensor file with random bytes."""
    header = json.dumps({f"w{index}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(index).randbytes(size)


CONTENT = {f"model-0000{index}-of-00006.safetensors": weights(index) for index in range(1, 7)}
CONTENT |= {"config.json": b"{}", "sub/tokenizer.json": b'{"synthetic": true}'}
SLOW = 1_200_000  # bytes per second and file, two at a time: a whole download takes 10 s


@contextmanager
def hub(folder: Path, rate: int) -> Iterator[None]:
    """The hub, as long as the block lasts."""
    command = [sys.executable, "-m", "tests.lab", "run", "--", sys.executable, "-m", "tests.unit.storage.hub_server"]
    command += [str(folder), HUB[0], str(HUB[1]), str(rate)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout and server.stdout.readline().startswith("http://")
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)


class Checkpoint:
    """A checkpoint of a name of its own, so that no test finds another one's files."""

    def __init__(self, root: Path, name: str, hosts: dict[str, Host]) -> None:
        self.name, self.hosts, self.repository, self.content = name, hosts, root / "repository", dict(CONTENT)
        self.directory = f"/var/lib/gb10/models/{name}"
        self.write()
        self.variables = {
            "storage_origin": {"kind": "hub", "repository": "lab/checkpoint", "revision": "main"},
            "storage_endpoint": f"http://{HUB[0]}:{HUB[1]}",
            "storage_checkpoint": name,
            "storage_directory": self.directory,
            "storage_source": "",
            "storage_group": "",
            "storage_downloads": 2,
            "storage_pinned_manifest_file": str(root / "manifest.json"),
            "storage_manifest_file": str(root / "manifest.json"),
        }

    def write(self) -> None:
        """The files, as the hub has them."""
        for path, content in self.content.items():
            (self.repository / path).parent.mkdir(parents=True, exist_ok=True)
            (self.repository / path).write_bytes(content)

    def arguments(self) -> tuple[str, ...]:
        return ("--tags", "storage", "-e", json.dumps(self.variables))

    def begin(self) -> subprocess.Popen[str]:
        """The playbook, not waited for."""
        return begin("site", *self.arguments())

    def bytes_on(self, member: str) -> int:
        """How much of the checkpoint is there; sizes, since files are written in place."""
        return int(
            self.hosts[member].check_output(
                f"find {self.directory} -type f -printf '%s\\n' 2>/dev/null | awk '{{n += $1}} END {{print n + 0}}'"
            )
        )

    def times_on(self, member: str) -> list[float]:
        """When the files of weights were last written there; the hosts have one clock."""
        return [float(text) for text in self.hosts[member].check_output(f"stat -c %.Z {self.directory}/model-*").split()]

    def is_whole_on(self, *members: str) -> bool:
        wanted = {f"{sha256(content).hexdigest()}  {path}" for path, content in self.content.items()}
        command = f"cd {self.directory} && find * -type f | xargs sha256sum"
        return all(set(self.hosts[member].run(command).stdout.splitlines()) == wanted for member in members)

    def put(self, *members: str) -> None:
        """The files lie there already."""
        for member in members:
            target = f"{member}:{self.directory}/"
            ssh = f"ssh -F {state_directory(lab_name())}/ssh_config"
            subprocess.run(["rsync", "-r", "--mkpath", "-e", ssh, f"{self.repository}/", target], check=True, timeout=120)

    def pin(self) -> None:
        """The manifest, as if it was learned before."""
        files = [
            {"path": path, "size": len(content), "sha256": sha256(content).hexdigest()} for path, content in sorted(self.content.items())
        ]
        Path(self.variables["storage_pinned_manifest_file"]).write_text(json.dumps({"version": 1, "files": files}))
