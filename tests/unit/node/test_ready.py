# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has to be so before a group is announced ready, what a start tells meanwhile, and NCCL's part of the evidence; real supervisors."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gb10_node import evidence

from tests.unit.node.test_rank import ended, wait_for
from tests.unit.node.test_start import CheckedGroup


@pytest.fixture
def group(tmp_path: Path) -> Iterator[CheckedGroup]:
    yield from ended(CheckedGroup(tmp_path))


def start_all(group: CheckedGroup, **start: Any) -> None:
    group.change = lambda rank, config: config["start"].update(start)
    for rank in range(3):
        group.start(rank)


def serves(group: CheckedGroup) -> bool:
    return group.phases() == ["serving"] * 3


def said(group: CheckedGroup, rank: int) -> str:
    return (group.root / f"log{rank}").read_text()


def test_each_length_is_computed_once_before_the_group_is_ready(group: CheckedGroup) -> None:
    start_all(group, warm_up=[3, 5])
    wait_for(lambda: serves(group))
    asked = [json.loads(line) for line in (group.root / "asked").read_text().splitlines()]
    assert asked[:3] == ["1", [100] * 3, [101] * 5], "no prompt begins as another one does"
    log = said(group, 0)
    assert log.index("gb10: loading: 5 tokens, to warm up") < log.index("gb10: serving")
    assert group.state(0)["events"] == []


def test_a_length_that_is_refused_is_told_and_ends_nothing(group: CheckedGroup) -> None:
    start_all(group, warm_up=[7, 3])
    wait_for(lambda: serves(group))
    (event,) = group.state(0)["events"]
    assert event["what"].startswith("7 tokens were not warmed up, a token was refused with HTTP 400")
    assert [101, 101, 101] in [json.loads(line) for line in (group.root / "asked").read_text().splitlines()]


def test_a_line_of_every_rank_is_waited_for(group: CheckedGroup) -> None:
    start_all(group, log_lines={"the engine": r"engine of \S+ starts"})
    wait_for(lambda: serves(group))


def test_a_rank_that_does_not_say_that_a_lever_is_on_does_not_serve(group: CheckedGroup) -> None:
    group.shorter = {"LINES_S": 2}
    start_all(group, log_lines={"the engine": "engine of gb10-lab-[02] starts"})
    assert group.statuses() == [75, 1, 75]
    for rank in range(3):
        assert group.state(rank)["failure"]["reason"] == (
            "rank 1 on t2 has not logged what says 'the engine', a line with 'engine of gb10-lab-[02] starts': see why it is off, or take it "
            "out of the profile"
        )
    assert "gb10: serving" not in said(group, 0)


def test_a_line_may_come_with_the_first_token(group: CheckedGroup) -> None:
    """Of this stand-in only rank 0 has something to say then."""
    (group.root / "chatty").touch()
    start_all(group, log_lines={"first": "the first token is on|engine of gb10-lab-[12] starts"})
    wait_for(lambda: serves(group))


def test_memory_is_told_while_the_model_loads_and_no_longer(group: CheckedGroup) -> None:
    group.shorter = {"MEMORY_LINE_S": 0.1}
    start_all(group)
    wait_for(lambda: serves(group))
    time.sleep(0.5)
    for rank in range(3):
        before, after = said(group, rank).split("gb10: serving")
        assert "gb10: MemFree 4000 MiB, MemAvailable 4000 MiB, Cached 1 MiB" in before and "MemFree" not in after


def test_a_start_over_an_old_measurement_is_told_once_and_started(group: CheckedGroup) -> None:
    sentence = "the fabric of group lab has not been measured on this head: run the playbook gb10.cluster.gate"
    for _start in range(2):
        start_all(group, gate_max_age_s=7.0)
        wait_for(lambda: serves(group))
        assert [event["what"] for event in group.state(0)["events"]] == [sentence]
        assert group.state(0)["checks"]["gate"] == sentence and group.state(1)["events"] == []
        for process in group.processes.values():
            process.terminate()
        group.statuses()


def test_a_pass_that_holds_is_no_event(group: CheckedGroup) -> None:
    folder = group.root / "var0/gate"
    folder.mkdir(parents=True)
    kept = {"version": 1, "digest": "g" * 64, "measured_at": time.time(), "problems": []}
    (folder / "lab.json").write_text(json.dumps(kept))
    start_all(group, gate_max_age_s=3600.0)
    wait_for(lambda: serves(group))
    assert group.state(0)["events"] == [] and group.state(0)["checks"]["gate"] == ""


class Ras(socketserver.StreamRequestHandler):
    """Stands in for NCCL's RAS, which needs a GPU: one request line, one text."""

    def handle(self) -> None:
        self.wfile.write(b"asked for " + self.rfile.readline() + b"synthetic: 3 ranks, all responding\n")


def test_ras_is_asked_where_nccl_says_and_off_is_said() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Ras) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert evidence._ras({"NCCL_RAS_ADDR": address}) == "asked for verbose status\nsynthetic: 3 ranks, all responding\n"
    assert evidence._ras({"NCCL_RAS_ENABLE": "0"}) == "off (NCCL_RAS_ENABLE=0)\n"
    with pytest.raises(OSError):
        evidence._ras({"NCCL_RAS_ADDR": address})


def test_ras_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RAS_S", 0.3)
    with socketserver.TCPServer(("127.0.0.1", 0), Ras) as server:  # takes the connection and never answers
        assert evidence._ras({"NCCL_RAS_ADDR": f"127.0.0.1:{server.server_address[1]}"}) == ""


def test_a_disk_that_takes_nothing_ends_the_group_as_any_failure_does(group: CheckedGroup) -> None:
    """Neither evidence nor the count can be kept; the statuses are those that systemd knows."""
    (group.root / "var0").write_text("no folder can be made in a file")
    (group.root / "crash1").write_text("1")
    start_all(group)
    assert group.statuses() == [75, 1, 75]
    log = said(group, 0)
    assert "gb10: no evidence is kept (" in log and "gb10: this failure is not counted (" in log
    assert group.state(0)["failure"]["reason"] == "rank 1 on t2 exited with status 3"
