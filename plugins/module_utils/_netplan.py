# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A member's legs as a netplan file, and as the kernel shows them."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NETPLAN_FILE = "/etc/netplan/60-gb10-fabric.yaml"
NETPLAN_MODE = 0o600
"""netplan complains about a file that others can read."""
NETWORK_MANAGER_FILE = "/etc/NetworkManager/conf.d/90-gb10-fabric.conf"


def netplan_file(legs: Sequence[Mapping[str, Any]], mtu: int, renderer: str = "") -> str:
    """The file's YAML, written out by hand: a few fixed keys, in a stable order.

    `ignore-carrier` keeps a leg's address, and with it its GID, while the neighbour reboots. `link-local: []` and no
    DHCP leave exactly one IPv4 address on a leg. `optional`: a missing cable must not hold up the boot. The renderer is
    each leg's own: one of the whole file would be that of every other device too.
    """
    lines = ["# Written by gb10.cluster (role fabric).", "network:", "  version: 2", "  ethernets:"]
    for leg in legs:
        lines += [
            f"    {leg['netdev']}:",
            *([f"      renderer: {renderer}"] if renderer else []),
            f"      addresses: [{leg['address']}/{leg['prefix_length']}]",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {mtu}",
            "      ignore-carrier: true",
            "      optional: true",
        ]
    return "\n".join(lines) + "\n"


def network_manager_file(netdevs: Sequence[str]) -> str:
    """NetworkManager's own `ignore-carrier`: netplan passes its key to networkd alone."""
    devices = ",".join(f"interface-name:{netdev}" for netdev in netdevs)
    return f"# Written by gb10.cluster (role fabric).\n[device-gb10-fabric]\nmatch-device={devices}\nignore-carrier=yes\n"


_KEY = re.compile(r"""^(?P<indent> *)(?P<quote>["']?)(?P<key>[^"'\s#:]+)(?P=quote)\s*:(?:\s|$)""")


def without_devices(text: str, netdevs: Collection[str]) -> str:
    """A netplan file's text without its `ethernets` entries of these devices; every other line stays as it is.

    netplan merges lists across files, so an address that another file gives a leg would be a second one (eugr/spark-vllm-docker).
    Entries in block style are taken out; one in flow style stays, and `rendered_problems` names it then.
    """
    kept: list[str] = []
    path: list[tuple[int, str]] = []  # the keys that enclose a line, with their indents
    removed: int | None = None  # indent of the entry that is being taken out
    held: list[str] = []  # comments and blank lines whose place the next line decides
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip(" "))
        if removed is not None:
            if not stripped or (stripped.startswith("#") and (held or indent <= removed)):
                held.append(line)
                continue
            if indent > removed:
                held = []
                continue
            kept, held, removed = kept + held, [], None
        match = _KEY.match(line)
        if match and not stripped.startswith("#"):
            path = [entry for entry in path if entry[0] < indent]
            if [key for number, key in path] == ["network", "ethernets"] and match["key"] in netdevs:
                removed = indent
                continue
            path.append((indent, match["key"]))
        kept.append(line)
    return _without_empty_ethernets("".join(kept + held))


