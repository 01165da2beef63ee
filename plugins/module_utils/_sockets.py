# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who listens on a TCP port, from procfs."""

from __future__ import annotations

import os
from pathlib import Path

from . import _host

LISTEN = "0A"


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
