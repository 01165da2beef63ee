# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Planned legs against what a member already uses.

The routes and rules are what iproute2 6.1 printed of virtual devices that were named and addressed as each program does it.
"""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _plan
from ansible_collections.gb10.cluster.plugins.module_utils._findings import REFUSE, WARN
from ansible_collections.gb10.cluster.plugins.module_utils._networks import judge_management, judge_networks
from ansible_collections.gb10.cluster.plugins.module_utils._schema import with_defaults
from ansible_collections.gb10.cluster.plugins.module_utils._topology import Member, plan_fabric
from hypothesis import given
from hypothesis import strategies as st

MEMBERS = [Member(f"t{rank + 1}", rank, f"198.51.100.{rank + 1}", "enP7s7") for rank in range(3)]
LEGS = _plan.member_legs(plan_fabric(MEMBERS, with_defaults({"cluster_topology": "ring"})), "t1")

MANAGEMENT = {"dst": "default", "gateway": "198.51.100.1", "dev": "enP7s7", "flags": []}
DEFAULT_RULES: list[dict[str, Any]] = [
    {"priority": 0, "src": "all", "table": "local"},
    {"priority": 32766, "src": "all", "table": "main"},
    {"priority": 32767, "src": "all", "table": "default"},
]
TAILSCALE_RULES = [
    {"priority": 5210, "src": "all", "fwmark": "0x80000", "fwmask": "0xff0000", "table": "main"},
    {"priority": 5270, "src": "all", "table": "52"},
]
WIREGUARD_RULES = [
    {"priority": 32764, "src": "all", "table": "main", "suppress_prefixlen": 0},
    {"priority": 32765, "not": None, "src": "all", "fwmark": "0xca6c", "table": "51820"},
]
LEGS_FIRST = {"priority": 100, "src": "all", "dst": "10.10.0.0", "dstlen": 16, "table": "main"}
KILL_SWITCH = {"type": "unreachable", "dst": "default", "table": "7"}
TABLE_100 = {"dst": "default", "dev": "enP7s7", "table": "100"}
EXIT_NODE = {"dst": "default", "dev": "tailscale0", "table": "52", "scope": "link", "flags": []}
WIREGUARD = {"dst": "default", "dev": "wg0", "table": "51820", "scope": "link", "flags": []}


def addresses(**devices: str) -> str:
    """`ip -json address` of devices with an IPv4 address each, and the IPv6 one that every device has."""
    return json.dumps(
        [
            {
                "ifname": name.replace("__", "-"),
                "addr_info": [
                    {"family": "inet", "local": cidr.split("/")[0], "prefixlen": int(cidr.split("/")[1])},
                    {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
                ],
            }
            for name, cidr in devices.items()
        ]
    )


def judged(
    live: str = "", routes: list[dict[str, Any]] | None = None, rules: list[dict[str, Any]] | None = None
) -> list[tuple[str, str, str]]:
    findings = judge_networks(LEGS, live, json.dumps(routes or []), json.dumps(DEFAULT_RULES + (rules or [])))
    return [(finding.severity, finding.code, finding.sentence) for finding in findings]


def test_a_free_host_has_nothing_against_it() -> None:
    live = addresses(lo="127.0.0.1/8", enP7s7="198.51.100.1/24", docker0="172.17.0.1/16", cni0="10.42.0.1/24", wg0="10.66.66.2/32")
    routes = [
        MANAGEMENT,
        {"dst": "10.42.1.0/24", "gateway": "10.42.1.0", "dev": "cni0", "flags": ["onlink"]},
        {"type": "blackhole", "dst": "10.244.7.0/26", "protocol": "80", "flags": []},
        {"type": "local", "dst": "10.10.0.1", "dev": "enp1s0f0np0", "table": "local"},
        {"type": "broadcast", "dst": "10.10.0.3", "dev": "enp1s0f0np0", "table": "local"},
        {"dst": "2001:db8::/32", "dev": "enP7s7"},
    ]
    assert judged(live, routes) == []
    assert judge_networks(LEGS, "", "") == []


def test_the_applied_plan_has_nothing_against_it() -> None:
    own = {leg["netdev"]: f"{leg['address']}/{leg['prefix_length']}" for leg in LEGS}
    routes = [MANAGEMENT, *({"dst": leg["network"], "dev": leg["netdev"], "protocol": "kernel"} for leg in LEGS)]
    assert judged(addresses(**own), routes) == []


@pytest.mark.parametrize(
    ("live", "routes", "rules", "device", "network"),
    [
        pytest.param({"docker0": "10.10.0.1/16"}, [], [], "docker0", "10.10.0.0/16", id="docker's bridge"),
        pytest.param({"br__5f3a": "10.10.3.1/24"}, [], [], "br-5f3a", "10.10.3.0/24", id="a network of compose"),
        pytest.param({"cni0": "10.10.1.1/24"}, [], [], "cni0", "10.10.1.0/24", id="pods of this member"),
        pytest.param({}, [{"dst": "10.10.2.0/24", "gateway": "10.10.2.0", "dev": "flannel.1"}], [], "flannel.1", "10.10.2.0/24", id="pods of another"),
        pytest.param({}, [{"type": "blackhole", "dst": "10.10.0.0/26"}], [], "a route of type blackhole", "10.10.0.0/26", id="calico's block"),
        pytest.param({}, [{"dst": "10.0.0.0/8", "dev": "wg0"}], [], "wg0", "10.0.0.0/8", id="wireguard's allowed addresses"),
        pytest.param(
            {}, [{"dst": "10.10.0.0/21", "dev": "tailscale0", "table": "52"}], TAILSCALE_RULES, "tailscale0", "10.10.0.0/21", id="an accepted subnet route"
        ),
        pytest.param({"tun0": "10.10.1.2/32"}, [], [], "tun0", "10.10.1.2/32", id="openvpn's own end"),
        pytest.param({"enP7s7": "10.10.0.5/24"}, [], [], "enP7s7", "10.10.0.0/24", id="the management network"),
        pytest.param({"wlP9s9": "10.10.3.7/22"}, [], [], "wlP9s9", "10.10.0.0/22", id="wi-fi"),
        pytest.param({}, [{"dst": "10.10.2.1", "dev": "enP7s7"}], [], "enP7s7", "10.10.2.1/32", id="a route to one host"),
        pytest.param({}, [{"dst": "10.10.0.0/24", "nexthops": [{"dev": "a"}, {"dev": "b"}]}], [], "several devices", "10.10.0.0/24", id="multipath"),
    ],
)  # fmt: skip
def test_a_network_of_anything_else_is_refused_by_name(
    live: dict[str, str], routes: list[dict[str, Any]], rules: list[dict[str, Any]], device: str, network: str
) -> None:
    """Case I.10: a peer that is merely unreachable. The kernel's own route beside an address makes no second sentence."""
    connected = [{"dst": network, "dev": device, "protocol": "kernel"}] if live else []
    ((severity, code, sentence),) = judged(addresses(**live), [MANAGEMENT, *routes, *connected], rules)
    assert (severity, code) == (REFUSE, "network-overlap")
    assert sentence.startswith(f"{device} already uses {network}, which overlaps 10.10.")


