# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One control group per lab host: what belongs to a host is exactly what runs in its group.

That makes every fault exact and every clean-up complete, also after a killed run: freezing, killing and counting go by
group, never by process name. Works on the unified hierarchy (Debian 12 as installed) and on the older one tree per controller.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from .progress import LabError

_ROOT = Path("/sys/fs/cgroup")
_FREEZE_S = 5.0
_KILL_S = 10.0
_REMOVE_S = 5.0


class HostGroup:
    """The control group `name` in every hierarchy of this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._unified = (_ROOT / "cgroup.controllers").exists()
        self._directories = [_ROOT / name] if self._unified else [tree / name for tree in _trees()]
        # The hierarchy that is asked who belongs to the host; with one tree per controller it must be the freezer's.
        self._primary = _ROOT / name if self._unified else _ROOT / "freezer" / name

    def exists(self) -> bool:
        return any(directory.is_dir() for directory in self._directories)

    def create(self) -> None:
        """Make the group. Idempotent."""
        for directory in self._directories:
            if self._unified:
                _delegate(directory.parent)
                directory.mkdir(exist_ok=True)
                _delegate(directory)
            directory.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group of the old kind, and then nothing may join
                if not self._unified and (directory / setting).exists():
                    (directory / setting).write_text((directory.parent / setting).read_text())

    def join(self, part: str) -> None:
        """Move the calling process in. On the unified hierarchy only leaves hold processes: into the sub-group `part`."""
        for directory in self._directories:
            leaf = directory / part if self._unified else directory
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text("0")

    def pids(self) -> list[int]:
        """Every process of the host, in no order."""
        found: list[int] = []
        for directory, _subdirectories, _files in os.walk(self._primary):
            try:
                found += [int(pid) for pid in (Path(directory) / "cgroup.procs").read_text().split()]
            except OSError:  # the host removed that sub-group meanwhile
                continue
        return found

    def frozen(self) -> bool:
        if self._unified:
            return _read(self._primary / "cgroup.freeze") == "1"
        return _read(self._primary / "freezer.state") in ("FROZEN", "FREEZING")

    def freeze(self) -> None:
        """Stop every process of the host where it stands; it keeps its memory, its sockets and its carrier."""
        self._set_frozen(True)
        deadline = time.monotonic() + _FREEZE_S
        while not self._is_still():
            if time.monotonic() > deadline:
                raise LabError(f"{self._primary} did not freeze within {_FREEZE_S:.0f} s: resume the host and try again")
            time.sleep(0.01)

    def thaw(self) -> None:
        if self._primary.is_dir():
            self._set_frozen(False)

    def memory_bytes(self) -> int:
        """Memory charged to the host, page cache included; 0 where it is not accounted."""
        for path in (_ROOT / "memory" / self._primary.name / "memory.usage_in_bytes", self._primary / "memory.current"):
            if text := _read(path):
                return int(text)
        return 0

    def kill(self) -> None:
        """Kill everything in the group at once and wait until it is gone. Frozen first, so that nothing can fork away."""
        deadline = time.monotonic() + _KILL_S
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise LabError(f"processes {pids} of {self._primary.name} do not die: see /proc/{pids[0]}/stack")
            if self._unified:
                (self._primary / "cgroup.kill").write_text("1")
            else:
                self._set_frozen(True)
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                self._set_frozen(False)
            time.sleep(0.02)

    def remove(self) -> None:
        """Remove the empty group everywhere; waits for the kernel to let go of it."""
        deadline = time.monotonic() + _REMOVE_S
        while self.exists():
            for top in self._directories:
                for directory, _subdirectories, _files in os.walk(top, topdown=False):
                    try:
                        os.rmdir(directory)
                    except OSError:
                        if time.monotonic() > deadline:
                            raise LabError(f"{directory} cannot be removed: see its cgroup.procs") from None
            time.sleep(0.02)

    def _set_frozen(self, frozen: bool) -> None:
        if self._unified:
            (self._primary / "cgroup.freeze").write_text("1" if frozen else "0")
        else:
            (self._primary / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def _is_still(self) -> bool:
        if self._unified:
            return "frozen 1" in _read(self._primary / "cgroup.events")
        return _read(self._primary / "freezer.state") == "FROZEN"


def groups(prefix: str) -> list[str]:
    """Names of the groups with that prefix, in any hierarchy."""
    trees = [_ROOT] if (_ROOT / "cgroup.controllers").exists() else _trees()
    return sorted({path.name for tree in trees for path in tree.glob(f"{prefix}*")})


def join_groups_of(pid: int) -> None:
    """Move the calling process into the very groups that another process is in (before it enters its namespaces)."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        tree = _ROOT if number == "0" else _ROOT / controllers.removeprefix("name=")
        if number == "0" and not (_ROOT / "cgroup.controllers").exists():
            tree = _ROOT / "unified"
        try:
            (tree / path.lstrip("/") / "cgroup.procs").write_text("0")
        except FileNotFoundError:  # a hierarchy that is mounted nowhere
            continue


def _trees() -> list[Path]:
    """Mount points of the one-tree-per-controller kind (symbolic links such as `cpu -> cpu,cpuacct` are the same tree)."""
    return [path for path in sorted(_ROOT.iterdir()) if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists()]


def _delegate(directory: Path) -> None:
    """Unified hierarchy: let the groups below this one have every controller that it has."""
    enabled = (directory / "cgroup.subtree_control").read_text().split()
    for controller in (directory / "cgroup.controllers").read_text().split():
        if controller not in enabled:
            (directory / "cgroup.subtree_control").write_text(f"+{controller}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
