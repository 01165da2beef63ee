# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planned legs against every IPv4 network that a member already uses.

An overlap does not fail loudly: the peer is merely unreachable (LLMKube three-Spark ring; eugr/spark-vllm-docker). Looked at is
what the kernel knows now: addresses, the routes of all tables, and the rules that say which table is asked first. IPv6 cannot
overlap a leg, which is IPv4 only. A VPN or a pod network that is down leaves no trace here: cluster_reserved_networks names such.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from itertools import combinations
from typing import Any

from ._findings import REFUSE, WARN, Finding

# Routes as broad as these are defaults (a VPN splits 0.0.0.0/0 in two): every leg lies in them and wins by its longer prefix.
DEFAULT_ROUTE_PREFIX = 1

# Route types that take packets, or swallow them; the others are the kernel's own bookkeeping, or `throw`, which passes on.
_TAKING = {"unicast", "blackhole", "unreachable", "prohibit"}
_PASSING = "throw"
_MAIN, _LOCAL = "main", "local"
# A rule with one of these is not about the packets that a member itself sends to a leg.
_NARROW_SELECTORS = {"iif", "oif", "uid_start", "ipproto", "sport", "sport_start", "dport", "dport_start", "tos", "l3mdev", "tun_id"}


@dataclass(frozen=True)
class Use:
    """A network in use: by an address or a route (then `table` is where it stands) of a device."""

    network: IPv4Network
    device: str
    table: str = _MAIN
    kind: str = "unicast"


def uses(addresses: str, routes: str) -> list[Use]:
    """Every IPv4 network of `ip -json address` and `ip -json -4 route show table all`, without the loopback device's."""
    found = [
        Use(IPv4Interface(f"{address['local']}/{address['prefixlen']}").network, device["ifname"])
        for device in json.loads(addresses or "[]")
        for address in device.get("addr_info", [])
        if address.get("family") == "inet" and device["ifname"] != "lo"
    ]
    for route in json.loads(routes or "[]"):
        kind = route.get("type", "unicast")
        target = "0.0.0.0/0" if route["dst"] == "default" else route["dst"]
        if kind in {*_TAKING, _PASSING} and route.get("dev") != "lo" and ":" not in target:
            device = route.get("dev") or ("several devices" if "nexthops" in route else f"a route of type {kind}")
            found.append(Use(IPv4Network(target), device, route.get("table", _MAIN), kind))
    return found


def judge_networks(legs: Sequence[Mapping[str, Any]], addresses: str, routes: str, rules: str = "") -> list[Finding]:
    """Every clash of a member's planned legs with what its kernel shows; empty when there is none.

    `legs`: `plan["members"][name]["legs"]`, of which `netdev`, `network` and `cable` are read. The rest is the output of
    `ip -json address`, `ip -json -4 route show table all` and `ip -json -4 rule`.
    Refused is what another device uses. What lies on the legs' own devices is only told: applying the plan replaces it.
    """
    used = uses(addresses, routes)
    return (
        _taken_devices(legs, json.loads(addresses or "[]"), used)
        + _overlaps(legs, used)
        + _captures(legs, used, json.loads(rules or "[]"))
        + _shared(legs, used)
    )


def judge_management(management: Mapping[str, str], addresses: str, wireless: Container[str] = ()) -> list[Finding]:
    """The management plane's `interface` and `address` of a member against its kernel: over them the ranks meet (NCCL, Gloo).

    Without that interface Gloo ends with "Unable to find address" (spark-arena/sparkrun#275); one that lacks the address the other
    ranks cannot reach. Wi-Fi works until it drops a packet at the wrong time (sparkring).
    """
    interface, address = management["interface"], management["address"]
    where = [
        device["ifname"]
        for device in json.loads(addresses or "[]")
        for entry in device.get("addr_info", [])
        if entry.get("local") == address
    ]
    if interface not in where:
        if where:
            sentence = (
                f"{interface} does not carry {address}, but {where[0]} does: set cluster_management_interface to {where[0]} for this host"
            )
        else:
            sentence = f"no device of this host carries {address}: set cluster_address to its address on {interface}"
        return [Finding(REFUSE, "management-interface", sentence)]
    if interface in wireless:
        sentence = f"the ranks meet over {interface}, which is wireless and may drop them: prefer a cable (enP7s7 is the RJ45 port)"
        return [Finding(WARN, "management-wireless", sentence)]
    return []


