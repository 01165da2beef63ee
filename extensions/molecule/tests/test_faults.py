# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong on a serving cluster, one after the other: the group ends everywhere, and comes back by itself or by one command.

Each case starts the real engine again, so they are a scenario of their own (molecule test -s faults).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _units
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import BY_ITSELF, ONE_COMMAND, START_S, UNIT, all_serve, phase, recovery, state
from extensions.molecule.tests.lab_hosts import ROOT, lab, wait_for

pytestmark = pytest.mark.faults


@contextmanager
def meanwhile(member: str, script: str) -> Iterator[None]:
    """A shell script that runs on a member beside the block, and has ended after it."""
    with subprocess.Popen([sys.executable, "-m", "tests.lab", "exec", member, "--", "sh", "-c", script], cwd=ROOT) as process:
        yield
        process.wait(60)


def test_a_rank_that_dies_during_start_stops_all_and_shows_its_last_lines(playbook: Any, hosts: dict[str, Host]) -> None:
    assert playbook("stop").returncode == 0
    assert {host.service(UNIT).is_running for host in hosts.values()} == {False}
    killer = "until podman kill gb10-lab 2>/dev/null; do sleep 1; done"
    with meanwhile("t2", killer):
        done = playbook("start")
    assert done.returncode != 0
    flat = " ".join(done.stdout.split())
    assert "rank 1 on t2 exited with status 137" in flat, done.stdout
    assert {host.check_output(f"systemctl is-active {UNIT} || true") for host in hosts.values()} <= {"inactive", "failed"}
    assert {host.check_output("podman ps -q") for host in hosts.values()} == {""}


def test_start_brings_it_back(playbook: Any, hosts: dict[str, Host]) -> None:
    with recovery("a rank that dies during the start", ONE_COMMAND):
        done = playbook("start")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_a_killed_container_ends_the_group_and_it_comes_back_by_itself(hosts: dict[str, Host]) -> None:
    with recovery("a rank killed", BY_ITSELF):
        hosts["t3"].check_output("podman kill gb10-lab")
        wait_for(lambda: phase(hosts["t1"]) != "serving" and phase(hosts["t2"]) != "serving", 60)
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_frozen_rank_is_found_by_the_canary(hosts: dict[str, Host]) -> None:
    """Its supervisor lives, /health answers 200, and nothing computes: only a token that does not come tells."""
    hosts["t3"].check_output("kill -STOP $(podman top gb10-lab hpid | tail -n +2)")
    assert hosts["t1"].check_output("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health") == "200"
    with recovery("a rank frozen", BY_ITSELF):
        wait_for(lambda: phase(hosts["t1"]) != "serving", 180)
        wait_for(lambda: "rank 0 on t1 no longer computes: no token and no movement for" in str(state(hosts["t1"]).get("failure")), 120)
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_group_that_keeps_failing_stays_down_until_it_is_started(playbook: Any, hosts: dict[str, Host]) -> None:
    book = _units.failures_file("lab")
    failures = json.loads(hosts["t1"].check_output(f"cat {book}"))["failures"]
    assert len(failures) == 2, "the killed and the frozen one; a member that leaves is none"
    more = json.dumps({"failures": failures * 2})
    hosts["t1"].check_output(f"echo '{more}' > {book} && podman kill gb10-lab")
    wait_for(lambda: hosts["t1"].check_output(f"systemctl is-active {UNIT} || true") == "failed", 120)
    assert "the group keeps failing" in playbook("status").stdout
    with recovery("a group that keeps failing", ONE_COMMAND):
        assert playbook("start").returncode == 0
    assert all_serve(hosts) and not hosts["t1"].file(book).exists


