# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""HCAs and their GID tables, from sysfs.

The rule: an HCA's GID index is the one whose type is RoCE v2, whose netdev is the HCA's own, and whose GID is the planned IPv4.
Never the first RoCE v2 entry (that is the link-local one), never a constant: tables keep holes and shift after a flap
(NVIDIA/nccl#2157), soft-RoCE numbers its table differently from a ConnectX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

from . import _host

ROCE_V2 = "RoCE v2"
STATE_ACTIVE = "4: ACTIVE"
WIRE_GBPS = 200
"""Both halves of a cage report the speed of the wire (NVIDIA/dgx-spark-playbooks; ethtool says 200000Mb/s)."""
EMPTY_GID = IPv6Address(0)


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


@dataclass(frozen=True)
class Hca:
    """One RDMA device; a ConnectX-7 function has one port, numbered 1. `rate_gbps` is 0 where sysfs does not say it of a wire."""

    name: str
    netdev: str
    state: str
    rate_gbps: float
    mtu: int
    gids: tuple[Gid, ...]

    def index_of(self, address: str) -> int | None:
        """Index of the RoCE v2 GID that carries an IPv4 address on this HCA's own netdev."""
        wanted = str(IPv4Address(address))
        return next((g.index for g in self.gids if g.type == ROCE_V2 and g.ipv4 == wanted and g.netdev == self.netdev), None)


def read_hcas(sysfs_root: str) -> dict[str, Hca]:
    """All HCAs below `SYSFS_ROOT/class/infiniband`, by name."""
    root = Path(sysfs_root) / "class"
    return {name: _read_hca(root, name) for name in _host.names(root / "infiniband")}


def _read_hca(root: Path, name: str) -> Hca:
    port = root / "infiniband" / name / "ports" / "1"
    # soft-RoCE is no function of a card: it names its netdev in a file of its own, and its rate is a constant, of no wire.
    parent = _host.read(root / "infiniband" / name / "parent")
    netdev = parent or next(iter(_host.names(root / "infiniband" / name / "device" / "net")), "")
    gids = []
    for slot in sorted(_host.names(port / "gids"), key=int):
        text = _host.read(port / "gids" / slot)
        if text and IPv6Address(text) != EMPTY_GID:
            kind, device = (_host.read(port / "gid_attrs" / attribute / slot) or "" for attribute in ("types", "ndevs"))
            gids.append(Gid(int(slot), kind, str(IPv6Address(text)), device))
    rate = "0" if parent else (_host.read(port / "rate") or "0").split()[0]
    mtu = _host.read(root / "net" / netdev / "mtu") if netdev else None
    return Hca(name, netdev, _host.read(port / "state") or "absent", float(rate), int(mtu or 0), tuple(gids))


def judge(hcas: Mapping[str, Hca], planned: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """GID indexes against the plan. `planned`: HCA name -> (netdev, IPv4 address).

    Returns `hcas` (one mapping for each planned HCA with its `gid_index`, or None), `gid_index` (the one index common to all,
    the only kind that NCCL_IB_GID_INDEX can express, else None) and `problems`.
    """
    rows, problems = [], []
    for name, (netdev, address) in planned.items():
        hca = hcas.get(name)
        if hca is None:
            problems.append(f"HCA {name} does not exist: check the driver (lspci, dmesg) and /etc/nvidia/cx7-hotplug-enabled")
            continue
        index = hca.index_of(address)
        rows.append({**asdict(hca), "address": address, "gid_index": index})
        if hca.netdev != netdev:
            problems.append(f"HCA {name} belongs to {hca.netdev or 'no netdev'} instead of {netdev}: check the device names of this member")
        elif hca.state != STATE_ACTIVE:
            problems.append(f"HCA {name} is {hca.state} instead of {STATE_ACTIVE}: check the cable of {netdev} and its neighbour")
        elif index is None:
            problems.append(
                f"HCA {name} has no RoCE v2 GID for {address} ({_instead(hca, address)}): run the fabric role, then look at the table again"
            )
        elif 0 < hca.rate_gbps < WIRE_GBPS:
            problems.append(f"HCA {name} runs at {hca.rate_gbps:g} Gb/s instead of {WIRE_GBPS}: check the cable of {netdev}")
    indexes = {row["gid_index"] for row in rows}
    common = indexes.pop() if len(indexes) == 1 and len(rows) == len(planned) else None
    return {"hcas": rows, "gid_index": common, "problems": problems}


def _instead(hca: Hca, address: str) -> str:
    """What the table holds instead, told apart so that the cure is known."""
    if not hca.gids:
        return "its table is empty"
    same = [gid for gid in hca.gids if gid.ipv4 == str(IPv4Address(address))]
    if any(gid.type == ROCE_V2 for gid in same):
        return f"its netdev there is {same[-1].netdev or 'none'}"
    if same:
        return "only RoCE v1 carries it"
    others = [gid.ipv4 for gid in hca.gids if gid.ipv4]
    return f"its table has {', '.join(sorted(set(others)))}" if others else "its table has IPv6 entries only"
