# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cables, legs, addresses: tables, refusals and what must hold for any cabling."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from itertools import combinations
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _plan
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.module_utils._schema import with_defaults
from ansible_collections.gb10.cluster.plugins.module_utils._topology import PORTS, Fabric, Member, plan_fabric, ports_of
from hypothesis import assume, given
from hypothesis import strategies as st

MANAGEMENT = IPv4Network("198.51.100.0/24")


def fabric(topology: str, count: int = 3, **settings: Any) -> Fabric:
    members = [Member(f"t{rank + 1}", rank, f"198.51.100.{rank + 1}", "enP7s7") for rank in range(count)]
    return plan_fabric(members, with_defaults({"cluster_topology": topology, **settings}))


def table(plan: Fabric) -> dict[str, dict[str, str]]:
    """netdev -> address of each member."""
    return {name: {end.port.netdev: end.address for dummy, end in plan.legs_of(name)} for name in plan.members}


def test_the_two_halves_of_a_cage_are_one_cage() -> None:
    # Case C02: PCI domains 0000 and 0002 are halves, not ports.
    assert [port.netdev for port in ports_of(0)] == ["enp1s0f0np0", "enP2p1s0f0np0"]
    assert [port.hca for port in ports_of(1)] == ["rocep1s0f1", "roceP2p1s0f1"]
    assert len({port.hca for port in PORTS}) == len({port.netdev for port in PORTS}) == 4


def test_ring_of_three_is_numbered_like_nvidias_table() -> None:
    # The table of connect-three-sparks with 192.168.x moved to 10.10.x.
    plan = fabric("ring")
    assert table(plan) == {
        "t1": {
            "enp1s0f0np0": "10.10.0.1",
            "enP2p1s0f0np0": "10.10.1.1",
            "enp1s0f1np1": "10.10.2.1",
            "enP2p1s0f1np1": "10.10.3.1",
        },
        "t2": {
            "enp1s0f0np0": "10.10.4.1",
            "enP2p1s0f0np0": "10.10.5.1",
            "enp1s0f1np1": "10.10.0.2",
            "enP2p1s0f1np1": "10.10.1.2",
        },
        "t3": {
            "enp1s0f0np0": "10.10.2.2",
            "enP2p1s0f0np0": "10.10.3.2",
            "enp1s0f1np1": "10.10.4.2",
            "enP2p1s0f1np1": "10.10.5.2",
        },
    }
    assert [str(leg.network) for leg in plan.legs] == [f"10.10.{number}.0/30" for number in range(6)]
    assert plan.notes == ()


def test_pair_is_one_cable_from_cage_0_to_cage_0() -> None:
    plan = fabric("pair", 2)
    assert [cable.name for cable in plan.cables] == ["t1.0-t2.0"]
    assert table(plan) == {
        "t1": {"enp1s0f0np0": "10.10.0.1", "enP2p1s0f0np0": "10.10.1.1"},
        "t2": {"enp1s0f0np0": "10.10.0.2", "enP2p1s0f0np0": "10.10.1.2"},
    }
    assert plan.notes == ()


def test_pair_with_crossed_cages_has_each_members_own_devices() -> None:
    # Case C04: cage 1 of the head to cage 0 of the worker.
    plan = fabric("pair", 2, cluster_cables=["t1.1 - t2.0"])
    assert [end.port.hca for dummy, end in plan.legs_of("t1")] == ["rocep1s0f1", "roceP2p1s0f1"]
    assert [end.port.hca for dummy, end in plan.legs_of("t2")] == ["rocep1s0f0", "roceP2p1s0f0"]
    assert "same cage at both ends" in plan.notes[0]


