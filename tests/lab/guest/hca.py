# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shows each leg of a lab host as the RDMA device that a ConnectX-7 would add to it: a tree like /sys/class/infiniband.

Usage: hca.py ROOT NETDEV=HCA…; ROOT/class/infiniband follows the live addresses and carriers of the legs, ROOT/class/net is the real one.
The GID table works like the kernel's: two fixed entries for the link-local address made from the MAC, then a RoCE v1 and a v2 entry
per address, each in the first free slot; what a lost address leaves behind is a hole. No verbs: nothing can be sent through it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

TABLE_LENGTH = 16
GID_TYPES = ("IB/RoCE v1", "RoCE v2")
EMPTY_GID = ":".join(["0000"] * 8)
# Reading the type of an empty slot is an error on the real thing; this file can be opened but never read.
UNREADABLE = "/proc/self/mem"
RATE = "200 Gb/sec (4X HDR)"
SETTLE_S = 0.05  # one change of configuration is a burst of messages
RTNETLINK_GROUPS = 0x1 | 0x10 | 0x100  # linux/rtnetlink.h: RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR


class GidTable:
    """The GID table of one port."""

    def __init__(self, mac: str) -> None:
        self._default = link_local(mac)
        self.slots: list[tuple[ipaddress.IPv6Address, str] | None] = [(self._default, kind) for kind in GID_TYPES]
        self.slots += [None] * (TABLE_LENGTH - len(self.slots))

    def update(self, addresses: Iterable[str]) -> None:
        """Make the table hold exactly these addresses (textual, without prefix length) and the two fixed entries."""
        wanted = dict.fromkeys(as_gid(address) for address in addresses)
        wanted.pop(self._default, None)
        for index in range(len(GID_TYPES), TABLE_LENGTH):
            entry = self.slots[index]
            if entry and entry[0] not in wanted:
                self.slots[index] = None
        held = {entry for entry in self.slots if entry}
        for gid in wanted:
            for kind in GID_TYPES:
                if (gid, kind) not in held and None in self.slots:
                    self.slots[self.slots.index(None)] = (gid, kind)


def link_local(mac: str) -> ipaddress.IPv6Address:
    """The fe80:: address of a MAC address (RFC 4291, appendix A)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    identifier = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + identifier)


def as_gid(address: str) -> ipaddress.IPv6Address:
    """An address as a GID: IPv4 in its mapped form."""
    parsed = ipaddress.ip_address(address)
    return parsed if parsed.version == 6 else ipaddress.IPv6Address(f"::ffff:{parsed}")


def in_groups(gid: ipaddress.IPv6Address) -> str:
    """As sysfs writes it: eight groups of four digits (`exploded` writes the end of a mapped IPv4 address with dots)."""
    return ":".join(gid.packed[i : i + 2].hex() for i in range(0, 16, 2))


def publish(directory: Path, netdev: str, active: bool, table: GidTable) -> None:
    """Bring one device's tree up to date, each file at once."""
    port = directory / "ports/1"
    write(directory / "node_type", "1: CA")
    link(directory / "device/net" / netdev, f"/sys/class/net/{netdev}")
    write(port / "state", "4: ACTIVE" if active else "1: DOWN")
    write(port / "phys_state", "5: LinkUp" if active else "3: Disabled")
    write(port / "link_layer", "Ethernet")
    write(port / "rate", RATE)
    for index, entry in enumerate(table.slots):
        write(port / "gids" / str(index), in_groups(entry[0]) if entry else EMPTY_GID)
        for attribute, value in (("types", entry and entry[1]), ("ndevs", entry and netdev)):
            path = port / "gid_attrs" / attribute / str(index)
            if value:
                write(path, value)
            else:
                link(path, UNREADABLE)


def write(path: Path, text: str) -> None:
    if path.is_symlink() or not path.exists() or path.read_text() != f"{text}\n":
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}")
        fresh.write_text(f"{text}\n")
        fresh.rename(path)


def link(path: Path, target: str) -> None:
    if not path.is_symlink() or os.readlink(path) != target:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.rename(path)


def notify_ready() -> None:
    """Tell systemd that the tree is there (Type=notify)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(address.replace("@", "\0", 1))
            notify.sendall(b"READY=1")


def main() -> None:
    root = Path(sys.argv[1])
    hca_of = dict(argument.split("=") for argument in sys.argv[2:])
    tables: dict[str, GidTable] = {}
    changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    changes.bind((0, RTNETLINK_GROUPS))
    link(root / "class/net", "/sys/class/net")
    ready = False
    while True:
        for device in json.loads(subprocess.check_output(["ip", "-json", "address"])):
            if hca := hca_of.get(device["ifname"]):
                table = tables.setdefault(hca, GidTable(device["address"]))
                table.update(address["local"] for address in device["addr_info"])
                active = {"UP", "LOWER_UP"} <= set(device["flags"])
                publish(root / "class/infiniband" / hca, device["ifname"], active, table)
        if not ready:
            notify_ready()
            ready = True
        wait(changes)


def wait(changes: socket.socket) -> None:
    """Return when something about a device or an address has changed and the burst is over."""
    changes.setblocking(True)
    try:
        changes.recv(65536)
        time.sleep(SETTLE_S)
        changes.setblocking(False)
        while changes.recv(65536):
            pass
    except BlockingIOError:
        return
    except OSError:  # ENOBUFS: more messages than fit; the state is read afresh anyway
        return


if __name__ == "__main__":
    main()
