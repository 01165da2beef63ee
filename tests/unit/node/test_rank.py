# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rank supervisors of a group, as real processes on loopback addresses, over a stand-in for the container engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.unit.node.packages import PACKAGES

ENGINE = r'''#!/usr/bin/env python
"""Stands in for docker and podman: run stays until stop; rank 0 answers /health and one token; CRASH ends a rank, for want of memory with OOM."""
import http.server, json, os, pathlib, signal, subprocess, sys, time
here, verb = pathlib.Path(__file__).parent, sys.argv[1]
with open(here / "calls", "a") as calls: calls.write(" ".join(sys.argv[1:]) + "\n")
name = sys.argv[sys.argv.index("--name") + 1] if verb == "run" else sys.argv[-1]
pidfile = here / (name + ".pid")
if verb == "image" and (here / "noimage").exists(): sys.exit("image not known")
if verb == "image": print(json.dumps([{"Id": sys.argv[-1]}])); sys.exit(0)
if verb == "exec": sys.exit("py-spy: not found")
if verb == "ps": print(*(f"0 {file.stem}" for file in here.glob("*.pid")), sep="\n"); sys.exit(0)
if verb == "inspect" and "Pid" in sys.argv[3]: print(pidfile.read_text() if pidfile.exists() else 0); sys.exit(0)
if verb == "inspect": print(str((here / ("oom" + name[-1])).exists()).lower()); sys.exit(0)
while verb == "stop" and (here / "busy").exists(): time.sleep(0.1)
if verb in ("stop", "rm"):
    if pidfile.exists(): os.kill(int(pidfile.read_text()), signal.SIGTERM); pidfile.unlink()
    sys.exit(0)
if (here / ("slow" + name[-1])).exists(): time.sleep(float((here / ("slow" + name[-1])).read_text()))
pidfile.write_text(str(os.getpid()))
print("engine of", name, "starts", flush=True)
rank = name[-1]
if (here / ("crash" + rank)).exists():
    time.sleep(float((here / ("crash" + rank)).read_text() or 0)); print("RuntimeError: out of luck", flush=True); pidfile.unlink(); sys.exit(3)
if rank != "0": time.sleep(60)
class Api(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/metrics": self.wfile.write((here / "metrics").read_bytes() if (here / "metrics").exists() else b"")
    def do_POST(self):
        while (here / "hang").exists(): time.sleep(0.1)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(here / "asked", "a") as file: file.write(json.dumps(asked["prompt"]) + "\n")
        if (here / "chatty").exists(): print("the first token is on", flush=True)
        good = self.headers["Authorization"] == "Bearer sesame"
        body = json.dumps({"usage": {"completion_tokens": 1}}).encode()
        status = 401 if not good else 500 if (here / "dying").exists() else 400 if asked["prompt"] == [100] * 7 else 200
        self.send_response(status); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int((here / "port").read_text())), Api).serve_forever()
'''


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


AnyGroup = TypeVar("AnyGroup", bound="Group")


