# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees while the lab works: lines with elapsed seconds, and a heartbeat under long commands."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HEARTBEAT_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STARTED = time.monotonic()
_libc = ctypes.CDLL(None)


class LabError(Exception):
    """What is wrong, where, and what to do, in one sentence; the command line prints it and exits with 1."""


def say(text: str) -> None:
    """Print one line, stamped with the seconds since this process started."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Say at the end of a step what it took; a step that fails says nothing (the error does)."""
    began = time.monotonic()
    yield
    say(f"{title} ({time.monotonic() - began:.1f} s)")


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_long(argv: Sequence[str], *, title: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a command that takes long; every HEARTBEAT_S seconds say the last line that it printed.

    The command runs in a process namespace that dies with this process, however this process ends: a killed build
    leaves nothing running behind. Raises LabError with the end of its output when it fails.
    """
    caged = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--", *argv]
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            caged, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=cwd, preexec_fn=_die_with_parent
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{title}: {_tail(log.fileno(), 1)[:100] or 'no output yet'}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if status != 0:
            raise LabError(f"{title}: `{argv[0]}` ended with status {status}; its last lines:\n{_tail(log.fileno(), 15)}")


def _tail(descriptor: int, lines: int) -> str:
    """The last lines of a log that another process is still writing (read by its own descriptor's path: own offset)."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as log:
        log.seek(max(0, log.seek(0, 2) - 8192))
        text = log.read().decode(errors="replace").replace("\r", "\n")
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
