# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds what others may want: a TCP port (from procfs), and an address on a segment (by ARP)."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

from . import _host

LISTEN = "0A"
ETHERTYPE_ARP, ARP_REQUEST, ARP_REPLY = 0x0806, 1, 2
ARP = struct.Struct("!HHBBH6s4s6s4s")
"""RFC 826 for Ethernet and IPv4: hardware, protocol, their lengths, operation, sender's and target's MAC and address."""


def listening(proc_net_tcp: str) -> dict[int, str]:
    """Listening ports with their socket's inode, from the text of /proc/net/tcp or tcp6."""
    ports = {}
    for line in proc_net_tcp.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTEN:
            ports[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return ports


def listeners(procfs_root: str) -> dict[int, str]:
    """Every listening port with the program that holds it, such as `python3 (pid 4711)`."""
    proc = Path(procfs_root)
    ports: dict[int, str] = {}
    for name in ("tcp6", "tcp"):
        ports |= listening(_host.read(proc / "net" / name) or "")
    holders = _holders(proc, set(ports.values())) if ports else {}
    return {port: holders.get(inode, "another program") for port, inode in ports.items()}


def _holders(proc: Path, inodes: set[str]) -> dict[str, str]:
    found = {}
    for pid in (name for name in _host.names(proc) if name.isdigit()):
        for descriptor in _host.names(proc / pid / "fd"):
            try:
                link = os.readlink(proc / pid / "fd" / descriptor)
            except OSError:
                continue
            if link.startswith("socket:[") and link[8:-1] in inodes:
                found[link[8:-1]] = f"{_host.read(proc / pid / 'comm')} (pid {pid})"
    return found


def holder(netdev: str, address: str, own: Collection[str], wait_s: float = 0.5) -> str:
    """The MAC address that answers for an IPv4 address on a device's segment, other than our own ones; empty when none does.

    The probe of RFC 5227: nobody's cache learns from it, since its sender's address is none. A cable is seen by both halves of a cage,
    so this member's own devices may answer too.
    """
    broadcast, wanted = b"\xff" * 6, socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE_ARP)) as wire:
        wire.bind((netdev, ETHERTYPE_ARP))
        mac = wire.getsockname()[4]
        probe = ARP.pack(1, 0x0800, 6, 4, ARP_REQUEST, mac, b"\0" * 4, b"\0" * 6, wanted)
        wire.send(broadcast + mac + struct.pack("!H", ETHERTYPE_ARP) + probe)
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0:
            wire.settimeout(left)
            try:
                frame = wire.recv(128)[14:]
            except TimeoutError:
                break
            if len(frame) >= ARP.size:
                operation, sender, holds = (ARP.unpack_from(frame)[field] for field in (4, 5, 6))
                other = sender.hex(":")
                if operation == ARP_REPLY and holds == wanted and other not in own:
                    return other
    return ""
