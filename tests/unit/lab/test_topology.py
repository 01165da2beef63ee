# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's wiring is that of real Sparks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.progress import LabError
from tests.lab.topology import MAXIMUM_HOSTS, PORTS, standard


def wires(count: int) -> set[tuple[str, str]]:
    """Every leg as `t1.enp… - t2.enp…`."""
    return {(f"{a.host.name}.{a.netdev}", f"{b.host.name}.{b.netdev}") for a, b in standard(count).legs()}


def test_three_hosts_are_a_ring_by_the_rotation_rule() -> None:
    assert wires(3) == {
        ("t1.enp1s0f0np0", "t2.enp1s0f1np1"),
        ("t1.enP2p1s0f0np0", "t2.enP2p1s0f1np1"),
        ("t2.enp1s0f0np0", "t3.enp1s0f1np1"),
        ("t2.enP2p1s0f0np0", "t3.enP2p1s0f1np1"),
        ("t3.enp1s0f0np0", "t1.enp1s0f1np1"),
        ("t3.enP2p1s0f0np0", "t1.enP2p1s0f1np1"),
    }


def test_two_hosts_are_a_pair_on_cage_0_and_cage_1_stays_empty() -> None:
    assert wires(2) == {("t1.enp1s0f0np0", "t2.enp1s0f0np0"), ("t1.enP2p1s0f0np0", "t2.enP2p1s0f0np0")}
    assert {(port.host.name, port.cage) for port in standard(2).open_ports()} == {("t1", 1), ("t2", 1)}


@given(st.integers(3, MAXIMUM_HOSTS))
def test_a_ring_uses_every_port_once_and_joins_neighbours(count: int) -> None:
    topology = standard(count)
    used = Counter(port for leg in topology.legs() for port in leg)
    assert set(used) == set(topology.ports())
    assert set(used.values()) == {1}
    assert topology.open_ports() == []
    for a, b in topology.legs():
        assert (b.host.number - a.host.number) % count == 1
        assert a.half == b.half


@given(st.integers(1, MAXIMUM_HOSTS))
def test_addresses_are_unique(count: int) -> None:
    topology = standard(count)
    macs = [port.mac for port in topology.ports()] + [host.management_mac for host in topology.hosts]
    assert len(set(macs)) == len(topology.ports()) + count
    assert all(int(mac[:2], 16) & 3 == 2 for mac in macs)  # locally administered, not multicast
    assert {host.address for host in topology.hosts} == {f"10.99.0.{10 + number}" for number in range(1, count + 1)}


@pytest.mark.parametrize("count", [0, -1, MAXIMUM_HOSTS + 1])
def test_an_impossible_number_of_hosts_is_refused(count: int) -> None:
    with pytest.raises(LabError, match=f"not {count}"):
        standard(count)


def test_an_unknown_host_or_leg_is_refused_with_those_that_exist() -> None:
    with pytest.raises(LabError, match="t1, t2, t3"):
        standard(3).port("t4", "enp1s0f0np0")
    with pytest.raises(LabError, match="enP2p1s0f1np1"):
        standard(3).port("t1", "mgmt0")
    assert standard(3).port("t2", "enp1s0f1np1").cage == 1


def test_device_names_fit_the_kernel() -> None:
    assert all(len(netdev) < 16 for netdev, _hca in PORTS.values())