def test_pair_with_two_cables_addresses_all_devices_and_says_what_the_second_is_worth() -> None:
    plan = fabric("pair", 2, cluster_cables=["t1.0 - t2.0", "t1.1 - t2.1"])
    assert table(plan)["t2"] == {
        "enp1s0f0np0": "10.10.0.2",
        "enP2p1s0f0np0": "10.10.1.2",
        "enp1s0f1np1": "10.10.2.2",
        "enP2p1s0f1np1": "10.10.3.2",
    }
    (note,) = plan.notes
    assert "adds no bandwidth" in note
    crossed = fabric("pair", 2, cluster_cables=["t1.0 - t2.1", "t1.1 - t2.0"])
    assert crossed.notes[0].startswith("cable t1.0 - t2.1 and t1.1 - t2.0 joins different cages")


# Published plans -------------------------------------------------------------------------------------------------------------

NVIDIA_RING = {
    "t1": {"enp1s0f0np0": "192.168.0.1", "enP2p1s0f0np0": "192.168.1.1", "enp1s0f1np1": "192.168.2.1", "enP2p1s0f1np1": "192.168.3.1"},
    "t2": {"enp1s0f0np0": "192.168.4.1", "enP2p1s0f0np0": "192.168.5.1", "enp1s0f1np1": "192.168.0.2", "enP2p1s0f1np1": "192.168.1.2"},
    "t3": {"enp1s0f0np0": "192.168.2.2", "enP2p1s0f0np0": "192.168.3.2", "enp1s0f1np1": "192.168.4.2", "enP2p1s0f1np1": "192.168.5.2"},
}


def test_nvidias_readme_of_three_sparks() -> None:
    # connect-three-sparks, all of it /24.
    plan = fabric("ring", cluster_leg_pool="192.168.0.0/21", cluster_leg_prefix=24)
    assert table(plan) == NVIDIA_RING
    assert {leg.network.prefixlen for leg in plan.legs} == {24}


@pytest.mark.parametrize(
    ("pool", "cage", "first", "head", "worker"),
    [
        # The README: cage 1, .10 and .11; the performance guide: cage 0, .12 and .13.
        ("192.168.100.0/23", 1, 10, {"enp1s0f1np1": "192.168.100.10", "enP2p1s0f1np1": "192.168.101.10"}, "192.168.101.11"),
        ("192.168.200.0/23", 0, 12, {"enp1s0f0np0": "192.168.200.12", "enP2p1s0f0np0": "192.168.201.12"}, "192.168.201.13"),
    ],
)
def test_nvidias_two_pages_on_two_sparks(pool: str, cage: int, first: int, head: dict[str, str], worker: str) -> None:
    plan = fabric("pair", 2, cluster_leg_pool=pool, cluster_leg_first_host=first, cluster_cables=[f"t1.{cage} - t2.{cage}"])
    assert table(plan)["t1"] == head
    assert list(table(plan)["t2"].values())[1] == worker
    assert plan.prefix_length == 24


def test_nvidias_readme_of_a_switch() -> None:
    # connect-multiple-sparks: cage 1 of all, both halves in a network of their own.
    plan = fabric("switched", 4, cluster_leg_pool="192.168.100.0/23", cluster_switch_cages=[1], cluster_leg_first_host=10)
    assert table(plan)["t3"] == {"enp1s0f1np1": "192.168.100.12", "enP2p1s0f1np1": "192.168.101.12"}


def test_the_llmkube_ring() -> None:
    # 10.10.0.0 to 10.10.5.0, each a /30 in a /24 of its own: the default.
    assert [str(leg.network) for leg in fabric("ring").legs] == [f"10.10.{number}.0/30" for number in range(6)]


def test_a_ring_of_four_with_one_number_per_member() -> None:
    # eugr/spark-vllm-docker: pool 10.20.0.0/16, hosts .11 to .14, the links in their own order.
    cables = ["t1.0 - t2.1", "t2.0 - t3.1", "t3.0 - t4.1", "t4.0 - t1.1"]
    plan = fabric(
        "ring", 4, cluster_leg_pool="10.20.0.0/16", cluster_leg_numbering="ranks", cluster_leg_first_host=11, cluster_cables=cables
    )
    assert table(plan)["t1"] == {
        "enp1s0f0np0": "10.20.0.11",
        "enP2p1s0f0np0": "10.20.1.11",
        "enp1s0f1np1": "10.20.6.11",
        "enP2p1s0f1np1": "10.20.7.11",
    }
    assert table(plan)["t4"]["enP2p1s0f0np0"] == "10.20.7.14"
    assert plan.prefix_length == 24


