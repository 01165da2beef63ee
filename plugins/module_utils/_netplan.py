# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A member's legs as a netplan file, and as the kernel shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NETPLAN_FILE = "/etc/netplan/60-gb10-fabric.yaml"
NETPLAN_MODE = 0o600
"""netplan complains about a file that others can read."""


def netplan_file(legs: Sequence[Mapping[str, Any]], mtu: int, renderer: str = "") -> str:
    """The file's YAML, written out by hand: a few fixed keys, in a stable order.

    `ignore-carrier` keeps a leg's address, and with it its GID, while the neighbour reboots. `link-local: []` and no
    DHCP leave exactly one IPv4 address on a leg. `optional`: a missing cable must not hold up the boot.
    """
    lines = ["# Written by gb10.cluster (role fabric).", "network:", "  version: 2"]
    if renderer:
        lines.append(f"  renderer: {renderer}")
    lines.append("  ethernets:")
    for leg in legs:
        lines += [
            f"    {leg['netdev']}:",
            f"      addresses: [{leg['address']}/{leg['prefix_length']}]",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {mtu}",
            "      ignore-carrier: true",
            "      optional: true",
        ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Netdev:
    """What `ip -json address` says of one device: MTU, whether it has a carrier, and its IPv4 addresses as CIDR."""

    mtu: int
    carrier: bool
    addresses: tuple[str, ...]


def parse_addresses(text: str) -> dict[str, Netdev]:
    """Devices by name from the output of `ip -json address`."""
    devices = {}
    for entry in json.loads(text or "[]"):
        if not entry:
            continue
        ipv4 = [f"{a['local']}/{a['prefixlen']}" for a in entry.get("addr_info", []) if a.get("family") == "inet"]
        flags = entry.get("flags", [])
        devices[entry["ifname"]] = Netdev(entry["mtu"], "UP" in flags and "NO-CARRIER" not in flags, tuple(ipv4))
    return devices


def used_networks(devices: Mapping[str, Netdev], routes: str) -> list[dict[str, str]]:
    """Every IPv4 network that a member uses, by device: its addresses and its routes (`ip -json route show table all`)."""
    used = [{"network": address, "device": name} for name, device in devices.items() if name != "lo" for address in device.addresses]
    for route in json.loads(routes or "[]"):
        network = route.get("dst", "default")
        if network != "default" and route.get("type", "unicast") == "unicast" and ":" not in network and route.get("dev") != "lo":
            used.append({"network": network, "device": route.get("dev", "a route")})
    return used


def leg_differences(legs: Sequence[Mapping[str, Any]], mtu: int, devices: Mapping[str, Netdev]) -> list[str]:
    """How the live legs differ from the plan, one sentence each; empty when they are as planned. Carrier is not looked at."""
    sentences = []
    for leg in legs:
        netdev, wanted = leg["netdev"], f"{leg['address']}/{leg['prefix_length']}"
        device = devices.get(netdev)
        if device is None:
            sentences.append(f"{netdev} does not exist")
            continue
        if wanted not in device.addresses:
            sentences.append(f"{netdev} lacks {wanted}")
        if extra := [address for address in device.addresses if address != wanted]:
            sentences.append(f"{netdev} also has {', '.join(extra)}")
        if device.mtu != mtu:
            sentences.append(f"{netdev} has MTU {device.mtu} instead of {mtu}")
    return sentences
