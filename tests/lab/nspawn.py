# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lab hosts as systemd-nspawn containers: systemd as PID 1, own disk, own network namespace, the machine's kernel."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import cache, overlay
from .backend import Backend
from .enter import inside
from .paths import PYTHON, REPOSITORY, mount_points
from .progress import LabError
from .rootfs import root_filesystem, shelf
from .ssh import Keys
from .topology import Host, Topology

DISK_BYTES = 16 << 30  # sparse: what a host sees as the size of its disk
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb",
    overlay.QUIET_PODMAN: "1",
}  # fmt: skip
_QUERY_S = 20


class NspawnBackend(Backend):
    """Hosts in containers: a disk each under `state`, the machine's kernel for all."""

    engine = "podman"  # the one container engine that the hosts have

    def prepare(self, topology: Topology, keys: Keys) -> None:
        root = root_filesystem(self.engine)
        for host in topology.hosts:
            directory = self._directory(host)
            if (directory / "host.json").exists():  # written last
                continue
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir(mode=0o700)
            overlay.write(directory / "seed", host, topology, keys, self.engine)
            _make_disk(directory / "disk.img")
            namespace = self._network.namespace_path(host.name)
            description = {"name": host.name, "group": self._group(host).name, "root": str(root), "namespace": str(namespace)}
            (directory / "host.json").write_text(json.dumps(description, indent=1))
        # An older root file system goes when no host of any lab has it under its disk any more.
        described = [json.loads(file.read_text()) for file in self._state.parent.glob("*/*/host.json")]
        cache.prune(shelf(self.engine), keep={root, *(Path(other["root"]) for other in described if "root" in other)})

    def power_on(self, host: Host) -> None:
        group = self._group(host)
        group.create()
        with self.console(host).open("ab") as console:
            # A mount namespace of its own: disk, overlay and all else that is mounted for this host vanish with its last process.
            # setsid forks: the supervisor is nobody's child, so it outlives this process and never waits to be collected by it.
            subprocess.run(
                [
                    "setsid", "--fork", "unshare", "--mount", "--propagation=slave", "--",
                    PYTHON, "-m", "tests.lab.supervise", str(self._directory(host)),
                ],
                check=True, stdin=subprocess.DEVNULL, stdout=console, stderr=console, cwd=REPOSITORY, timeout=_QUERY_S,
                preexec_fn=lambda: group.join("supervisor"),
            )  # fmt: skip

    def exec(self, host: Host, argv: Sequence[str], *, stdin: int | None = None, capture: bool = False) -> subprocess.CompletedProcess[str]:
        group, leader = self._group(host), self._leader(host)
        if leader is None:
            raise LabError(f"{host.name} is off: `on {host.name}` starts it")
        if group.frozen():
            raise LabError(f"{host.name} hangs: `resume {host.name}` lets it go on")
        try:
            return subprocess.run(
                argv, check=False, stdin=stdin, capture_output=capture, text=True, env=_ENVIRONMENT,
                timeout=_QUERY_S if capture else None, preexec_fn=inside(leader),
            )  # fmt: skip
        except (subprocess.SubprocessError, FileNotFoundError) as error:
            raise LabError(f"{host.name} did not run `{' '.join(argv)}`: {error}; `status` tells its state") from None

    def links(self, host: Host) -> list[dict]:
        return self._network.links(host.name)

    def down(self) -> None:
        super().down()
        for device in _loop_devices(self._state):
            subprocess.run(["losetup", "--detach", device], check=False, capture_output=True, timeout=_QUERY_S)

    def leftovers(self) -> list[str]:
        found = super().leftovers()
        found += [f"mount {point}" for point in mount_points() if Path(point).is_relative_to(self._state)]
        return found + [f"loop device {device}" for device in _loop_devices(self._state)]

    def _leader(self, host: Host) -> int | None:
        """The host's PID 1 as seen from here: of its group, the first process of a process namespace just below ours."""
        depth = len(_namespace_pids("self")) + 1
        for pid in self._group(host).pids():
            numbers = _namespace_pids(str(pid))
            if len(numbers) == depth and numbers[-1] == 1:
                return pid
        return None


class DockerBackend(NspawnBackend):
    """The same hosts with Docker in podman's place."""

    engine = "docker"


def _namespace_pids(pid: str) -> list[int]:
    """The process's id in every process namespace that it is in, ours first; empty if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return next(([int(number) for number in line.split()[1:]] for line in status.splitlines() if line.startswith("NSpid:")), [])


def _make_disk(image: Path) -> None:
    """A sparse ext4 image; no journal, because the machine's kernel outlives every power cut of a host."""
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    options = ["-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"]
    subprocess.run(["mkfs.ext4", *options, str(image)], check=True, timeout=60, stdin=subprocess.DEVNULL)


def _loop_devices(state: Path) -> list[str]:
    """Loop devices whose file is (or, deleted, was) in this state directory."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if Path(backing.read_text().strip()).is_relative_to(state):
                found.append(f"/dev/{backing.parts[3]}")
        except OSError:  # detached meanwhile
            continue
    return sorted(found)
