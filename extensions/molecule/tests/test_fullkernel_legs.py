# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The legs of full-kernel hosts carry what a real cable carries, and go on doing so after whatever happened to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.kernel_hosts import flood, in_namespace, reboot
from extensions.molecule.tests.lab_hosts import lab, wait_for

# A change of the network that does not stand, on real links: the same promises as on the other lab.
from extensions.molecule.tests.test_fabric import (  # noqa: F401  # pylint: disable=unused-import
    OTHER_POOL,
    fabric,
    ipv4,
    killed_controller,
    network_files,
    pending,
    planned,
    test_a_boot_before_the_time_is_over_takes_it_back_too,
    test_a_change_whose_proof_fails_is_taken_back_everywhere_at_once,
    test_a_member_takes_back_by_itself_what_a_killed_controller_left,
)

CUT, PEER = ("t1", "enp1s0f0np0"), ("t2", "enp1s0f1np1")
DEVICES = 5  # of a host: one on the management network and four legs
MIB = 100

pytestmark = pytest.mark.fullkernel


@pytest.fixture(scope="module", autouse=True)
def _nothing_serves(playbook: Callable[..., Any]) -> None:
    """A group that starts after each of these faults would only cost time."""
    assert playbook("stop").returncode == 0


def carrier(hosts: dict[str, Host], name: str, netdev: str) -> bool:
    return "LOWER_UP" in hosts[name].check_output(f"ip link show {netdev}")


def test_a_power_cut_loses_neither_what_was_put_back_nor_what_was_confirmed(
    plan: dict[str, Any], hosts: dict[str, Host], playbook: Callable[..., Any]
) -> None:
    """Only hosts with kernels of their own have a page cache to lose."""
    before = network_files(hosts["t2"])
    killed_controller(hosts, seconds=15)
    wait_for(lambda: hosts["t2"].run("ls -d /var/lib/gb10/network/pending /var/lib/gb10/network/undoing").stdout == "")
    time.sleep(8)  # by then the journal has been written, and what files hold has not: the kernel keeps that for thirty seconds
    lab("off", "t2")
    lab("on", "t2")
    assert network_files(hosts["t2"]) == before
    wait_for(lambda: planned(plan, "t2").items() <= ipv4(hosts["t2"]).items())
    wait_for(lambda: not any(pending(host) for host in hosts.values()))
    assert fabric(playbook, "-e", f"cluster_leg_pool={OTHER_POOL}").returncode == 0
    after = network_files(hosts["t2"])
    lab("off", "t2")
    lab("on", "t2")
    assert network_files(hosts["t2"]) == after != before
    assert fabric(playbook).returncode == 0
    assert network_files(hosts["t2"]) == before


def test_every_leg_carries_bulk_both_ways_and_all_at_once(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    for _round in range(3):
        assert flood(plan, hosts, MIB) == []


def test_both_ends_of_a_pulled_cable_lose_the_carrier_and_keep_the_address(hosts: dict[str, Host]) -> None:
    def state(end: tuple[str, str]) -> tuple[bool, bool]:
        text = hosts[end[0]].check_output(f"ip address show {end[1]}")
        return "LOWER_UP" in text, "inet 10.10." in text

    lab("cut", *CUT)
    try:
        wait_for(lambda: state(CUT) == (False, True) and state(PEER) == (False, True))
    finally:
        lab("mend", *CUT)
    wait_for(lambda: state(CUT) == (True, True) and state(PEER) == (True, True))
    hosts["t1"].check_output("ping -n -c 1 -W 2 -M do -s 8972 -I enp1s0f0np0 10.10.0.2")


def test_a_cable_pulled_and_put_back_under_load_loses_nothing(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(flood, plan, hosts, 2 * MIB)
        time.sleep(1)
        for netdev in ("enp1s0f0np0", "enP2p1s0f0np0"):
            lab("cut", "t1", netdev)
        time.sleep(1)
        for netdev in ("enp1s0f0np0", "enP2p1s0f0np0"):
            lab("mend", "t1", netdev)
        assert sent.result() == []
    assert flood(plan, hosts, MIB) == []


def test_a_power_cut_under_load_takes_the_carrier_from_the_neighbours_and_power_brings_all_back(
    plan: dict[str, Any], hosts: dict[str, Host]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(flood, plan, hosts, 4 * MIB)
        time.sleep(1)
        lab("off", "t2")
        try:
            wait_for(lambda: not carrier(hosts, "t1", "enp1s0f0np0") and not carrier(hosts, "t3", "enp1s0f1np1"))
        finally:
            lab("on", "t2")
        sent.exception()  # what was under way to t2 and from it is lost, whichever way
    wait_for(lambda: carrier(hosts, "t1", "enp1s0f0np0") and carrier(hosts, "t3", "enp1s0f1np1"))
    assert flood(plan, hosts, MIB) == []


def test_a_hung_host_answers_again_when_it_goes_on(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    ping = "ping -n -c 1 -W 2 -I enp1s0f0np0 10.10.0.2"
    lab("hang", "t2")
    try:
        assert hosts["t1"].run(ping).rc != 0
    finally:
        lab("resume", "t2")
    wait_for(lambda: hosts["t1"].run(ping).rc == 0)
    assert flood(plan, hosts, MIB) == []


def test_reboots_leave_every_leg_as_good_and_no_socket_of_the_boot_before(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    for _round in range(3):
        reboot(*hosts.values())
        assert flood(plan, hosts, MIB) == []
    for name in hosts:
        sockets = in_namespace(name, "cat", "/proc/net/packet").splitlines()[1:]
        assert len(sockets) == 2 * DEVICES  # one to receive and one to send