def test_switched_has_one_network_per_cage_and_half() -> None:
    plan = fabric("switched", 4, cluster_switch_cages=[1])
    assert plan.cables == ()
    assert [(str(leg.network), len(leg.ends)) for leg in plan.legs] == [("10.10.0.0/24", 4), ("10.10.1.0/24", 4)]
    assert table(plan)["t4"] == {"enp1s0f1np1": "10.10.0.4", "enP2p1s0f1np1": "10.10.1.4"}


def test_only_the_declared_fabric_is_planned() -> None:
    # Case C05: four members on a switch by cage 0, with cables between their cages 1 that span nothing.
    assert {end.port.cage for leg in fabric("switched", 4).legs for end in leg.ends} == {0}


def test_ring_with_equal_cages_is_planned_and_says_which_plugs_to_move() -> None:
    # Case C06.
    plan = fabric("ring", cluster_cables=["t1.0 - t2.0", "t2.1 - t3.1", "t3.0 - t1.1"])
    (note,) = plan.notes
    assert note.startswith("2 of 3 cables join equal cages (t1.0 - t2.0, t2.1 - t3.1)")
    assert note.endswith("swap the two plugs of t2")


def test_four_ring_with_equal_cages_is_not_refused() -> None:
    # Case C06's counter-evidence.
    plan = fabric("ring", 4, cluster_cables=["t1.1 - t2.1", "t2.0 - t3.0", "t3.1 - t4.1", "t4.0 - t1.0"])
    assert len(plan.legs) == 8


@pytest.mark.parametrize("cables", [["t1.1 - t2.0", "t2.1 - t3.0", "t3.1 - t1.0"], ["t3.0 - t1.1", "t2.0 - t3.1", "t1.0 - t2.1"]])
def test_either_direction_of_the_rotation_is_the_vendors(cables: list[str]) -> None:
    assert fabric("ring", cluster_cables=cables).notes == ()