def _taken_devices(legs: Sequence[Mapping[str, Any]], devices: Iterable[Mapping[str, Any]], used: Iterable[Use]) -> list[Finding]:
    """Devices of legs that serve something else, which applying the plan would cut: a default route, a bridge, a bond."""
    own = {leg["netdev"] for leg in legs}
    masters = {device["ifname"]: device["master"] for device in devices if device["ifname"] in own and "master" in device}
    uplinks = sorted({use.device for use in used if use.device in own and not use.network.prefixlen and use.kind == "unicast"})
    wrong = {device: f"belongs to {master}: take it out of {master}" for device, master in masters.items()}
    wrong |= dict.fromkeys(uplinks, "carries a default route: move the uplink to another port")
    return [
        Finding(REFUSE, "leg-device-taken", f"{device}, planned for a leg, {what}, or name the right cages")
        for device, what in wrong.items()
    ]


def _overlaps(legs: Sequence[Mapping[str, Any]], used: Iterable[Use]) -> list[Finding]:
    """Networks of other devices; default routes do not count."""
    own = {leg["netdev"] for leg in legs}
    foreign = {(use.network, use.device) for use in used if use.kind in _TAKING and use.device not in own}
    findings = []
    for network, device in sorted(foreign):
        clash = next((leg for leg in legs if network.overlaps(IPv4Network(leg["network"]))), None)
        if clash and network.prefixlen > DEFAULT_ROUTE_PREFIX:
            sentence = (
                f"{device} already uses {network}, which overlaps {clash['network']} planned for {clash['netdev']} "
                f"(cable {clash['cable']}): choose another cluster_leg_pool or free that network"
            )
            findings.append(Finding(REFUSE, "network-overlap", sentence))
    return findings


def _captures(legs: Sequence[Mapping[str, Any]], used: Sequence[Use], rules: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Default routes of a table that is asked before the main one, as VPNs with policy routing have: they take a leg's packets."""
    taken: dict[tuple[str, str], list[str]] = {}
    ordered = sorted(rules, key=lambda rule: rule["priority"])
    for leg in legs:
        network = IPv4Network(leg["network"])
        for rule in ordered:
            table = rule.get("table", "")
            if table == _LOCAL or not _applies(rule, network):
                continue
            if table == _MAIN:
                break  # the leg's own route stands there, longer than any suppressed prefix
            holding = [use for use in used if use.table == table and network.subnet_of(use.network)]
            best = max(holding, key=lambda use: use.network.prefixlen, default=None)
            if best and best.kind != _PASSING:
                # A longer prefix has been found by _overlaps.
                if best.network.prefixlen <= DEFAULT_ROUTE_PREFIX and best.device != leg["netdev"]:
                    taken.setdefault((table, best.device), []).append(leg["network"])
                break
    return [
        Finding(
            REFUSE,
            "network-captured",
            f"routing table {table} is asked before the main one and sends everything to {device}, the legs {', '.join(networks)} "
            f"too: add a rule for each of them (ip rule add to {networks[0]} lookup main priority 100) or take {device} down",
        )
        for (table, device), networks in taken.items()
    ]


def _applies(rule: Mapping[str, Any], network: IPv4Network) -> bool:
    """Whether a rule is asked for packets that the member sends to a leg: no mark, any source, this target."""
    if _NARROW_SELECTORS & set(rule) or ("fwmark" in rule) != ("not" in rule) or rule.get("src", "all") != "all":
        return False
    target = rule.get("dst", "all")
    return target == "all" or network.subnet_of(IPv4Network(f"{target}/{rule.get('dstlen', 32)}"))


def _shared(legs: Sequence[Mapping[str, Any]], used: Iterable[Use]) -> list[Finding]:
    """Two of the legs' devices in one network, as older vendor pages and scripts set them up (eugr/spark-vllm-docker#270)."""
    planned = {leg["netdev"]: leg["network"] for leg in legs}
    own = sorted({(use.network, use.device) for use in used if use.device in planned and use.network.prefixlen > DEFAULT_ROUTE_PREFIX})
    findings = []
    for (network, one), (other, two) in combinations(own, 2):
        if one != two and network.overlaps(other):
            sentence = (
                f"{one} and {two} share {max(network, other, key=lambda each: -each.prefixlen)}, so ARP answers for either and NCCL "
                f"cannot map peers by subnet: apply the plan, which gives them {planned[one]} and {planned[two]}"
            )
            findings.append(Finding(WARN, "halves-share-network", sentence))
    return findings
