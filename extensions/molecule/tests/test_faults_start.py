# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a start refuses, and what it finds changed; two operators at once; a controller that is killed."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _units
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import ONE_COMMAND, UNIT, all_serve, phase, recovery, state
from extensions.molecule.tests.lab_hosts import begin, kill, wait_for

KILLS = int(os.environ.get("GB10_KILLS", "3"))
"""Points of site.yml at which the controller is killed; their times follow from a fixed seed."""

pytestmark = pytest.mark.service


def refusal(hosts: dict[str, Host], member: str) -> str:
    """Restart one member's rank, and return why the group then refuses to start; every member knows it."""
    hosts["t1"].check_output(f"rm -f {_units.failures_file('lab')}")
    hosts[member].check_output(f"systemctl restart {UNIT}")
    said: set[str] = set()

    def agreed() -> bool:
        """Whether one refusal is known to all; the next one may have other figures."""
        said.clear()
        said.update((state(host).get("failure") or {}).get("reason", "") for host in hosts.values())
        return len(said) == 1 and "cannot start" in next(iter(said))

    wait_for(agreed, 240)
    return said.pop()


def test_a_config_json_that_was_staged_anew_is_refused_and_healed(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    directory = plan["storage"]["directory"]
    hosts["t2"].check_output(f"echo >> {directory}/config.json")
    reason = refusal(hosts, "t2")
    assert reason.startswith(
        f"rank 1 on t2 cannot start: {directory}/config.json is not the one that was there when the group was set up: "
    )
    assert reason.endswith("run site.yml --tags storage,service")
    with recovery("config.json staged anew on one member", ONE_COMMAND):
        done = playbook("site", "--tags", "storage,service")
        assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_every_member_keeps_evidence_of_that_without_the_key(playbook: Any, hosts: dict[str, Host], tmp_path: Path) -> None:
    done = playbook("evidence", "-e", f"evidence_dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    events = [{folder.name for folder in (tmp_path / member).iterdir()} for member in hosts]
    common = set.intersection(*events)
    assert any(name.endswith("-failed-start") for name in common), events
    key = hosts["t1"].check_output("cat /etc/gb10/lab/api-key")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or key not in path.read_text(errors="replace"), path
    folder = tmp_path / "t2" / max(common)
    assert "MemFree" in (folder / "meminfo").read_text() and "ESTAB" in (folder / "sockets").read_text()


def test_too_little_free_memory_is_refused_with_who_has_it(playbook: Any, hosts: dict[str, Host]) -> None:
    """The requirement is made up: the hosts share the machine's memory. It is real in test_fullkernel_group."""
    path = "/etc/gb10/lab/rank.json"
    config = json.loads(hosts["t3"].check_output(f"cat {path}"))
    config["start"]["free_mib"] = 10_000_000
    hosts["t3"].check_output(f"cat > {path} << 'END'\n{json.dumps(config)}\nEND")
    reason = refusal(hosts, "t3")
    assert "rank 2 on t3 cannot start: " in reason and "GiB are free and " in reason and "stop what holds the memory (GiB: " in reason
    with recovery("too little free memory on one member", ONE_COMMAND):
        done = playbook("start")
        assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_another_image_on_one_member_is_refused_at_once(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    assert playbook("stop").returncode == 0
    reference = plan["image"]["reference"]
    right = hosts["t3"].check_output(f"podman image inspect --format '{{{{.Id}}}}' {reference}")
    hosts["t3"].check_output(f"tar -c /etc/hostname | podman import - {reference}")
    try:
        done = playbook("start")
        flat = " ".join(done.stdout.split())
        assert done.returncode != 0 and "t3 would run another image, config.json or plan than t1: run site.yml on all members" in flat, (
            done.stdout
        )
    finally:
        hosts["t3"].check_output(f"podman tag {right} {reference}")
    with recovery("another image on one member", ONE_COMMAND):
        done = playbook("start")
        assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_a_moved_gid_is_found_and_told_and_a_second_operator_waits(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    leg = plan["members"]["t1"]["legs"][0]
    address, device = f"{leg['address']}/{leg['prefix_length']}", leg["netdev"]
    other = "192.0.2.9/32"
    hosts["t1"].check_output(f"ip address del {address} dev {device}; sleep 1; ip address add {other} dev {device}; sleep 1")
    hosts["t1"].check_output(f"ip address add {address} dev {device}; sleep 1")
    try:
        with recovery("a GID table that shifted between two starts", ONE_COMMAND), begin("restart") as restart:
            wait_for(lambda: "restart" in hosts["t1"].run("cat /run/gb10/locks/lab.json").stdout, 120)
            second = playbook("stop")
            output = restart.communicate(timeout=900)[0]
            assert restart.returncode == 0, output
    finally:
        hosts["t1"].check_output(f"ip address del {other} dev {device}")
    flat = " ".join(second.stdout.split())
    assert second.returncode != 0 and "has been running restart on this cluster for" in flat, second.stdout
    assert all_serve(hosts) and hosts["t1"].check_output("cat /run/gb10/locks/lab.json") == ""
    event = state(hosts["t1"])["events"][-1]["what"]
    assert event == f"HCA {leg['hca']} carries its address at GID index 5 instead of 3"
    assert state(hosts["t1"])["checks"]["gid_indexes"][leg["hca"]] == 5
    assert event in " ".join(playbook("status").stdout.split())


def test_restart_looks_before_it_stops_anything(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    path = f"{plan['storage']['directory']}/config.json"
    hosts["t3"].check_output(f"mv {path} {path}.away")
    try:
        done = playbook("restart")
    finally:
        hosts["t3"].check_output(f"mv {path}.away {path}")
    assert done.returncode != 0 and "config.json is not there" in " ".join(done.stdout.split()), done.stdout
    assert all_serve(hosts)


def test_what_runs_is_what_was_planned(playbook: Any, hosts: dict[str, Host]) -> None:
    done = playbook("proof")
    assert done.returncode == 0, done.stdout
    assert "VLLM::Worker" in done.stdout
    assert hosts["t1"].check_output("cat /etc/gb10/lab/api-key") not in done.stdout


def test_a_controller_killed_anywhere_leaves_nothing_that_the_next_run_does_not_finish(playbook: Any, hosts: dict[str, Host]) -> None:
    moments = random.Random(8)
    for _kill in range(KILLS):
        with begin("site") as run:
            time.sleep(moments.uniform(1, 30))
            kill(run)
    with recovery(f"controller killed at {KILLS} points of site.yml", ONE_COMMAND):
        done = playbook("site")
        assert done.returncode == 0, done.stdout
    again = playbook("site")
    assert "changed=0" in again.stdout and "changed=1" not in again.stdout, again.stdout
    assert {phase(host) for host in hosts.values()} == {"serving"}