@pytest.mark.parametrize(
    ("topology", "count", "settings", "message"),
    [
        ("pair", 3, {}, "cluster_topology pair needs exactly 2 members, but group sparks has 3"),
        ("ring", 2, {}, "cluster_topology ring needs at least 3 members, but group sparks has 2"),
        ("switched", 1, {}, "cluster_topology switched needs at least 2 members, but group sparks has 1"),
        ("pair", 2, {"cluster_cables": ["t1.0 t2.0"]}, "'t1.0 t2.0', which is not of the form 'member.cage - member.cage'"),
        ("pair", 2, {"cluster_cables": ["t1.0 - t9.0"]}, "but t9 is not in group sparks (t1, t2)"),
        ("pair", 2, {"cluster_cables": ["t1.2 - t2.0"]}, "only the cages 0 and 1: correct cage 2"),
        ("pair", 2, {"cluster_cables": ["t1.0 - t1.1"]}, "joins t1 with itself"),
        ("pair", 2, {"cluster_cables": ["t1.0 - t2.0", "t2.1 - t1.0"]}, "names cage 0 of t1 twice (t1.0 - t2.0 and t2.1 - t1.0)"),
        (
            "pair",
            2,
            {"cluster_leg_pool": "198.51.0.0/16"},
            "cluster_leg_pool 198.51.0.0/16 holds the management address 198.51.100.1 of t1",
        ),
        (
            "pair",
            2,
            {"cluster_leg_prefix": 30, "cluster_leg_first_host": 2},
            "a leg of prefix length 30 has 2 addresses, but one of its ends is number 3",
        ),
        (
            "ring",
            3,
            {"cluster_leg_prefix": 30, "cluster_leg_numbering": "ranks"},
            "a leg of prefix length 30 has 2 addresses, but one of its ends is number 3",
        ),
        (
            "ring",
            3,
            {"cluster_cables": ["t1.0 - t2.1", "t2.1 - t3.0", "t3.1 - t1.1"]},
            "names cage 1 of t2 twice (t1.0 - t2.1 and t2.1 - t3.0)",
        ),
        ("ring", 3, {"cluster_cables": ["t1.0 - t2.1", "t2.0 - t3.1"]}, "is no ring, t1.1, t3.0 has no cable"),
        (
            "ring",
            4,
            {"cluster_cables": ["t1.0 - t2.1", "t2.0 - t1.1", "t3.0 - t4.1", "t4.0 - t3.1"]},
            "is no ring, t1-t2 closes without t3, t4",
        ),
        (
            "ring",
            4,
            {"cluster_cables": ["t1.0 - t3.1", "t3.0 - t2.1", "t2.0 - t4.1", "t4.0 - t1.1"]},
            "the cables make the ring t1-t3-t2-t4, but the members are listed as t1-t2-t3-t4",
        ),
        ("switched", 3, {"cluster_cables": ["t1.0 - t2.0"]}, "cluster_topology is switched"),
        ("ring", 3, {"cluster_leg_pool": "198.51.0.0/16", "cluster_management_network": "198.51.100.0/24"}, "overlaps cluster_management"),
        ("ring", 3, {"cluster_leg_pool": "172.16.0.0/12"}, "overlaps cluster_reserved_networks[0] 172.17.0.0/16"),
        ("ring", 3, {"cluster_leg_pool": "10.10.0.1/16"}, "cluster_leg_pool is '10.10.0.1/16', not an IPv4 network"),
        ("ring", 3, {"cluster_reserved_networks": ["10.300.0.0/16"]}, "cluster_reserved_networks[0] is '10.300.0.0/16'"),
        ("ring", 3, {"cluster_leg_pool": "10.10.0.0/22"}, "has no room for 6 legs of one /24 each"),
        ("ring", 3, {"cluster_leg_pool": "10.10.0.0/28", "cluster_leg_stride_prefix": 24}, "has no room for 6 legs"),
        ("switched", 4, {"cluster_leg_prefix": 30}, "a leg of prefix length 30 has 2 addresses, but one of its ends is number 4"),
        (
            "ring",
            3,
            {"cluster_leg_prefix": 24, "cluster_leg_stride_prefix": 30},
            "leg t1.0-t2.1 half A (10.10.0.0/24) and leg t1.0-t2.1 half B (10.10.0.0/24) share a network",
        ),
        ("ring", 3, {"cluster_management_network": "203.0.113.0/24"}, "is outside cluster_management_network 203.0.113.0/24"),
    ],
)
def test_refused(topology: str, count: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        fabric(topology, count, **settings)
    assert message in str(error.value)
    assert str(error.value).startswith("inventory: ")


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["198.51.100.1", "198.51.100.1"], "t1 and t2 both have the management address 198.51.100.1"),
        (["198.51.100.1", "spark.example"], "the management address of t2 is 'spark.example', not an IPv4 address"),
    ],
)
def test_management_addresses_refused(addresses: list[str], message: str) -> None:
    members = [Member(f"t{rank + 1}", rank, address, "enP7s7") for rank, address in enumerate(addresses)]
    with pytest.raises(PlanError, match=message.replace(".", r"\.")):
        plan_fabric(members, with_defaults({"cluster_topology": "pair"}))


# Any fabric ------------------------------------------------------------------------------------------------------------------


