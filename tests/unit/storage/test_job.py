# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that outlives its caller: real processes, really killed."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread, Timer

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils._job import Job, JobError, Report, State


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def until(path: Path) -> Callable[[Report], dict[str, str]]:
    """Work that reports, and ends when a file appears."""

    def work(report: Report) -> dict[str, str]:
        report({"done": 1})
        wait_for(path.exists)
        return {"what": "done"}

    return work


def test_work_goes_on_by_itself_and_leaves_its_result(tmp_path: Path) -> None:
    job = Job("a", tmp_path)
    assert job.look() == State()
    assert job.start("key", until(tmp_path / "go"), {"of": "a"})
    wait_for(lambda: job.look().progress == {"done": 1})
    assert job.look() == State(True, "key", {"of": "a"}, {"done": 1}, None)
    (tmp_path / "go").touch()
    assert job.wait(20) == State(False, "key", {"of": "a"}, {"done": 1}, {"what": "done"})


def test_it_runs_once_whoever_asks(tmp_path: Path) -> None:
    assert Job("a", tmp_path).start("key", until(tmp_path / "go"))
    assert not Job("a", tmp_path).start("other", until(tmp_path / "go"))
    assert Job("a", tmp_path).look().key == "key"
    assert Job("b", tmp_path).start("key", until(tmp_path / "go"))
    (tmp_path / "go").touch()
    assert Job("a", tmp_path).wait(20).result and Job("b", tmp_path).wait(20).result


def test_it_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    """The caller is a process group of its own, killed as a whole; its pipe ends though the work runs on."""
    program = f"""
import pathlib, sys, time
from ansible_collections.gb10.cluster.plugins.module_utils._job import Job
def work(report):
    while not pathlib.Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.02)
    return {{"what": "done"}}
Job("a", pathlib.Path({str(tmp_path)!r})).start("key", work)
print("started", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=20, start_new_session=True, check=True
    )
    assert done.stdout == "started\n"
    assert Job("a", tmp_path).look().running
    (tmp_path / "go").touch()
    assert Job("a", tmp_path).wait(20).result == {"what": "done"}


def test_a_killed_job_has_no_result_and_blocks_nobody(tmp_path: Path) -> None:
    job = Job("a", tmp_path)

    def work(report: Report) -> dict[str, str]:
        with subprocess.Popen(["sleep", "60"]) as child:
            (tmp_path / "child").write_text(str(child.pid))
            child.wait()
        return {}

    job.start("key", work)
    wait_for((tmp_path / "child").exists)
    wait_for((tmp_path / "child").read_text)
    assert job.stop()
    assert job.look() == State(False, "key", {}, {}, None)
    child = Path("/proc", (tmp_path / "child").read_text())
    # What it had started went with it (a zombie is gone, too).
    assert not child.exists() or "(zombie)" in (child / "status").read_text()
    assert not job.stop()
    (tmp_path / "go").touch()
    assert job.start("key", until(tmp_path / "go"))
    assert job.wait(20).result == {"what": "done"}


@pytest.mark.parametrize(
    ("error", "words"),
    [(JobError("the disk is full: make room"), "the disk is full: make room"), (KeyError("x"), "the work ended with KeyError ('x'): see ")],
)
def test_a_failure_is_one_sentence(tmp_path: Path, error: Exception, words: str) -> None:
    job = Job("a", tmp_path)

    def work(report: Report) -> dict[str, str]:
        raise error

    job.start("key", work)
    result = job.wait(20).result
    assert result and result["failed"] and result["msg"].startswith(words) and "\n" not in result["msg"]
    log = (tmp_path / "a.log").read_text()
    assert ("KeyError" in log) == isinstance(error, KeyError)


def test_those_who_look_neither_see_each_other_nor_keep_a_job_from_starting(tmp_path: Path) -> None:
    program = f"""
import pathlib
from ansible_collections.gb10.cluster.plugins.module_utils._job import Job
job = Job("a", pathlib.Path({str(tmp_path)!r}))
while not pathlib.Path({str(tmp_path / "end")!r}).exists(): assert not job.look().running, "took another one who looks for the job"
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    lookers = [subprocess.Popen([sys.executable, "-c", program], env=environment) for dummy in range(3)]
    try:
        time.sleep(1)
        assert not any(Job("a", tmp_path).look().running for dummy in range(2000))
    finally:
        (tmp_path / "end").touch()
    assert [looker.wait(20) for looker in lookers] == [0, 0, 0]
    # The same beside one who holds the lock as those do.
    with (tmp_path / "b.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        Thread(target=lambda: (time.sleep(0.5), fcntl.flock(held, fcntl.LOCK_UN))).start()
        assert Job("b", tmp_path).start("key", lambda report: {})


def test_a_turn_is_over_when_its_job_runs(tmp_path: Path) -> None:
    """The working process inherits what its caller had open, and must not keep the turn."""
    job = Job("a", tmp_path)
    with job.turn():
        assert job.start("key", until(tmp_path / "go"))
    fallback = Timer(60, (tmp_path / "go").touch)
    fallback.start()
    with Job("a", tmp_path).turn():
        assert Job("a", tmp_path).look().running
    fallback.cancel()
    (tmp_path / "go").touch()
    assert job.wait(20).result


def test_what_was_opened_for_the_work_stays_open(tmp_path: Path) -> None:
    """A server listens before it is said to run: its work takes the socket over."""
    job = Job("a", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, job.turn():
        address = server.getsockname()

        def work(report: Report) -> dict[str, str]:
            with server.accept()[0] as client:
                client.sendall(b"hello")
            return {}

        assert job.start("key", work)
    with socket.create_connection(address, timeout=10) as client:
        assert client.recv(16) == b"hello"
    assert job.wait(20).result == {}


def test_two_who_decide_at_once_start_one_job(tmp_path: Path) -> None:
    program = f"""
import pathlib, time
from ansible_collections.gb10.cluster.plugins.module_utils._job import Job
job = Job("a", pathlib.Path({str(tmp_path)!r}))
def work(report):
    while not pathlib.Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.02)
    return {{}}
with job.turn():
    running = job.look().running
    time.sleep(0.3)
    if not running: job.stop(); job.start("key", work); print("began")
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) for dummy in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    (tmp_path / "go").touch()
    assert sorted(outputs) == ["", "began\n"]
    assert Job("a", tmp_path).wait(20).result == {}
