# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""HCAs and their GID tables, from sysfs.

The rule: an HCA's GID index is the one whose type is RoCE v2, whose netdev is the HCA's own, and whose GID is the planned IPv4.
Never the first RoCE v2 entry (that is the link-local one), never a constant: tables keep holes and shift after a flap
(NVIDIA/nccl#2157), soft-RoCE numbers its table differently from a ConnectX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from . import _host

ROCE_V2 = "RoCE v2"
STATE_ACTIVE = "4: ACTIVE"
ETHERNET = "Ethernet"
WIRE_GBPS = 200
"""Both halves of a cage report the speed of the wire (NVIDIA/dgx-spark-playbooks; ethtool says 200000Mb/s)."""
PCIE_GTPS, PCIE_LANES = 32.0, 4
"""Each half of the ConnectX-7 has a Gen5 x4 link of its own (eugr/spark-vllm-docker; christopherowen)."""
EMPTY_GID = IPv6Address(0)

REPLUG = "take down the port and up again while nothing uses it, so that its table is made anew"
APPLY = "run the fabric role"


@dataclass(frozen=True)
class Gid:
    """One used entry of a GID table."""

    index: int
    type: str
    gid: str
    netdev: str

    @property
    def ipv4(self) -> str:
        """The mapped IPv4 address, or an empty string."""
        mapped = IPv6Address(self.gid).ipv4_mapped
        return str(mapped) if mapped else ""

    def __str__(self) -> str:
        return f"{self.index} {self.type} {self.ipv4 or self.gid}"


@dataclass(frozen=True)
class Hca:
    """One RDMA device; a ConnectX-7 function has one port, numbered 1.

    `rate_gbps` is 0 where sysfs does not say it of a wire, `pcie` (GT/s, lanes) is none where there is no PCIe link.
    """

    name: str
    netdev: str
    state: str
    rate_gbps: float
    mtu: int
    gids: tuple[Gid, ...]
    link_layer: str = ETHERNET
    pcie: tuple[float, int] | None = None

    @property
    def holes(self) -> list[int]:
        """Slots without an entry below the last used one: what a lost address leaves while something still refers to it."""
        used = [gid.index for gid in self.gids]
        return sorted(set(range(max(used, default=-1))) - set(used))

    @property
    def usable(self) -> list[Gid]:
        """Entries that NCCL can connect over: RoCE v2 with an IPv4 address of this HCA's own netdev."""
        return [gid for gid in self.gids if gid.type == ROCE_V2 and gid.ipv4 and gid.netdev == self.netdev]

    def index_of(self, address: str) -> int | None:
        """Index of the RoCE v2 GID that carries an IPv4 address on this HCA's own netdev."""
        return next((gid.index for gid in self.usable if gid.ipv4 == address), None)


def read_hcas(sysfs_root: str) -> dict[str, Hca]:
    """All HCAs below `SYSFS_ROOT/class/infiniband`, by name."""
    root = Path(sysfs_root) / "class"
    return {name: _read_hca(root, name) for name in _host.names(root / "infiniband")}


def _read_hca(root: Path, name: str) -> Hca:
    device = root / "infiniband" / name
    port = device / "ports" / "1"
    # soft-RoCE is no function of a card: it names its netdev in a file of its own, and its rate is a constant, of no wire.
    parent = _host.read(device / "parent")
    netdev = parent or next(iter(_host.names(device / "device" / "net")), "")
    gids = []
    for slot in sorted(_host.names(port / "gids"), key=int):
        text = _host.read(port / "gids" / slot)
        if text and IPv6Address(text) != EMPTY_GID:
            kind, owner = (_host.read(port / "gid_attrs" / attribute / slot) or "" for attribute in ("types", "ndevs"))
            gids.append(Gid(int(slot), kind, str(IPv6Address(text)), owner))
    rate = "0" if parent else (_host.read(port / "rate") or "0").split()[0]
    mtu = _host.read(root / "net" / netdev / "mtu") if netdev else None
    speed = re.match(r"([0-9.]+) GT/s", _host.read(device / "device" / "current_link_speed") or "")
    lanes = _host.read(device / "device" / "current_link_width")
    return Hca(
        name=name,
        netdev=netdev,
        state=_host.read(port / "state") or "absent",
        rate_gbps=float(rate),
        mtu=int(mtu or 0),
        gids=tuple(gids),
        link_layer=_host.read(port / "link_layer") or ETHERNET,
        pcie=(float(speed[1]), int(lanes)) if speed and lanes else None,
    )


def expand(selector: str, names: Iterable[str]) -> list[str]:
    """HCAs that a value of NCCL_IB_HCA means, in the order of `names`.

    NCCL's rules: a leading `^` excludes, a leading `=` (after it) compares whole names instead of their beginnings, and each
    item may end in `:PORT`; a Spark's HCAs have port 1 only.
    """
    exclude = selector.startswith("^")
    exact = selector.removeprefix("^").startswith("=")
    items = [item.partition(":") for item in selector.removeprefix("^").removeprefix("=").split(",") if item]

    def meant(name: str) -> bool:
        return any(port in ("", "1") and (name == item if exact else name.startswith(item)) for item, dummy, port in items)

    return [name for name in names if meant(name) != exclude]


def judge(hcas: Mapping[str, Hca], planned: Mapping[str, tuple[str, str]], pinned: int | None = None) -> dict[str, Any]:
    """GID indexes against the plan. `planned`: HCA name -> (netdev, IPv4 address); `pinned`: an index that is set for all of them.

    Returns `hcas` (one mapping for each planned HCA that exists, with its `gid_index`, or None, and a `verdict` in one word),
    `gid_index` (the one index common to all, the only kind that NCCL_IB_GID_INDEX can express, else None), `gid_reason`
    (why it is that) and `problems`.
    """
    rows, problems = [], []
    for name, (netdev, address) in planned.items():
        hca = hcas.get(name)
        if hca is None:
            instead = _alternatives(hcas, planned)
            problems.append(f"HCA {name} does not exist: check the driver (lspci, dmesg) and /etc/nvidia/cx7-hotplug-enabled{instead}")
            continue
        index = hca.index_of(address)
        verdict, problem = _verdict(hca, netdev, address)
        if verdict == "inactive":
            problem += _alternatives(hcas, planned)
        if not problem and pinned not in (None, index):
            verdict, problem = "pinned", _pinned(hca, index, pinned)
        rows.append({**asdict(hca), "address": address, "gid_index": index, "holes": hca.holes, "verdict": verdict})
        problems += [f"HCA {name} {problem}"] if problem else []
    common, reason = _common(rows, len(planned))
    return {"hcas": rows, "gid_index": common, "gid_reason": reason, "problems": problems}


def judge_selector(hcas: Mapping[str, Hca], selector: str, pinned: int | None = None) -> dict[str, Any]:
    """The same for the HCAs that a value of NCCL_IB_HCA means, each with the one IPv4 address that its table has."""
    chosen = expand(selector, hcas)
    several = {name: [gid.ipv4 for gid in hcas[name].usable] for name in chosen if len({gid.ipv4 for gid in hcas[name].usable}) > 1}
    planned = {name: (hcas[name].netdev, next((gid.ipv4 for gid in hcas[name].usable), "")) for name in chosen}
    result = judge(hcas, planned, pinned)
    if not chosen:
        known = ", ".join(hcas) or "none"
        result["problems"].append(
            f"NCCL_IB_HCA {selector!r} means no HCA of this host ({known}), so NCCL falls back to sockets: correct it"
        )
    for name, addresses in several.items():
        result["problems"].append(f"HCA {name} carries {', '.join(addresses)}: leave one address on {hcas[name].netdev}")
    return result


def _verdict(hca: Hca, netdev: str, address: str) -> tuple[str, str]:
    """One word on an HCA, and the sentence that goes on after its name where something is wrong."""
    if hca.netdev != netdev:
        return "other-netdev", f"belongs to {hca.netdev or 'no netdev'} instead of {netdev}: check the device names of this member"
    if hca.link_layer != ETHERNET:
        return "not-ethernet", f"has the link layer {hca.link_layer}: set the port to Ethernet (mlxconfig LINK_TYPE)"
    if hca.state != STATE_ACTIVE:
        return "inactive", f"is {hca.state} instead of {STATE_ACTIVE}: check the cable of {netdev} and its neighbour"
    if hca.index_of(address) is None:
        verdict, instead, cure = _instead(hca, address)
        return verdict, f"has no RoCE v2 GID for {address or 'an IPv4 address'} ({instead}): {cure}"
    if 0 < hca.rate_gbps < WIRE_GBPS:
        return "slow", f"runs at {hca.rate_gbps:g} Gb/s instead of {WIRE_GBPS}: check the cable of {netdev}"
    if hca.pcie and (hca.pcie[0] < PCIE_GTPS or hca.pcie[1] < PCIE_LANES):
        seen, wanted = (f"{speed:g} GT/s x{lanes}" for speed, lanes in (hca.pcie, (PCIE_GTPS, PCIE_LANES)))
        return "slow-pcie", f"has its PCIe link at {seen} instead of {wanted}: take power and cables off this member for a minute"
    return "right", ""


def _instead(hca: Hca, address: str) -> tuple[str, str, str]:
    """What the table holds instead, told apart so that the cure is known: a word, what is there, and the cure."""
    if not hca.gids:
        return "empty", "its table is empty", f"check {hca.netdev} and the driver"
    same = [gid for gid in hca.gids if address and gid.ipv4 == address]
    if any(gid.type == ROCE_V2 for gid in same):
        owner = same[-1].netdev or "none"
        return "elsewhere", f"its netdev there is {owner}", f"take the address off {owner}, then {APPLY}"
    if same:
        return "v1-only", "only RoCE v1 carries it", REPLUG
    others = [gid.ipv4 for gid in hca.gids if gid.ipv4]
    if others:
        return "other-address", f"its table has {', '.join(sorted(set(others)))}", APPLY
    if all(IPv6Address(gid.gid).is_link_local for gid in hca.gids):
        return "unaddressed", f"{hca.netdev} has no address, its table has link-local entries only", f"{APPLY}, or leave this HCA out"
    return "ipv6-only", "its table has IPv6 entries only", APPLY


def _alternatives(hcas: Mapping[str, Hca], planned: Mapping[str, Any]) -> str:
    """HCAs that would do, where a planned one does not."""
    ready = [hca for name, hca in hcas.items() if name not in planned and hca.state == STATE_ACTIVE and hca.usable]
    listed = " and ".join(f"{hca.name} ({hca.usable[0].ipv4} at {hca.usable[0].index})" for hca in ready)
    return f"; active with an address is {listed}" if listed else ""


def _pinned(hca: Hca, index: int | None, pinned: int | None) -> str:
    held = next((str(gid) for gid in hca.gids if gid.index == pinned), f"{pinned} nothing")
    table = ", ".join(map(str, hca.gids))
    return (
        f"has its address at index {index}, but NCCL_IB_GID_INDEX is {pinned}, where it has {held!r} (table: {table}): unset the variable"
    )


def _common(rows: Iterable[Mapping[str, Any]], count: int) -> tuple[int | None, str]:
    """The index that all HCAs share, if any, and why there is one or none."""
    found = {row["name"]: row["gid_index"] for row in rows}
    lacking = [name for name, index in found.items() if index is None]
    if lacking or len(found) < count or not found:
        return None, f"not every HCA has a usable GID{' (' + ', '.join(lacking) + ' has none)' if lacking else ''}"
    indexes = set(found.values())
    if len(indexes) == 1:
        return indexes.pop(), "all HCAs carry their address at it now; it may move with the next flap, so it is still best left unset"
    listed = ", ".join(f"{name} at {index}" for name, index in found.items())
    return (
        None,
        f"the HCAs carry their addresses at different indexes ({listed}), and NCCL_IB_GID_INDEX is one number for all: leave it unset",
    )