@st.composite
def cablings(draw: st.DrawFn) -> tuple[str, int, list[str]]:
    """A topology with a random but right cabling: plugs swapped at members, ends and cables in any order."""
    topology = draw(st.sampled_from(["pair", "ring", "switched"]))
    if topology == "switched":
        return topology, draw(st.integers(2, 8)), []
    if topology == "pair":
        one, two = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        cables = [f"t1.{one} - t2.{two}", f"t2.{1 - two} - t1.{1 - one}"]
        return topology, 2, draw(st.sampled_from([cables[:1], cables]))
    count = draw(st.integers(3, 7))
    swapped = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    cables = []
    for rank in range(count):
        after = (rank + 1) % count
        ends = [f"t{rank + 1}.{swapped[rank]}", f"t{after + 1}.{1 - swapped[after]}"]
        cables.append(" - ".join(draw(st.permutations(ends))))
    return topology, count, draw(st.permutations(cables))


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    topology, count, cables = draw(cablings())
    stride = draw(st.integers(16, 30))
    numbering, first = draw(st.sampled_from(["ends", "ranks"])), draw(st.integers(1, 20))
    highest = first + (1 if numbering == "ends" and topology != "switched" else count - 1)
    longest = 32 - (highest + 1).bit_length()
    assume(stride <= longest)
    length = draw(st.integers(8, stride - 4))
    base = draw(st.integers(0, 2**length - 1)) << (32 - length)
    pool = IPv4Network((base, length))
    assume(not pool.overlaps(MANAGEMENT))
    return fabric(
        topology,
        count,
        cluster_cables=cables,
        cluster_leg_pool=str(pool),
        cluster_leg_stride_prefix=stride,
        cluster_leg_prefix=draw(st.none() | st.integers(stride, longest)),
        cluster_leg_numbering=numbering,
        cluster_leg_first_host=first,
        cluster_reserved_networks=[],
    )


@given(fabrics())
def test_every_leg_is_a_network_of_its_own_with_all_its_ends_inside(plan: Fabric) -> None:
    for one, two in combinations(plan.legs, 2):
        assert one.network.broadcast_address < two.network.network_address or two.network.broadcast_address < one.network.network_address
    for leg in plan.legs:
        addresses = [IPv4Address(end.address) for end in leg.ends]
        assert all(leg.network.network_address < address < leg.network.broadcast_address for address in addresses)
        assert len(set(addresses)) == len(addresses)


@given(fabrics())
def test_every_leg_has_exactly_its_ends(plan: Fabric) -> None:
    """Two, each on another member and those of its cable; on a switch all members."""
    for leg in plan.legs:
        if plan.topology == "switched":
            assert [end.member for end in leg.ends] == list(plan.members)
        else:
            cable = next(cable for cable in plan.cables if cable.name == leg.cable)
            assert [(end.member, end.port.cage) for end in leg.ends] == [(plug.member, plug.cage) for plug in cable.ends]
            assert len({end.member for end in leg.ends}) == 2
    assert len({(leg.cable, leg.half) for leg in plan.legs}) == len(plan.legs)
    assert len(plan.legs) == 2 * len({leg.cable for leg in plan.legs})


@given(fabrics())
def test_both_ends_of_a_leg_are_the_same_half_and_no_port_is_used_twice(plan: Fabric) -> None:
    assert all(end.port.half == leg.half for leg in plan.legs for end in leg.ends)
    for name in plan.members:
        netdevs = [end.port.netdev for dummy, end in plan.legs_of(name)]
        assert len(set(netdevs)) == len(netdevs)
        if plan.topology == "ring":
            assert len(netdevs) == 4


@given(fabrics())
def test_the_checkpoint_reaches_every_member_over_legs_that_both_ends_share(plan: Fabric) -> None:
    have = {plan.members[0]}
    for copy in _plan.replicas(plan):
        assert copy["from"] in have
        legs = _plan.member_legs(plan, copy["member"])
        assert any(
            peer == {"member": copy["from"], "netdev": peer["netdev"], "address": copy["address"]} for leg in legs for peer in leg["peers"]
        )
        assert copy["member"] not in have
        have.add(copy["member"])
    assert have == set(plan.members)