def test_a_leg_between_other_members_does_not_count() -> None:
    assert judged(addresses(docker0="10.10.5.1/24")) == []


@pytest.mark.parametrize(
    ("routes", "rules"),
    [
        pytest.param([{"dst": "0.0.0.0/1", "dev": "tun0"}, {"dst": "128.0.0.0/1", "dev": "tun0"}], [], id="openvpn splits the default route"),
        pytest.param([WIREGUARD], WIREGUARD_RULES, id="wg-quick asks the main table for all but its default first"),
        pytest.param([EXIT_NODE], [LEGS_FIRST, *TAILSCALE_RULES], id="a rule for the legs"),
        pytest.param([EXIT_NODE, {"type": "throw", "dst": "10.10.0.0/16", "table": "52"}], TAILSCALE_RULES, id="tailscale lets local networks pass"),
        pytest.param([TABLE_100], [{"priority": 1000, "src": "198.51.100.11", "table": "100"}], id="by source"),
        pytest.param([TABLE_100], [{"priority": 1000, "src": "all", "iif": "docker0", "table": "100"}], id="forwarded packets"),
        pytest.param([TABLE_100], [{"priority": 1000, "src": "all", "fwmark": "0x1", "table": "100"}], id="marked packets"),
        pytest.param([TABLE_100], [], id="a table that no rule names"),
        pytest.param([TABLE_100], [{"priority": 40000, "src": "all", "table": "100"}], id="a table after the main one"),
    ],
)  # fmt: skip
def test_a_default_route_that_leaves_the_legs_alone_does_not_count(routes: list[dict[str, Any]], rules: list[dict[str, Any]]) -> None:
    assert judged("", [MANAGEMENT, *routes], rules) == []


@pytest.mark.parametrize(
    ("routes", "rules", "table", "device"),
    [
        pytest.param([EXIT_NODE], TAILSCALE_RULES, "52", "tailscale0", id="tailscale's exit node"),
        pytest.param([WIREGUARD], WIREGUARD_RULES[1:], "51820", "wg0", id="wireguard without wg-quick's second rule"),
        pytest.param([KILL_SWITCH], [{"priority": 9, "src": "all", "table": "7"}], "7", "a route of type unreachable", id="a kill switch"),
    ],
)  # fmt: skip
def test_a_default_route_before_the_main_table_takes_the_legs(
    routes: list[dict[str, Any]], rules: list[dict[str, Any]], table: str, device: str
) -> None:
    ((severity, code, sentence),) = judged("", [MANAGEMENT, *routes], rules)
    assert (severity, code) == (REFUSE, "network-captured")
    assert sentence.startswith(f"routing table {table} is asked before the main one and sends everything to {device}")
    assert all(leg["network"] in sentence for leg in LEGS)


