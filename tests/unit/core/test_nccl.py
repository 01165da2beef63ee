# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""NCCL's environment: what each topology gets, and a model of NCCL's own choice of ports that it must satisfy."""

from __future__ import annotations

from ipaddress import IPv4Address
from itertools import permutations, product
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _nccl
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.module_utils._schema import with_defaults
from ansible_collections.gb10.cluster.plugins.module_utils._topology import PORTS, Fabric, Member, plan_fabric
from hypothesis import given
from hypothesis import strategies as st

VENDOR = ["t1.0 - t2.1", "t2.0 - t3.1", "t3.0 - t1.1"]
SAME_PORT = ["t1.0 - t2.0", "t1.1 - t3.0", "t2.1 - t3.1"]
VENDOR_4 = ["t1.0 - t2.1", "t2.0 - t3.1", "t3.0 - t4.1", "t4.0 - t1.1"]
SAME_PORT_4 = ["t1.1 - t2.1", "t2.0 - t3.0", "t3.1 - t4.1", "t4.0 - t1.0"]
PACKED = {"cluster_leg_stride_prefix": 30}


def fabric(topology: str, count: int = 3, **settings: Any) -> Fabric:
    members = [Member(f"t{rank + 1}", rank, f"198.51.100.{rank + 1}", "enP7s7") for rank in range(count)]
    return plan_fabric(members, with_defaults({"cluster_topology": topology, **settings}))


def environment(plan: Fabric, member: str = "t1", **more: Any) -> dict[str, str]:
    chosen = _nccl.variables(plan, member, "enP7s7", **{"devices": True, **more})
    return {key: variable.value for key, variable in chosen.items()}


def required(plan: Fabric, **overrides: str) -> list[str]:
    return [each.feature for each in _nccl.requirements(plan, environment(plan, overrides=overrides))]


def lands(plan: Fabric, *, prefix: int) -> list[bool]:
    """For every neighbour, direction and device index: do both ends choose ports of one cable, unmerged?

    A model of NCCL 2.30.7 with subnet-aware routing, devices in the kernel's order: the listener advertises the GID of its
    device; the connector keeps its own of that index if it shares the subnet, else takes the first that does, else keeps it;
    the acceptor does the same with the connector's GID.
    """
    ports = {}
    for name in plan.members:
        legs = sorted(plan.legs_of(name), key=lambda pair: PORTS.index(pair[1].port))
        ports[name] = [(IPv4Address(end.address), leg) for leg, end in legs]

    def choose(own: list[Any], index: int, other: IPv4Address) -> tuple[IPv4Address, Any]:
        same = [port for port in own if int(port[0]) >> (32 - prefix) == int(other) >> (32 - prefix)]
        return own[index] if own[index] in same or not same else same[0]

    results = []
    for cable in plan.cables:
        names = [end.member for end in cable.ends]
        for (sender, receiver), index in product(permutations(names), range(4)):
            out = choose(ports[sender], index, ports[receiver][index][0])
            into = choose(ports[receiver], index, out[0])
            results.append(out[1] is into[1])
    return results


@pytest.mark.parametrize(
    ("count", "cables", "settings", "prefix", "good", "of"),
    [
        (3, VENDOR, {}, 24, 24, 24),
        (3, SAME_PORT, {}, 24, 16, 24),
        (4, VENDOR_4, {}, 24, 32, 32),
        (4, SAME_PORT_4, {}, 24, 16, 32),
        (3, VENDOR, PACKED, 30, 24, 24),
    ],
)
def test_the_model_agrees_with_what_is_known(
    count: int, cables: list[str], settings: dict[str, Any], prefix: int, good: int, of: int
) -> None:
    results = lands(fabric("ring", count, cluster_cables=cables, **settings), prefix=prefix)
    assert (sum(results), len(results)) == (good, of)


@given(st.lists(st.booleans(), min_size=3, max_size=6), st.sampled_from([{}, PACKED]))
def test_unmerged_devices_are_only_asked_for_where_all_of_them_land(swapped: list[bool], settings: dict[str, Any]) -> None:
    count = len(swapped)
    cables = [
        f"t{rank + 1}.{int(swapped[rank])} - t{after + 1}.{int(not swapped[after])}"
        for rank, after in zip(range(count), [*range(1, count), 0], strict=True)
    ]
    plan = fabric("ring", count, cluster_cables=cables, **settings)
    env = environment(plan)
    prefix = int(env.get("NCCL_IB_SUBNET_PREFIX_LEN", "24"))
    assert (env["NCCL_IB_MERGE_NICS"] == "0") == all(lands(plan, prefix=prefix))


def test_ring_of_three() -> None:
    assert environment(fabric("ring")) == {
        "GLOO_SOCKET_IFNAME": "enP7s7",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV,BOOTSTRAP",
        "NCCL_IB_ADDR_FAMILY": "AF_INET",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1",
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "NCCL_MAX_NCHANNELS": "4",
        "NCCL_NET": "IB",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "=enP7s7",
    }
    # Case C13: the feature by its string, since builds of one version differ.
    assert required(fabric("ring")) == ["IB_SUBNET_AWARE_ROUTING"]