class Group:
    """Three ranks on 127.0.0.1 to 127.0.0.3 under one temporary root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        engine = root / "engine"
        engine.write_text(ENGINE.replace("/usr/bin/env python", sys.executable))
        engine.chmod(0o755)
        self.port, self.api_port = 20000 + os.getpid() % 20000, 40000 + os.getpid() % 20000
        (root / "port").write_text(str(self.api_port))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.recovery = {"backoff_s": [60, 60], "canary_interval_s": 1, "canary_silence_s": 7, "load_silence_s": 30}
        self.shorter: dict[str, float] = {}
        """Times of the supervisor that a test cannot wait for."""

    def config(self, rank: int, digest: str = "d" * 64) -> dict[str, Any]:
        ranks = [{"rank": r, "member": f"t{r + 1}", "address": f"127.0.0.{r + 1}"} for r in range(3)]
        container = {
            "name": f"gb10-lab-{rank}", "image": "i", "command": ["serve", f"--node-rank={rank}"], "environment": {"A": "b c"},
            "volumes": [{"source": "/m", "target": "/models", "read_only": True}], "devices": [], "gpus": False, "capabilities": ["IPC_LOCK"],
            "ulimits": {"memlock": "-1"}, "shm_mib": 64, "memory_mib": 128, "oom_score_adj": 500,
        }  # fmt: skip
        return {
            "group": "lab", "rank": rank, "world_size": 3, "digest": digest, "engine": str(self.root / "engine"), "ranks": ranks,
            "coordination_port": self.port, "master_port": 10000 + self.port % 10000, "api": {"port": self.api_port},
            "served_model_name": "m", "container": container,
            "timeouts": {"start_s": 20, "stop_s": 2, "heartbeat_s": 2},
            "recovery": self.recovery,
            "start": {
                "free_mib": 0, "legs": [{"hca": "rocep1s0f0", "netdev": "enp1s0f0np0", "address": "10.10.0.1"}], "virtual_heads": {},
                "checkpoint": str(self.root / f"model{rank}"), "config_hash": "", "sysfs": str(self.root / f"sys{rank}"),
                "gate": "g" * 64, "gate_max_age_s": None, "log_lines": {}, "warm_up": [],
            },
        }  # fmt: skip

    def start(self, rank: int, **config: Any) -> None:
        if rank in self.processes:
            self.processes[rank].wait(60)
        files = self.root / f"etc{rank}" / "lab"
        files.mkdir(parents=True, exist_ok=True)
        (files / "rank.json").write_text(json.dumps(self.config(rank, **config)))
        model = self.root / f"model{rank}"
        model.mkdir(exist_ok=True)
        (model / "config.json").touch()
        if rank == 0:
            (files / "api-key").write_text("sesame\n")
        etc, run, var = (str(self.root / f"{folder}{rank}") for folder in ("etc", "run", "var"))
        procfs = self.root / "proc"  # never the machine's own: a start drops its page cache
        (procfs / "sys/vm").mkdir(parents=True, exist_ok=True)
        (procfs / "sys/vm/drop_caches").touch()
        (procfs / "meminfo").write_text("MemFree: 4096000 kB\nMemAvailable: 4096000 kB\nCached: 1024 kB\n")
        code = (
            "import asyncio, sys; from pathlib import Path; from gb10_node import config, rank; "
            f"vars(rank).update({self.shorter!r}); "
            f"sys.exit(asyncio.run(rank.supervise(config.load('lab', Path({etc!r}), Path({run!r}), Path({var!r}), Path({str(procfs)!r})))))"
        )
        with (self.root / f"log{rank}").open("ab") as log:
            environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
            self.processes[rank] = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)

    def state(self, rank: int) -> dict[str, Any]:
        try:
            return json.loads((self.root / f"run{rank}" / "lab" / "state.json").read_text())
        except FileNotFoundError:
            return {"phase": "absent", "detail": "", "failure": None}

    def phases(self) -> list[str]:
        return [self.state(rank)["phase"] for rank in range(3)]

    def calls(self, verb: str) -> list[str]:
        try:
            return [line for line in (self.root / "calls").read_text().splitlines() if line.startswith(verb + " ")]
        except FileNotFoundError:
            return []

    def statuses(self) -> list[int]:
        return [self.processes[rank].wait(60) for rank in sorted(self.processes)]


def ended(group: AnyGroup) -> Iterator[AnyGroup]:
    """A group whose ranks end with the test."""
    yield group
    for process in group.processes.values():
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    yield from ended(Group(tmp_path))


def test_the_head_waits_for_the_container_of_a_worker_whose_engine_takes_its_time(group: Group) -> None:
    (group.root / "slow2").write_text("3")
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    made = [(group.root / f"gb10-lab-{rank}.pid").stat().st_mtime_ns for rank in range(3)]
    assert max(made[1:]) < made[0]


def test_an_engine_that_never_gets_to_run_the_container_ends_the_start(group: Group) -> None:
    (group.root / "slow2").write_text("60")
    group.recovery["load_silence_s"] = 3
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 75, 1]
    assert "rank 2 on t3 has no container after 3 s: " in group.state(0)["failure"]["reason"]


def test_workers_start_first_the_head_last_and_a_token_makes_it_serve(group: Group) -> None:
    group.start(0)
    wait_for(lambda: group.state(0)["phase"] == "waiting")
    group.start(2)
    wait_for(lambda: "rank 1 on t2" in group.state(0)["detail"] and "rank 2" not in group.state(0)["detail"])
    assert group.calls("run") == [], "no container runs before the whole group is there"
    group.start(1)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    names = [line.split("--name ")[1].split()[0] for line in group.calls("run")]
    assert sorted(names[:2]) == ["gb10-lab-1", "gb10-lab-2"] and names[2] == "gb10-lab-0"


def test_the_api_key_is_in_no_command_line(group: Group) -> None:
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    assert "sesame" not in (group.root / "calls").read_text()
    assert (group.root / "run0" / "lab" / "rank.env").stat().st_mode & 0o777 == 0o600


def test_a_rank_that_dies_during_start_ends_all_with_its_last_lines(group: Group) -> None:
    (group.root / "crash1").write_text("1.5")
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 1, 75]
    for rank in range(3):
        failure = group.state(rank)["failure"]
        assert failure["reason"] == "rank 1 on t2 exited with status 3"
        assert failure["culprit"] == "t2"
        assert failure["log"][-1] == "RuntimeError: out of luck"
        assert not failure["stopped"]
    assert not list(group.root.glob("*.pid")), "no container is left"


def test_a_rank_that_went_over_its_memory_says_so_everywhere(group: Group) -> None:
    (group.root / "crash2").write_text("1.5")
    (group.root / "oom2").touch()
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 75, 1]
    for rank in range(3):
        assert group.state(rank)["failure"]["reason"] == "rank 2 on t3 exited with status 3: it went over its memory limit of 128 MiB"


def test_a_head_that_dies_ends_the_workers(group: Group) -> None:
    (group.root / "crash0").write_text("1")
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [1, 75, 75]
    assert group.state(2)["failure"]["reason"] == "rank 0 on t1 exited with status 3"


def test_a_killed_supervisor_ends_the_group_and_its_return_starts_it(group: Group) -> None:
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    group.processes[2].send_signal(signal.SIGKILL)
    assert group.statuses() == [75, 75, -9]
    assert "rank 2 on t3 closed its link" in group.state(0)["failure"]["reason"]
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    assert group.state(0)["failure"] is None


def test_a_frozen_member_is_lost_after_the_heartbeat_time(group: Group) -> None:
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    group.processes[1].send_signal(signal.SIGSTOP)
    assert group.processes[0].wait(60) == 75
    assert "rank 1 on t2 was silent" in group.state(0)["failure"]["reason"]
    group.processes[1].send_signal(signal.SIGCONT)


def test_a_stopped_rank_stops_cleanly_and_ends_the_others(group: Group) -> None:
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    group.processes[1].terminate()
    assert group.statuses() == [75, 0, 75]
    assert group.state(0)["failure"]["reason"] == "rank 1 on t2 was stopped"
    assert group.state(0)["failure"]["stopped"] and group.state(2)["failure"]["stopped"]
    assert group.state(1)["phase"] == "stopped"


def test_a_rank_whose_container_takes_its_time_to_stop_no_longer_says_that_it_serves(group: Group) -> None:
    start_all(group)
    (group.root / "busy").write_text("")
    group.processes[1].terminate()
    wait_for(lambda: group.phases() == ["stopping"] * 3)
    assert [group.state(rank)["detail"] for rank in range(3)] == ["rank 1 on t2 was stopped", "", "rank 1 on t2 was stopped"]
    (group.root / "busy").unlink()
    assert group.statuses() == [75, 0, 75]


def test_another_plan_is_refused_without_a_start(group: Group) -> None:
    group.start(0)
    group.start(1)
    group.start(2, digest="e" * 64)
    wait_for(lambda: "plan is not the head's" in group.state(2)["detail"])
    assert group.calls("run") == []


def test_a_worker_that_leaves_before_the_start_costs_nothing(group: Group) -> None:
    group.start(0)
    group.start(1)
    wait_for(lambda: "rank 1" not in group.state(0)["detail"] and group.state(0)["phase"] == "waiting")
    group.processes[1].kill()
    wait_for(lambda: "rank 1" in group.state(0)["detail"])
    group.start(1)
    group.start(2)
    wait_for(lambda: group.phases() == ["serving"] * 3)


def start_all(group: Group) -> None:
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)


def test_a_serving_group_is_asked_for_a_token_again_and_again(group: Group) -> None:
    start_all(group)
    wait_for(lambda: group.state(0)["canary"] is not None)
    first = group.state(0)["canary"]["at"]
    wait_for(lambda: group.state(0)["canary"]["at"] > first)
    assert group.state(1)["canary"] is None, "only the head asks"


def test_a_group_that_neither_answers_nor_moves_is_ended_and_counted(group: Group) -> None:
    start_all(group)
    (group.root / "metrics").write_text('vllm:num_requests_running{engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n')
    (group.root / "hang").touch()
    assert group.statuses() == [1, 75, 75]
    failure = group.state(0)["failure"]["reason"]
    assert failure.startswith("rank 0 on t1 no longer computes: no token and no movement for ")
    assert failure.endswith(" s (num_requests_running 1.0, kv_cache_usage_perc 0.25)")
    assert json.loads((group.root / "var0/recovery/lab.json").read_text())["failures"][0]["reason"] == failure


def test_a_refused_token_is_not_the_cause_where_a_rank_says_more(group: Group) -> None:
    """A worker killed for memory: the head's engine refuses tokens before that worker's container has ended."""
    start_all(group)
    asked = len((group.root / "asked").read_text().splitlines())
    (group.root / "oom2").touch()
    (group.root / "dying").touch()
    wait_for(lambda: len((group.root / "asked").read_text().splitlines()) > asked)
    os.kill(int((group.root / "gb10-lab-2.pid").read_text()), signal.SIGKILL)
    assert group.statuses() == [75, 75, 1]
    assert group.state(0)["failure"]["reason"] == "rank 2 on t3 exited with status -9: it went over its memory limit of 128 MiB"


def test_a_group_that_refuses_tokens_is_ended(group: Group) -> None:
    group.shorter = {"CAUSE_S": 0.5}
    start_all(group)
    (group.root / "dying").touch()
    assert group.statuses() == [1, 75, 75]
    assert "rank 0 on t1 no longer computes: a token was refused with HTTP 500" in group.state(0)["failure"]["reason"]


def test_a_long_prefill_is_waited_for(group: Group) -> None:
    start_all(group)
    (group.root / "hang").touch()
    for step in range(12):  # longer than the silence that ends a group
        (group.root / "new").write_text(f"vllm:kv_cache_usage_perc 0.{step:02}\n")
        (group.root / "new").replace(group.root / "metrics")
        time.sleep(1)
    (group.root / "hang").unlink()
    wait_for(lambda: (group.state(0)["canary"] or {"seconds": 0})["seconds"] > 7)
    assert group.phases() == ["serving"] * 3


def test_a_failed_group_waits_before_it_starts_again(group: Group) -> None:
    (group.root / "crash1").write_text("")
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 1, 75]
    (group.root / "crash1").unlink()
    before = len(group.calls("run"))
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.state(1)["detail"] == "for the other ranks" and group.state(2)["detail"] == "for the other ranks")
    detail = group.state(0)["detail"]
    assert detail.startswith("until ") and detail.endswith(", because rank 1 on t2 exited with status 3")
    assert len(group.calls("run")) == before
    (group.root / "var0/recovery/lab.json").unlink()
    wait_for(lambda: group.phases() == ["serving"] * 3)


def test_a_group_that_keeps_failing_stays_down_until_its_book_is_closed(group: Group) -> None:
    (group.root / "crash1").write_text("")
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 1, 75]
    (group.root / "crash1").unlink()
    book = group.root / "var0/recovery/lab.json"
    book.write_text(json.dumps({"failures": json.loads(book.read_text())["failures"] * 3}))
    group.start(0)
    assert group.processes[0].wait(60) == 69
    assert group.state(0)["failure"]["reason"].startswith(
        "the group keeps failing, the last time because rank 1 on t2 exited with status 3: see"
    )
    assert group.state(0)["failure"]["log"][-1] == "RuntimeError: out of luck"
    book.unlink()
    start_all(group)


def test_a_member_that_leaves_and_comes_back_is_no_failure(group: Group) -> None:
    for _time in range(2):
        start_all(group)
        group.processes[1].terminate()
        assert group.statuses() == [75, 0, 75]
    assert not (group.root / "var0/recovery/lab.json").exists()


def test_a_rank_without_grace_kills_its_container(group: Group) -> None:
    start_all(group)
    group.processes[1].send_signal(signal.SIGQUIT)
    assert group.statuses() == [75, 0, 75]
    assert "stop -t 0 gb10-lab-1" in group.calls("stop")
