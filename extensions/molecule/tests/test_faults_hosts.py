# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What happens to a member of a serving group: hung, rebooted, off the management network, a leg down, a disk full, a rank that hangs at its start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _units
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import BY_ITSELF, ONE_COMMAND, START_S, UNIT, UNTOUCHED, all_serve, phase, recovery, state
from extensions.molecule.tests.lab_hosts import lab, wait_for

SILENT = (
    "nft add table inet cut; nft add chain inet cut in '{ type filter hook input priority -300; }'; nft add rule inet cut in iif mgmt0 drop"
)

pytestmark = pytest.mark.faults_hosts


@pytest.fixture(autouse=True)
def fresh_counters(hosts: dict[str, Host]) -> None:
    """Each test is a day of its own: five starts in half an hour, and the group would stay down."""
    for host in hosts.values():
        host.run(f"systemctl reset-failed {UNIT}")


def test_a_leg_that_goes_down_and_up_ends_nothing(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    """The ranks compute over the management plane here, for want of RDMA: what a real group does is for real Sparks to show."""
    leg = plan["members"]["t1"]["legs"][0]
    lab("cut", "t1", leg["netdev"])
    done = playbook("status")
    assert f"{leg['netdev']}" in done.stdout and "site --tags fabric" in done.stdout
    lab("mend", "t1", leg["netdev"])
    with recovery("a leg down and up", UNTOUCHED):
        wait_for(lambda: "->" not in playbook("status").stdout, 120)
    assert all_serve(hosts)


def test_thirty_seconds_without_the_management_network_end_the_group_and_it_comes_back(hosts: dict[str, Host]) -> None:
    hosts["t2"].check_output(f'systemd-run --quiet --collect --unit=cut sh -c "{SILENT}; sleep 30; nft delete table inet cut"')
    with recovery("management network cut for 30 s", BY_ITSELF):
        wait_for(lambda: "rank 1 on t2" in str(state(hosts["t1"]).get("failure")), 120)
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_hung_host_ends_the_group_and_its_return_starts_it(hosts: dict[str, Host]) -> None:
    lab("hang", "t3")
    wait_for(lambda: phase(hosts["t1"]) == "waiting" and phase(hosts["t2"]) == "waiting", 120)
    lab("resume", "t3")
    with recovery("a host hung", BY_ITSELF):
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_rebooted_host_brings_the_group_back(hosts: dict[str, Host]) -> None:
    with recovery("a host rebooted", BY_ITSELF):
        hosts["t2"].check_output("systemd-run --quiet --on-active=1 systemctl reboot")
        wait_for(lambda: phase(hosts["t1"]) not in ("serving", ""), 120)
        wait_for(lambda: all_serve(hosts), START_S)


def test_a_rank_that_hangs_while_it_loads_is_ended_with_evidence(hosts: dict[str, Host]) -> None:
    hosts["t1"].check_output(f"rm -f {_units.failures_file('lab')} && podman kill gb10-lab")
    wait_for(lambda: phase(hosts["t3"]) == "loading", 180)
    hosts["t3"].check_output("kill -STOP $(podman top gb10-lab hpid | tail -n +2)")
    wait_for(lambda: "no rank has logged a line for" in str(state(hosts["t1"]).get("failure")), START_S)
    with recovery("a rank frozen while it loads", BY_ITSELF):
        wait_for(lambda: all_serve(hosts), START_S)
    stacks = hosts["t3"].check_output("cat $(ls -d /var/lib/gb10/evidence/lab/*-hang | tail -1)/stacks")
    assert "state T (stopped)" in stacks and "-- kernel" in stacks and "-- python" in stacks


def test_a_full_disk_of_the_head_is_survived(playbook: Any, hosts: dict[str, Host]) -> None:
    lab("fill", "t1")
    try:
        hosts["t3"].check_output("podman kill gb10-lab")
        wait_for(lambda: "rank 2 on t3 exited" in json.dumps(state(hosts["t1"]).get("failure")), 120)
    finally:
        lab("drain", "t1")
    with recovery("the head's disk full while a rank dies", ONE_COMMAND):
        done = playbook("start")
        assert done.returncode == 0, done.stdout
    assert all_serve(hosts)
    assert hosts["t1"].check_output(f"systemctl is-active {UNIT}") == "active"