def test_what_one_table_lets_pass_the_next_may_take() -> None:
    routes = [EXIT_NODE, {"type": "throw", "dst": "10.10.0.0/16", "table": "52"}, KILL_SWITCH]
    ((severity, code, sentence),) = judged("", routes, [*TAILSCALE_RULES, {"priority": 6000, "src": "all", "table": "7"}])
    assert (severity, code, sentence[:17]) == (REFUSE, "network-captured", "routing table 7 i")


def test_two_halves_in_one_network_are_told_with_what_the_plan_gives_them() -> None:
    """Case C01, a host set up by an older vendor page: named, never refused, and no half is dropped."""
    live = addresses(enp1s0f0np0="10.77.0.1/24", enP2p1s0f0np0="10.77.0.101/24")
    ((severity, code, sentence),) = judged(live)
    assert (severity, code) == (WARN, "halves-share-network")
    assert sentence.startswith("enP2p1s0f0np0 and enp1s0f0np0 share 10.77.0.0/24, so ARP answers for either and NCCL cannot map peers")
    assert sentence.endswith("apply the plan, which gives them 10.10.1.0/30 and 10.10.0.0/30")


def test_an_earlier_plan_with_another_mask_is_no_clash() -> None:
    assert judged(addresses(enp1s0f0np0="10.10.0.1/24", enP2p1s0f0np0="10.10.1.1/24")) == []


def test_a_device_that_serves_something_else_is_refused() -> None:
    taken = [{"ifname": "enp1s0f0np0", "master": "bond0", "addr_info": []}, {"ifname": "enP7s7", "master": "br0", "addr_info": []}]
    uplink = {"dst": "default", "gateway": "203.0.113.1", "dev": "enP2p1s0f1np1"}
    sentences = [(code, sentence) for dummy, code, sentence in judged(json.dumps(taken), [uplink])]
    assert sentences == [
        ("leg-device-taken", "enp1s0f0np0, planned for a leg, belongs to bond0: take it out of bond0, or name the right cages"),
        (
            "leg-device-taken",
            "enP2p1s0f1np1, planned for a leg, carries a default route: move the uplink to another port, or name the right cages",
        ),
    ]


LIVE = addresses(lo="127.0.0.1/8", enP7s7="198.51.100.11/24", docker0="172.17.0.1/16", wlP9s9="192.0.2.7/24")


@pytest.mark.parametrize(
    ("interface", "address", "expected"),
    [
        ("enP7s7", "198.51.100.11", []),
        ("wlP9s9", "192.0.2.7", [(WARN, "the ranks meet over wlP9s9, which is wireless")]),
        (
            "eth0",
            "198.51.100.11",
            [(REFUSE, "eth0 does not carry 198.51.100.11, but enP7s7 does: set cluster_management_interface to enP7s7")],
        ),
        ("enP7s7", "198.51.100.12", [(REFUSE, "no device of this host carries 198.51.100.12: set cluster_address")]),
        ("docker0", "192.0.2.7", [(REFUSE, "docker0 does not carry 192.0.2.7, but wlP9s9 does")]),
    ],
)
def test_the_ranks_meet_where_the_management_address_is(interface: str, address: str, expected: list[tuple[str, str]]) -> None:
    """Case C16."""
    findings = judge_management({"interface": interface, "address": address}, LIVE, {"wlP9s9"})
    assert [finding.severity for finding in findings] == [severity for severity, dummy in expected]
    assert all(finding.sentence.startswith(words) for finding, (dummy, words) in zip(findings, expected, strict=True))


networks = st.builds(
    lambda length, bits: IPv4Network((bits >> (32 - length) << (32 - length), length)), st.integers(2, 32), st.integers(0, 2**32 - 1)
)
near_a_leg = st.builds(
    lambda length, offset: IPv4Network((f"10.10.{offset // 256}.{offset % 256}", length), strict=False),
    st.integers(14, 32),
    st.integers(0, 2047),
)


@given(
    network=networks | near_a_leg,
    device=st.sampled_from(["docker0", "enP7s7", "enp1s0f0np0"]),
    table=st.sampled_from(["main", "52", "200"]),
)
def test_an_overlap_is_found_exactly_where_there_is_one(network: IPv4Network, device: str, table: str) -> None:
    clash = any(
        network.network_address <= IPv4Network(leg["network"]).broadcast_address
        and IPv4Network(leg["network"]).network_address <= network.broadcast_address
        for leg in LEGS
    )
    found = judged("", [MANAGEMENT, {"dst": str(network), "dev": device, "table": table}], TAILSCALE_RULES)
    assert bool(found) == (clash and device != "enp1s0f0np0")
