# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The only place where the core touches a host: reads under a root path, runs commands, writes files whole."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, output and error output as text."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The last line that says something, for a one-sentence error."""
        lines = [line for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit status {self.status}"


def run(argv: Sequence[str], timeout: float = 60.0, environment: Mapping[str, str] | None = None) -> Result:
    """Run a command in the C locale without a shell; a missing program is status 127, a time-out 124, as a shell says."""
    return run_while(argv, lambda: f"{argv[0]} took longer than {timeout:.0f} s", timeout, environment)


def run_while(argv: Sequence[str], fault: Callable[[], str], every: float, environment: Mapping[str, str] | None = None) -> Result:
    """Run a command as `run` does, as long as `fault`, asked every so many seconds, says nothing; else it is killed: status 124, with those words."""
    try:
        # Not AnsibleModule.run_command: the core also runs in the node services and on the controller.
        process = subprocess.Popen(  # pylint: disable=ansible-bad-function
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
        )
    except FileNotFoundError:
        return Result(127, "", f"{argv[0]} is not installed")
    with process:
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=every)
                    return Result(process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if words := fault():
                        return Result(124, "", words)
        finally:
            process.kill()  # does nothing to one that has ended


def read(path: str | Path) -> str | None:
    """Text of a file without its last newline; None when it is absent or cannot be read (sysfs answers EINVAL for unused slots)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return None


def read_bytes(path: str | Path) -> bytes | None:
    """Bytes of a file; None when it does not exist."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def names(directory: str | Path) -> list[str]:
    """Sorted names in a directory; empty when it does not exist."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def follow(argv: Sequence[str], tell: Callable[[str], object]) -> int:
    """Run a command and tell each line of its output, both streams, as it comes; its exit status."""
    # pylint: disable-next=ansible-bad-function
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    ) as process:
        for line in process.stdout or ():
            tell(line)
    return process.returncode


def descendants(root: int, procfs_root: str = "/proc") -> list[int]:
    """A process and all that descend from it, itself first."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, names(procfs_root)):
        if stat := read(f"{procfs_root}/{pid}/stat"):  # the name, in brackets, may hold anything
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(pid))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def write(path: str | Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file whole: readers see the old bytes or the new ones, and a crash leaves one of the two."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
