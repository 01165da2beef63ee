# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two operators, and what really runs: decisions, and the doors to them over real files and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from ansible_collections.gb10.cluster.plugins.action.operation_lock import is_gone
from ansible_collections.gb10.cluster.plugins.module_utils import _host, _lock, _proof, _status
from hypothesis import given
from hypothesis import strategies as st

RESTART = _lock.Owner("ann@desk", "boot", 7, "restart")
OTHER = _lock.Owner("bob@rack", "boot", 7, "site")


def test_a_free_lock_is_taken_and_another_ones_is_refused_until_it_is_stale() -> None:
    lock = _lock.taken(None, RESTART, 100.0)
    assert _lock.judge(None, OTHER, 100.0) == _lock.FREE
    assert _lock.judge(lock, RESTART, 1e9) == _lock.OURS
    assert _lock.judge(lock, OTHER, 100.0 + _lock.STALE_S) == _lock.HELD
    assert _lock.judge(lock, OTHER, 101.0 + _lock.STALE_S) == _lock.STALE
    assert _lock.held_sentence(lock, 140.0).startswith("ann@desk has been running restart on this cluster for 40 s (pid 7): ")


def test_a_restart_keeps_its_lock_over_the_stop_and_the_start_in_it() -> None:
    stop = _lock.Owner(RESTART.who, RESTART.boot, RESTART.pid, "stop")
    lock = _lock.taken(_lock.taken(None, RESTART, 100.0), stop, 130.0)
    assert (lock.owner.what, lock.since, lock.seen) == ("restart", 100.0, 130.0)
    assert not _lock.frees(lock, stop) and _lock.frees(lock, RESTART)


@given(st.builds(_lock.Owner, st.text(), st.text(), st.integers(), st.text()), st.floats(0, 1e10), st.floats(0, 1e10))
def test_a_kept_lock_is_the_same_lock(owner: _lock.Owner, since: float, seen: float) -> None:
    lock = _lock.Lock(owner, since, seen)
    assert _lock.parse(lock.record()) == lock


def test_what_is_no_lock_is_free() -> None:
    damaged: list[Any] = [None, {}, {"owner": "x"}, {"owner": {"who": "x"}, "since": 1, "seen": 1}, {"owner": None, "since": "x"}]
    assert {_lock.parse(record) for record in damaged} == {None}


def test_an_earlier_run_is_gone_when_its_process_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_gone(process.pid)
        process.communicate(b"\n")
    assert is_gone(process.pid) and not is_gone(os.getpid())


CONTAINER = {"image": "ab12", "command": ["vllm", "serve", "/models/m", "--dtype", "float32"]}
RIGHT = _proof.Process(
    7, ["/usr/bin/python3", "/usr/bin/vllm", "serve", "/models/m", "--dtype", "float32"], {"A": "1", "NCCL_ALGO": "Ring"}
)
TITLED = _proof.Process(8, ["VLLM::EngineCore"], {})


def test_what_was_given_runs() -> None:
    problems, seen = _proof.judge(CONTAINER, {"A": "1"}, "sha256:ab12", [RIGHT, TITLED])
    assert problems == []
    assert seen["not_given"] == ["NCCL_ALGO"] and [process["read"] for process in seen["processes"]] == [True, False]


def test_another_image_argument_or_variable_is_named_and_no_value_is_shown() -> None:
    wrong = _proof.Process(7, [*RIGHT.arguments[:-1], "float16"], {"A": "secret"})
    problems, seen = _proof.judge(CONTAINER, {"A": "1", "B": "2"}, "cd34", [wrong])
    assert problems == [
        "image cd34 runs instead of ab12",
        "process 7 has other arguments than planned, the first is float16",
        "process 7 has another value of A",
        "process 7 has no B",
    ]
    assert "secret" not in str((problems, seen))


def test_a_real_process_is_read_as_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "--x=a b"], stdin=subprocess.PIPE, env={"A": "1\n2", "B": "="}) as process:
        base = f"/proc/{process.pid}"
        while b"input" not in (_host.read_bytes(f"{base}/cmdline") or b""):  # until it is the program
            time.sleep(0.01)
        arguments = _proof.arguments_of(_host.read_bytes(f"{base}/cmdline") or b"")
        environment = _proof.environment_of(_host.read_bytes(f"{base}/environ") or b"")
        assert process.pid in _host.descendants(os.getpid()) and _host.descendants(process.pid) == [process.pid]
        process.communicate(b"\n")
    assert arguments[1:] == ["-c", "input()", "--x=a b"]
    assert {"A": "1\n2", "B": "="}.items() <= environment.items()


def test_status_for_programs_says_what_the_screen_says() -> None:
    plan = {
        "cluster": {"name": "lab", "head": "t1", "topology": "pair", "members": ["t1", "t2"], "profile": "p"},
        "service": {"url": "http://x", "served_model_name": "m"},
        "members": {"t1": {"rank": 0}, "t2": {"rank": 1}},
    }
    member = {
        "active": "active", "phase": "serving", "detail": "", "failure": None, "leg_problems": [], "legs": 2, "mem_free_mib": 1024,
        "mem_total_mib": 2048, "swaps": [], "guard": None, "at_boot": True, "lock": "", "checks": {}, "evidence": [],
        "events": [{"at": 0, "what": "HCA x carries its address at GID index 5 instead of 3"}],
    }  # fmt: skip
    head = member | {"lock": "ann@desk runs site, since 40 s"}
    said = _status.summary(plan, {"t1": head, "t2": member})
    assert said["serving"] and said["lines"] == _status.screen(plan, {"t1": head, "t2": member})
    assert "ann@desk runs site, since 40 s" in said["lines"]
    assert any("at GID index 5 instead of 3 (start of 1970-01-01 00:00 UTC)" in line for line in said["lines"])
    down = member | {
        "phase": "stopped",
        "active": "inactive",
        "at_boot": False,
        "failure": {"reason": "r", "culprit": "t2", "evidence": "/e"},
    }
    lines = _status.screen(plan, {"t1": head, "t2": down})
    assert any(line.endswith("a boot does not start the group here -> ansible-playbook gb10.cluster.resume") for line in lines)
    assert lines[-1].endswith("gb10.cluster.logs --limit t2, ansible-playbook gb10.cluster.evidence")
    assert not _status.summary(plan, {"t1": head, "t2": None})["serving"]


def test_a_long_command_is_told_line_by_line() -> None:
    told: list[str] = []
    program = "import sys; print('one', flush=True); print('two', file=sys.stderr, flush=True); print('three'); sys.exit(3)"
    assert _host.follow([sys.executable, "-c", program], told.append) == 3
    assert told == ["one\n", "two\n", "three\n"]
