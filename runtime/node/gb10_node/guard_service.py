# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The guard as a service: looks at memory and at the rank's state, does what `Guard` decides, one log line per action.

It must work when nothing else does: its memory is locked, and once it watches it opens no file but the state that has changed. It knows its rank
by the systemd unit, never by a name pattern: such a pattern once matched nothing, and four members locked up (NestuFNG's four-node cluster).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time

from gb10_node.guard import LOADING, SERVING, Guard
from gb10_node.memory import Memory, MemoryReader

POLL_S = 2.0
SIGNALS = {"stop": signal.SIGTERM, "kill": signal.SIGQUIT}
"""What the rank's supervisor takes for a stop, and for one without grace to the container."""
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4


def lock_memory() -> None:
    """Keep every page that this process touches: the watcher of a shortage may not wait for memory itself. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Rank:
    """The rank of this member, by its state file; its supervisor, held so that its number cannot come to mean another process."""

    def __init__(self, group: str, run: str, procfs: str) -> None:
        self._unit, self._file, self._procfs = f"gb10-rank@{group}.service", f"{run}/{group}/state.json", procfs
        self._seen: tuple[int, int] | None = None
        self._supervisor = -1
        self.phase = "absent"

    def look(self) -> str:
        """The rank's phase now; "absent" where no rank has run since boot, or its supervisor is gone."""
        try:
            status = os.stat(self._file)
            if self._seen != (identity := (status.st_ino, status.st_mtime_ns)):
                with open(self._file, encoding="utf-8") as file:
                    state = json.load(file)
                self._hold(int(state["pid"]))
                self._seen, self.phase = identity, str(state["phase"])
        except (OSError, ValueError, KeyError, TypeError):
            self._seen, self.phase = None, "absent"
        return self.phase if self._supervisor >= 0 else "absent"

    def _hold(self, pid: int) -> None:
        if self._supervisor >= 0:
            os.close(self._supervisor)
            self._supervisor = -1
        descriptor = os.pidfd_open(pid)
        with open(f"{self._procfs}/{pid}/cgroup", encoding="utf-8") as file:
            ours = self._unit in file.read()
        if ours:
            self._supervisor = descriptor
        else:
            os.close(descriptor)

    def end(self, number: signal.Signals) -> None:
        """Signal the supervisor, which ends its container and tells the other ranks. Raises OSError when it is gone."""
        signal.pidfd_send_signal(self._supervisor, number)


class Watch:
    """One guard on one member; `at_floor` says how it ends the group."""

    def __init__(self, group: str, at_floor: str, guard: Guard, run: str = "/run/gb10", procfs: str = "/proc") -> None:
        self.at_floor, self.guard = at_floor, guard
        self.reader, self.rank = MemoryReader(procfs), Rank(group, run, procfs)
        self.record = f"{run}/{group}/guard.json"
        self.low_water: Memory | None = None

    def once(self, now: float) -> str:
        """Look, decide, act; returns the action."""
        memory, phase = self.reader.read(), self.rank.look()
        if phase in LOADING or (phase == SERVING and self.low_water is None):
            with contextlib.suppress(OSError):  # of the group's life before this one
                os.unlink(self.record)
        if phase != SERVING:
            self.low_water = None
        elif self.low_water is None or memory.available < self.low_water.available:
            self.low_water = memory
        action, reason = self.guard.step(now, phase, memory)
        if action:
            self._act(action, reason, memory)
        return action

    def _act(self, action: str, reason: str, before: Memory) -> None:
        try:
            done = self._drop() if action == "drop" else self._end()
        except OSError as error:
            done = f"{action} failed ({error})"
        after = self.reader.read()
        print(
            f"gb10-guard: {done}: {reason}; MemFree {before.free} -> {after.free} MiB, Cached {before.cached} -> {after.cached} MiB",
            flush=True,
        )
        if action == "end":
            self._remember(done, reason)

    def _drop(self) -> str:
        self.reader.drop_page_cache()
        return "page cache dropped"

    def _end(self) -> str:
        if self.at_floor == "log":
            return "rank would be stopped"
        self.rank.end(SIGNALS[self.at_floor])
        return f"rank told to {self.at_floor}"

    def _remember(self, done: str, reason: str) -> None:
        """For whoever asks why the group is down; kept until it loads again, or until the next boot."""
        low = self.low_water.available if self.low_water else None
        text = json.dumps({"at": time.time(), "action": done, "reason": reason, "low_water_mib": low})
        with open(f"{self.record}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{self.record}.new", self.record)


def watch(group: str, etc: str = "/etc/gb10") -> int:
    """Run until the unit is stopped; 78 where the rank's configuration cannot be read."""
    try:
        with open(f"{etc}/{group}/rank.json", encoding="utf-8") as file:
            settings = json.load(file)["guard"]
        at_floor = settings.pop("at_floor")
        guard = Watch(group, at_floor, Guard(**settings))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"gb10-guard: {etc}/{group}/rank.json has no use ({error!r}): run the service role on this member", flush=True)
        return 78
    try:
        lock_memory()
    except OSError as error:
        print(f"gb10-guard: memory is not locked ({error.strerror}): set LimitMEMLOCK=infinity in the unit", flush=True)
    print(f"gb10-guard: watches group {group}, at the floor it {'only logs' if at_floor == 'log' else f'{at_floor}s the rank'}", flush=True)
    while True:
        guard.once(time.monotonic())
        time.sleep(POLL_S)