def _without_empty_ethernets(text: str) -> str:
    """netplan refuses a key without a value, which is what is left where every device of a file is gone."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        match = _KEY.match(line)
        if match and match["key"] == "ethernets" and not line.split(":", 1)[1].split("#")[0].strip():
            rest = (following for following in lines[number + 1 :] if following.strip() and not following.lstrip().startswith("#"))
            following = next(rest, "")
            if len(following) - len(following.lstrip(" ")) <= len(match["indent"]):
                return "".join(lines[:number] + lines[number + 1 :])
    return text


def redacted(text: str) -> str:
    """A netplan file's text as it may be shown: other devices' Wi-Fi passwords and keys are in it too."""
    return re.sub(r"(?im)^(\s*(?:- )?[\w-]*(?:password|psk|secret|key)[\w-]*\s*:\s*).+$", r"\1(not shown)", text)


def _sections(text: str) -> dict[str, list[tuple[str, str]]]:
    """An INI file of systemd-networkd or NetworkManager: section -> its assignments in order, repeats included."""
    sections: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("[") and line.rstrip().endswith("]"):
            current = sections.setdefault(line.strip()[1:-1], [])
        elif "=" in line and not line.startswith(("#", ";")):
            key, value = line.split("=", 1)
            current.append((key.strip(), value.strip()))
    return sections


def _matches(sections: Mapping[str, list[tuple[str, str]]], netdev: str, mac: str) -> bool:
    """Whether a .network or .nmconnection file is about a device. A file that names neither a device nor an address is about none."""
    match = dict(sections.get("Match", []))
    names = match.get("Name", "").split()
    macs = (match.get("PermanentMACAddress", "") + " " + match.get("MACAddress", "")).split()
    connection = dict(sections.get("connection", []))
    names += [connection["interface-name"]] if "interface-name" in connection else []
    names += [name for name in dict(sections.get("match", [])).get("interface-name", "").split(";") if name]
    macs += [value for key, value in sections.get("ethernet", []) if key == "mac-address"]
    if not names and not macs:
        return False
    named = not names or any(fnmatch.fnmatchcase(netdev, name) for name in names)
    return named and (not macs or mac.lower() in (value.lower() for value in macs))


def _origin(path: str) -> str:
    """Where a rendered file comes from, in words."""
    entry = re.fullmatch(r"(?:10-)?netplan-(.+)\.(?:network|nmconnection)", path.rpartition("/")[2])
    return f"the netplan entry {entry[1]}" if entry else path


_PARTS_OF = {"Bond": "a bond", "Bridge": "a bridge", "VLAN": "a VLAN", "VRF": "a VRF", "MACVLAN": "a MACVLAN"}


def rendered_problems(rendered: Mapping[str, str], legs: Sequence[Mapping[str, Any]], macs: Mapping[str, str]) -> list[str]:
    """What of netplan's output for networkd and NetworkManager would make a leg other than planned, one sentence each.

    `rendered`: path -> text of every .network and .nmconnection file, as netplan made it of all the member's netplan files, and of
    those that others wrote for the two. So whatever netplan understands (wildcards, MAC addresses, merged lists, bonds) is judged as
    it would act. `macs`: MAC address by device.
    """
    sentences = []
    files = {path: _sections(text) for path, text in sorted(rendered.items())}
    for leg in legs:
        netdev, wanted = leg["netdev"], f"{leg['address']}/{leg['prefix_length']}"
        for path, sections in files.items():
            if not _matches(sections, netdev, macs.get(netdev, "")):
                continue
            if path.rpartition("/")[2] not in (f"10-netplan-{netdev}.network", f"netplan-{netdev}.nmconnection"):
                sentences.append(f"{netdev} is also configured by {_origin(path)}")
                continue
            network = sections.get("Network", [])
            ipv4 = sections.get("ipv4", [])
            addresses = [value for key, value in network if key == "Address"]
            addresses += [value.split(",")[0] for key, value in ipv4 if re.fullmatch(r"address\d+", key)]
            if extra := [address for address in addresses if address != wanted]:
                sentences.append(f"{netdev} would also have {', '.join(extra)}")
            sentences += [f"{netdev} would be part of {_PARTS_OF[key]} ({value})" for key, value in network if key in _PARTS_OF]
            connection = sections.get("connection", [])
            sentences += [f"{netdev} would be part of {value}" for key, value in connection if key in ("master", "controller")]
    return sentences


@dataclass(frozen=True)
class Netdev:
    """What `ip -json address` says of one device: MTU, whether it has a carrier, its IPv4 addresses as CIDR, whether it is up, its MAC."""

    mtu: int
    carrier: bool
    addresses: tuple[str, ...]
    up: bool = True
    mac: str = ""


def parse_addresses(text: str) -> dict[str, Netdev]:
    """Devices by name from the output of `ip -json address`."""
    devices = {}
    for entry in json.loads(text or "[]"):
        if not entry:
            continue
        ipv4 = [f"{a['local']}/{a['prefixlen']}" for a in entry.get("addr_info", []) if a.get("family") == "inet"]
        flags = entry.get("flags", [])
        up = "UP" in flags
        devices[entry["ifname"]] = Netdev(entry["mtu"], up and "NO-CARRIER" not in flags, tuple(ipv4), up, entry.get("address", ""))
    return devices


def leg_differences(legs: Sequence[Mapping[str, Any]], mtu: int, devices: Mapping[str, Netdev]) -> list[str]:
    """How the live legs differ from the plan, one sentence each; empty when they are as planned. Carrier is not looked at."""
    sentences = []
    for leg in legs:
        netdev, wanted = leg["netdev"], f"{leg['address']}/{leg['prefix_length']}"
        device = devices.get(netdev)
        if device is None:
            sentences.append(f"{netdev} does not exist")
            continue
        if not device.up:
            sentences.append(f"{netdev} is down")
        if wanted not in device.addresses:
            sentences.append(f"{netdev} lacks {wanted}")
        if extra := [address for address in device.addresses if address != wanted]:
            sentences.append(f"{netdev} also has {', '.join(extra)}")
        if device.mtu != mtu:
            sentences.append(f"{netdev} has MTU {device.mtu} instead of {mtu}")
    return sentences


def path_sentence(leg: Mapping[str, Any], peer: Mapping[str, Any], mtu: int, said: str, small: bool) -> str:
    """What is wrong with a way over a leg whose full-size packet did not come back. `said`: ping's words; `small`: a small one did."""
    way = f"{leg['netdev']} does not reach {peer['member']} ({peer['address']} on {peer['netdev']})"
    if small:
        cure = f"set MTU {mtu} at {peer['netdev']} of {peer['member']} (run the fabric role there) and on any switch between"
        return f"{way} with {mtu} bytes, but with few: {cure}"
    return f"{way}: {said}; check cable {leg['cable']}, and that {peer['netdev']} of {peer['member']} is up with its address"


def twin_sentence(leg: Mapping[str, Any], mac: str) -> str:
    """Somebody else answers for a leg's address."""
    return f"{leg['address']} of {leg['netdev']} is also used by {mac} on cable {leg['cable']}: take the address off that device, or run the fabric role there"


def lost_addresses(before: Mapping[str, Netdev], now: Mapping[str, Netdev], netdevs: Collection[str]) -> list[str]:
    """IPv4 addresses that other devices had before a change and have no more, one sentence each."""
    return [
        f"{name} lost {address}"
        for name, device in before.items()
        if name not in netdevs
        for address in device.addresses
        if address not in (now[name].addresses if name in now else ())
    ]


def way_back(devices: Mapping[str, Netdev], netdevs: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Lines for `ip -batch` that bring devices back to how they are now: to flush, links, addresses."""
    there = {name: devices[name] for name in netdevs if name in devices}
    flush = [f"address flush dev {name}" for name in there]
    links = [f"link set dev {name} mtu {device.mtu} {'up' if device.up else 'down'}" for name, device in there.items()]
    addresses = [f"address replace {address} dev {name}" for name, device in there.items() for address in device.addresses]
    return flush, links, addresses