def test_pair_lists_both_halves_in_the_order_of_the_other_end() -> None:
    # Cases C04 and C17: per member, both halves, position by position.
    plan = fabric("pair", 2, cluster_cables=["t1.1 - t2.0"])
    assert environment(plan, "t1")["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
    assert environment(plan, "t2")["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f0"
    assert environment(plan)["NCCL_IB_MERGE_NICS"] == "0"
    assert not {"NCCL_MAX_NCHANNELS", "NCCL_ALGO", "NCCL_CROSS_NIC"} & set(environment(plan))


def test_ring_of_four_asks_for_ring_and_for_more_than_a_plain_library() -> None:
    # Case C12.
    plan = fabric("ring", 4)
    assert environment(plan)["NCCL_ALGO"] == "Ring"
    assert environment(plan)["NCCL_SKIP_TREE_CONNECT"] == "1"
    assert required(plan) == ["IB_SUBNET_AWARE_ROUTING", "SKIP_TREE_CONNECT"]
    reason = _nccl.requirements(plan, environment(plan))[1].reason
    assert reason.startswith("a ring of 4 has ranks that are no neighbours, and a plain NCCL still connects trees between them")
    # christopherowen's way needs no patch.
    assert required(plan, NCCL_RUNTIME_CONNECT="1", NCCL_CUMEM_ENABLE="1") == ["IB_SUBNET_AWARE_ROUTING"]
    assert len(required(plan, NCCL_RUNTIME_CONNECT="1")) == 2


@pytest.mark.parametrize(
    ("shape", "cables", "needed"),
    [
        (("pair", 2), ["t1.0 - t2.0"], False),
        (("pair", 2), ["t1.1 - t2.0"], False),
        (("pair", 2), ["t1.0 - t2.0", "t1.1 - t2.1"], False),
        (("pair", 2), ["t1.0 - t2.1", "t1.1 - t2.0"], True),
        (("switched", 4), [], False),
        (("ring", 3), [], True),
    ],
)
def test_subnet_aware_routing_is_required_exactly_where_indexes_do_not_do(shape: tuple[str, int], cables: list[str], needed: bool) -> None:
    plan = fabric(*shape, cluster_cables=cables)
    assert bool(required(plan)) == needed
    by_index = [
        ports_by_index(plan, leg.ends[0].member).index(leg) == ports_by_index(plan, leg.ends[1].member).index(leg) for leg in plan.legs
    ]
    assert all(by_index) != needed


def ports_by_index(plan: Fabric, member: str) -> list[Any]:
    """A member's legs in the order in which NCCL numbers its devices."""
    return [leg for leg, end in sorted(plan.legs_of(member), key=lambda pair: PORTS.index(pair[1].port))]


@pytest.mark.parametrize("cables", [["t1.0 - t2.0", "t1.1 - t2.1"], ["t1.0 - t2.1", "t1.1 - t2.0"]])
def test_two_cables_of_a_pair_land_with_subnet_aware_routing(cables: list[str]) -> None:
    plan = fabric("pair", 2, cluster_cables=cables)
    assert environment(plan)["NCCL_IB_MERGE_NICS"] == "0"
    assert all(lands(plan, prefix=24))
    assert environment(plan)["NCCL_IB_HCA"].count("roce") == 4


def test_legs_packed_into_one_24_need_the_prefix_length() -> None:
    assert "NCCL_IB_SUBNET_PREFIX_LEN" not in environment(fabric("ring"))
    assert environment(fabric("ring", **PACKED))["NCCL_IB_SUBNET_PREFIX_LEN"] == "30"


def test_a_host_without_devices_is_told_nothing_about_rdma() -> None:
    env = environment(fabric("ring"), devices=False, overrides={"NCCL_IB_TC": "106"})
    assert env == {"GLOO_SOCKET_IFNAME": "enP7s7", "NCCL_SOCKET_IFNAME": "=enP7s7"}


@given(st.sampled_from([("pair", 2), ("ring", 3), ("ring", 5), ("switched", 4)]), st.booleans())
def test_nothing_is_empty_and_no_gid_is_pinned(shape: tuple[str, int], devices: bool) -> None:
    # Case C16: Gloo takes no exclusion form.
    env = environment(fabric(*shape), devices=devices)
    assert all(env.values())
    assert "NCCL_IB_GID_INDEX" not in env
    assert env["GLOO_SOCKET_IFNAME"] == "enP7s7"


@given(st.sampled_from([("pair", 2), ("ring", 3), ("ring", 4), ("switched", 4)]), st.booleans())
def test_every_variable_has_a_reason_and_none_is_both_set_and_absent(shape: tuple[str, int], devices: bool) -> None:
    plan = fabric(*shape)
    told = _nccl.explain(plan, devices=devices, overrides={"NCCL_IB_TC": "106"})
    assert set(told["reasons"]) == set(environment(plan, devices=devices, overrides={"NCCL_IB_TC": "106"}))
    assert not set(told["reasons"]) & set(told["absent"])
    assert {"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE"} <= set(told["absent"])
    assert all([*told["reasons"].values(), *told["absent"].values()])
    assert devices or not told["library"]


def test_an_override_wins_over_a_default() -> None:
    # Case C13: one default with its reason, and a switch.
    plan = fabric("ring")
    _nccl.check_overrides(plan, {"NCCL_IB_MERGE_NICS": "1"}, "x")
    assert environment(plan, overrides={"NCCL_IB_MERGE_NICS": "1"})["NCCL_IB_MERGE_NICS"] == "1"


@pytest.mark.parametrize("key", [*_nccl.FORBIDDEN, "NCCL_CROSS_NIC"])
def test_forbidden_overrides(key: str) -> None:
    with pytest.raises(PlanError, match=rf"^profile x: nccl\.overrides\.{key} may not be set, .*: remove it$"):
        _nccl.check_overrides(fabric("ring"), {"NCCL_IB_TC": "106", key: "1"}, "x")


@pytest.mark.parametrize("shape", [("pair", 2), ("ring", 4), ("switched", 3)])
def test_cross_nic_is_forbidden_in_a_ring_of_three_only(shape: tuple[str, int]) -> None:
    _nccl.check_overrides(fabric(*shape), {"NCCL_CROSS_NIC": "1"}, "x")