def test_a_start_while_a_rank_ends_is_a_start_of_that_rank_too(playbook: Any, hosts: dict[str, Host]) -> None:
    """What failed before is forgotten with a start, and of a life that is just being tidied up, systemd would then forget to run it again."""
    slow = "/run/systemd/system/gb10-rank@lab.service.d/slow.conf"
    hosts["t2"].check_output(
        f"mkdir -p $(dirname {slow}) && printf '[Service]\\nExecStopPost=/bin/sleep 30\\n' > {slow} && systemctl daemon-reload"
    )
    try:
        hosts["t3"].check_output("podman kill gb10-lab")
        wait_for(lambda: hosts["t2"].check_output(f"systemctl show --property=SubState --value {UNIT}") == "stop-post", 120)
        done = playbook("start")
    finally:
        hosts["t2"].check_output(f"rm {slow} && systemctl daemon-reload")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_a_rank_that_runs_no_more_ends_the_wait_of_the_others(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    """No rank can tell the others, which wait for each other: t3 does not reach the head, and t2 is stopped meanwhile."""
    assert playbook("stop").returncode == 0
    port = plan["members"]["t3"]["rank_config"]["coordination_port"]
    rule = f"add rule inet apart out tcp dport {port} drop"
    hosts["t3"].check_output(f"nft 'add table inet apart; add chain inet apart out {{ type filter hook output priority 0; }}; {rule}'")
    stop = f"until systemctl is-active {UNIT}; do sleep 0.2; done; sleep 8; systemctl stop {UNIT}"
    try:
        with meanwhile("t2", stop):
            done = playbook("start")
    finally:
        hosts["t3"].check_output("nft delete table inet apart")
    assert done.returncode != 0
    assert f"t2: {UNIT} is inactive and not running" in " ".join(done.stdout.split()), done.stdout
    assert set(re.findall(r"fatal: \[(\w+)\]: FAILED!", done.stdout)) == set(hosts)
    assert playbook("start").returncode == 0 and all_serve(hosts)


def test_a_power_cut_ends_the_group_and_power_brings_it_back(hosts: dict[str, Host]) -> None:
    lab("off", "t2")
    wait_for(lambda: phase(hosts["t1"]) == "waiting" and phase(hosts["t3"]) == "waiting", 90)
    assert "rank 1 on t2" in hosts["t1"].check_output("cat /run/gb10/lab/state.json")
    with recovery("a host powered off and on", BY_ITSELF):
        lab("on", "t2")
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_changed_byte_is_healed_on_a_replica_and_refused_on_the_head(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    assert playbook("stop").returncode == 0
    weights = f"{plan['storage']['directory']}/model.safetensors"
    flip = f"printf X | dd of={weights} bs=1 seek=5000000 conv=notrunc status=none"
    hosts["t3"].check_output(flip)
    done = playbook("site", "--tags", "storage")
    assert done.returncode == 0 and re.search(r"t3 .*changed=[1-9]", done.stdout), done.stdout
    hosts["t1"].check_output(f"cp --preserve {weights} /root/kept && {flip}")
    before = hosts["t2"].check_output(f"sha256sum {weights}")
    done = playbook("site", "--tags", "storage")
    hosts["t1"].check_output(f"cp --preserve /root/kept {weights} && rm /root/kept")
    assert done.returncode != 0 and "model.safetensors" in done.stdout, done.stdout
    assert hosts["t2"].check_output(f"sha256sum {weights}") == before


def test_a_held_port_is_refused_before_anything_changes(playbook: Any, hosts: dict[str, Host]) -> None:
    hosts["t1"].check_output("systemd-run --unit port-holder python3 -m http.server 8000 && sleep 1")
    try:
        done = playbook("site")
        assert done.returncode != 0
        flat = " ".join(done.stdout.split())
        assert "port 8000 is in use by python3 (pid" in flat and "cluster_api_port" in flat, done.stdout
        assert not re.search(r"changed=[1-9]", done.stdout)
    finally:
        hosts["t1"].check_output("systemctl stop port-holder")


def test_the_whole_site_brings_it_back(playbook: Any, hosts: dict[str, Host]) -> None:
    done = playbook("site")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts)


def test_restart_is_a_new_life_of_every_rank(playbook: Any, hosts: dict[str, Host]) -> None:
    def lives() -> set[str]:
        return {host.check_output(f"systemctl show --property=InvocationID --value {UNIT}") for host in hosts.values()}

    before = lives()
    done = playbook("restart")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts) and not before & lives()