# The order of the inventory --------------------------------------------------------------------------------------------------


def reordered(topology: str, order: list[str], **settings: Any) -> Fabric:
    members = [Member(name, rank, f"198.51.100.{name[1:]}", "enP7s7") for rank, name in enumerate(order)]
    return plan_fabric(members, with_defaults({"cluster_topology": topology, **settings}))


@st.composite
def turns(draw: st.DrawFn, count: int) -> list[str]:
    """An order of the members that follows the ring: any start, either direction; in a ring of three that is every order."""
    start, back = draw(st.integers(0, count - 1)), draw(st.booleans())
    names = [f"t{number + 1}" for number in range(count)]
    turned = names[start:] + names[:start]
    return turned[::-1] if back else turned


@given(st.data(), cablings().filter(lambda cabling: cabling[0] != "switched"))
def test_with_a_cable_list_the_order_of_the_inventory_decides_ranks_and_nothing_of_the_fabric(
    data: st.DataObject, cabling: tuple[str, int, list[str]]
) -> None:
    topology, count, cables = cabling
    one = fabric(topology, count, cluster_cables=cables)
    two = reordered(topology, data.draw(turns(count)), cluster_cables=cables)
    assert (two.cables, two.legs, two.prefix_length) == (one.cables, one.legs, one.prefix_length)
    assert table(two) == table(one)
    assert set(two.members) == set(one.members)


@given(st.data(), st.integers(3, 7))
def test_without_one_the_same_plugs_are_cabled_from_any_start(data: st.DataObject, count: int) -> None:
    """The cables stay; their numbers, and with these the addresses, follow the ranks. The other direction is another cabling."""
    start = data.draw(st.integers(0, count - 1))
    names = [f"t{number + 1}" for number in range(count)]
    one, two = fabric("ring", count), reordered("ring", names[start:] + names[:start])
    assert {frozenset(cable.ends) for cable in two.cables} == {frozenset(cable.ends) for cable in one.cables}
    assert {str(leg.network) for leg in two.legs} == {str(leg.network) for leg in one.legs}
    back = reordered("ring", names[::-1])
    assert {frozenset(cable.ends) for cable in back.cables} != {frozenset(cable.ends) for cable in one.cables}


@given(st.permutations([f"t{rank + 1}" for rank in range(5)]))
def test_on_a_switch_a_member_keeps_its_devices_and_networks(order: list[str]) -> None:
    one, two = fabric("switched", 5), reordered("switched", order)
    assert [leg.network for leg in two.legs] == [leg.network for leg in one.legs]
    assert {name: list(row) for name, row in table(two).items()} == {name: list(row) for name, row in table(one).items()}


networks = st.builds(
    lambda length, bits: IPv4Network((bits >> (32 - length) << (32 - length), length)), st.integers(8, 30), st.integers(0, 2**32 - 1)
)


@given(pool=networks, management=networks, reserved=st.lists(networks, max_size=3))
def test_no_overlap_escapes(pool: IPv4Network, management: IPv4Network, reserved: list[IPv4Network]) -> None:
    members = [Member(f"t{rank}", rank, str(management.network_address + rank), "enP7s7") for rank in range(3)]
    settings = {
        "cluster_topology": "ring",
        "cluster_leg_pool": str(pool),
        "cluster_leg_stride_prefix": 30,
        "cluster_management_network": str(management),
        "cluster_reserved_networks": [str(network) for network in reserved],
    }
    try:
        plan = plan_fabric(members, with_defaults(settings))
    except PlanError:
        # Refused rightly: something overlaps, or six legs have no room.
        assert pool.prefixlen > 27 or any(pool.overlaps(network) for network in [management, *reserved])
        return
    assert not any(IPv4Address(member.address) in pool for member in members)
    assert not any(leg.network.overlaps(network) for leg in plan.legs for network in [management, *reserved])
