# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A long piece of work on a member that outlives the connection which began it.

The module that begins the work forks it off; whoever comes later, a second run as well, looks at its state. A lock that
the working process holds as long as it lives says whether it runs, so that no two do the same work and a killed one
blocks nobody. After a reboot there is no job: its folder is in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from . import _host

JOBS = Path("/run/gb10/jobs")
"""A lock, a state and a log per job, by its name."""

STOP_PATIENCE_S = 10
"""From SIGTERM to SIGKILL."""
POLL_S = 0.2
START_PATIENCE_S = 10
"""For those who look at the job at this moment and so hold its lock."""

Report = Callable[[Mapping[str, Any]], None]
Work = Callable[[Report], Mapping[str, Any]]


@contextmanager
def alone(name: str, folder: Path = JOBS) -> Iterator[IO[str]]:
    """A short piece of work that another run must not do at the same time: it waits. Yields what holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


class JobError(Exception):
    """Work that cannot be finished; the message is one sentence: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class State:
    """What is known of a job.

    `key` tells what it works for, `about` is what the one who began it said of it. `progress` is its last report. `result`
    is what it returned: None while it runs, and where it was killed.
    """

    running: bool = False
    key: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None


class Job:
    """One job of this member, by its name."""

    def __init__(self, name: str, folder: Path = JOBS) -> None:
        self._name, self._folder = name, folder
        self._turn: IO[str] | None = None
        self._lock = folder / f"{name}.lock"
        self._state = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._fixed: dict[str, Any] = {}
        self._group: int | None = None  # the working process's group, which it alone knows

    def look(self) -> State:
        """The job as it is now."""
        # Shared, so that two who look at the same time do not take each other for the job.
        lock = self._take_lock(fcntl.LOCK_SH)
        if lock is not None:
            os.close(lock)
        content = json.loads(_host.read(self._state) or "{}")
        result = None if lock is None else content.get("result")
        return State(lock is None, content.get("key", ""), content.get("about", {}), content.get("progress", {}), result)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """From a look to the start or stop that follows from it, another run waits."""
        with alone(f"{self._name}-turn", self._folder) as self._turn:
            yield

    def wait(self, seconds: float) -> State:
        """Look until the job has ended, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        while (state := self.look()).running and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return state

    def start(self, key: str, work: Work, about: Mapping[str, Any] | None = None) -> bool:
        """Begin the work in a process of its own; False where the job runs already, whatever for."""
        deadline = time.monotonic() + START_PATIENCE_S
        while (lock := self._take_lock(fcntl.LOCK_EX)) is None:
            if self.look().running or time.monotonic() > deadline:
                return False
        self._fixed = {"key": key, "about": about or {}}
        self._write({}, None)
        child = os.fork()
        if not child:
            # From here to the end no way leads back into the caller's code.
            try:
                os.setsid()
                if os.fork():
                    os._exit(0)  # the working process belongs to nobody, so that nobody waits for it
                self._detach()
                self._run(work)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        os.close(lock)  # the working process has it still
        return True

    def tell(self, **about: Any) -> None:
        """Add to what is said of the job, from inside of its work; it is seen with the next report."""
        self._fixed["about"] = {**self._fixed["about"], **about}

    def stop(self) -> bool:
        """End the work with all that it started; False where it does not run."""
        if not self.look().running:
            return False
        for sent in (signal.SIGTERM, signal.SIGKILL):
            group = json.loads(_host.read(self._state) or "{}").get("group")
            if group:
                with suppress(ProcessLookupError):
                    os.killpg(group, sent)
            if not self.wait(STOP_PATIENCE_S).running:
                break
        return True

    def _take_lock(self, kind: int) -> int | None:
        """The lock's descriptor; None where a living job has it, or for LOCK_EX one who looks."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def _write(self, progress: Mapping[str, Any], result: Mapping[str, Any] | None) -> None:
        content = {**self._fixed, "group": self._group, "progress": progress, "result": result}
        _host.write(self._state, json.dumps(content).encode(), 0o600)

    def _detach(self) -> None:
        """Let go of the caller's terminal and turn: ssh would wait for the last holder of the one, another run for that of the other."""
        os.chdir("/")
        if self._turn:
            self._turn.close()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)

    def _run(self, work: Work) -> None:
        self._group = os.getpgrp()
        self._write({}, None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            result = dict(work(lambda progress: self._write(progress, None)))
        except JobError as error:
            result = {"failed": True, "msg": str(error)}
        except BaseException as error:
            # Written down whole in the job's log; the sentence is for the one who waits.
            os.write(2, traceback.format_exc().encode())
            result = {"failed": True, "msg": f"the work ended with {type(error).__name__} ({error}): see {self._log} and report it"}
        progress = json.loads(_host.read(self._state) or "{}").get("progress", {})
        self._write(progress, result)
        os._exit(0)


def key_of(parameters: Mapping[str, Any], *names: str) -> str:
    """What a job works for, as a digest of some of a module's parameters."""
    content = json.dumps([parameters[name] for name in names], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def joined(module: Any, job: Job, key: str, work: Work, what: str) -> NoReturn:
    """Begin the work for O(state=present), or wait for the run that has; end the module with what is known. `what` is done for another key."""
    if module.params["state"] == "present":
        job.start(key, work)
    state = job.wait(module.params["wait"])
    if state.key != key:
        module.fail_json(msg=f"{what} on this member, by another run: wait for its end and run again")
    answer(module, state, {})


def answer(module: Any, state: State, common: Mapping[str, Any]) -> NoReturn:
    """End an Ansible module with what is known of its job."""
    common = {**state.about, **common}
    if state.running:
        module.exit_json(**{**common, "changed": True, "finished": False, "progress": state.progress})
    if state.result is None:
        module.fail_json(msg="the work was ended from outside before it was done: run again, it goes on where it ended")
    if state.result.get("failed"):
        module.fail_json(msg=state.result["msg"])
    module.exit_json(**{**common, "changed": True, "finished": True, **state.result})
