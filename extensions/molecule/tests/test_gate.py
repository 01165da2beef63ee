# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fabric gate on real legs: a leg that is slowed and one that loses frames are both found by their names."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from testinfra.host import Host

ARTEFACT = "/var/lib/gb10/gate/lab.json"

pytestmark = pytest.mark.faults


@contextmanager
def slowed(host: Host, device: str) -> Iterator[None]:
    """A leg of 40 Mb/s."""
    host.check_output(f"tc qdisc replace dev {device} root tbf rate 40mbit burst 256k latency 100ms")
    try:
        yield
    finally:
        host.check_output(f"tc qdisc del dev {device} root")


@contextmanager
def lossy(host: Host, device: str) -> Iterator[None]:
    """A leg that loses every third frame that comes in: with one in five, TCP was seen to get along."""
    rule = f"add rule inet loss in iifname {device} numgen random mod 100 < 33 drop"
    host.check_output(f"nft 'add table inet loss; add chain inet loss in {{ type filter hook input priority 0; }}; {rule}'")
    try:
        yield
    finally:
        host.check_output("nft delete table inet loss")


def artefact(hosts: dict[str, Host]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(hosts["t1"].file(ARTEFACT).content_string)
    return content


def test_nothing_is_measured_beside_a_running_group(playbook: Any) -> None:
    done = playbook("gate")
    assert done.returncode != 0
    assert "nothing can be measured beside it: stop it first" in " ".join(done.stdout.split())


def test_a_slowed_leg_and_one_with_loss_are_named(playbook: Any, hosts: dict[str, Host]) -> None:
    assert playbook("stop").returncode == 0
    with slowed(hosts["t2"], "enP2p1s0f0np0"), lossy(hosts["t1"], "enp1s0f0np0"):
        done = playbook("gate")
    assert done.returncode != 0
    (problem,) = artefact(hosts)["problems"]
    assert "leg t2 - t3 by t2.0-t3.1 half B " in problem and "leg t1 - t2 by t1.0-t2.1 half A " in problem
    assert problem.count("leg ") == 2 and "TCP segments sent again" in problem
    assert problem in " ".join(done.stdout.split())


def test_it_passes_without_them_and_leaves_no_container(playbook: Any, hosts: dict[str, Host]) -> None:
    done = playbook("gate")
    assert done.returncode == 0, done.stdout
    kept = artefact(hosts)
    assert kept["problems"] == [] and time.time() - kept["measured_at"] < 600
    assert {"utc", "image", "torch", "backend", "topology", "members", "digest", "plan", "environment", "marks_gb_per_s"} <= kept.keys()
    ways = {way["name"]: way for way in kept["measurements"]}
    assert len(ways) == 7
    assert all([row["bytes"] for row in way["rows"]][:5] == [8, 256, 8192, 262144, 8388608] for way in ways.values())
    assert all(row["wrong"] == 0 for way in ways.values() for row in way["rows"])
    assert {host.check_output("podman ps -aq") for host in hosts.values()} == {""}
