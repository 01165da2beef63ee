# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of full-kernel hosts share: the lab's verbs, boots, and traffic over the legs."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import wait_for

GID_INDEX = 1  # of an IPv4 address on a soft-RoCE device; a ConnectX has it at 3
BOOT_S = 120
STILL_S = 30
"""A connection that moves nothing for so long has stalled."""
SINK_PORT = 7000

_SINK = f"""
import socket, threading
def take(connection):
    taken = 0
    while part := connection.recv(1 << 20):
        taken += len(part)
    connection.sendall(b"%d" % taken)
    connection.close()
with socket.create_server(("", {SINK_PORT})) as server:
    while True:
        threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()
"""
# The socket's time limit is one of each call and not of the whole.
_SOURCE = f"""
import socket, sys
source, sink, mib = sys.argv[1:]
with socket.create_connection((sink, {SINK_PORT}), {STILL_S}, (source, 0)) as connection:
    for block in range(int(mib)):
        connection.sendall(bytes(1 << 20))
    connection.shutdown(socket.SHUT_WR)
    assert int(connection.recv(99)) == int(mib) << 20
"""
# Takes what is available but for so much, also what others give back meanwhile; the kernel is to leave it alone, whatever happens.
_STRANGER = """
import sys, time
def available():
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) >> 10 for line in meminfo if line.startswith("MemAvailable:"))
held = []
while True:
    if available() > int(sys.argv[1]) + 16:
        held.append(bytearray(16 << 20))
    else:
        time.sleep(0.2)
"""


def in_namespace(member: str, *command: str) -> str:
    """What a command prints on this machine, in the namespace where a host has its sockets."""
    namespace = f"/run/netns/gb10-{os.environ['GB10_LAB']}-{member}"
    done = subprocess.run(["nsenter", f"--net={namespace}", *command], check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


def boot_id(host: Host) -> str:
    """Tells one boot from another; empty while the host does not answer (a connection of the boot before ends after 30 s)."""
    try:
        return str(host.run("cat /proc/sys/kernel/random/boot_id").stdout.strip())
    except RuntimeError:
        return ""


def booted_since(host: Host, before: str) -> bool:
    return boot_id(host) not in ("", before)


def reboot(*hosts: Host) -> None:
    """Reboot hosts, all at once, and wait until they are up again."""
    before = [boot_id(host) for host in hosts]
    for host in hosts:
        host.check_output("systemd-run --quiet --on-active=1 systemctl reboot")
    for host, boot in zip(hosts, before, strict=True):
        wait_for(partial(booted_since, host, boot), BOOT_S)
        assert host.check_output("timeout 120 systemctl is-system-running --wait") == "running"


def meminfo(host: Host) -> dict[str, int]:
    """/proc/meminfo in MiB."""
    lines = re.findall(r"^(\w+): +(\d+) kB$", host.check_output("cat /proc/meminfo"), re.MULTILINE)
    return {name: int(kib) >> 10 for name, kib in lines}


@contextmanager
def stranger(host: Host, leave_mib: int) -> Iterator[None]:
    """Something that is not the group's takes the host's memory, but for so many MiB that stay available, until the block ends."""
    run = "systemd-run --quiet --collect --unit=stranger --property=OOMScoreAdjust=-1000"
    host.check_output(f"{run} python3 -c {shlex.quote(_STRANGER)} {leave_mib}")
    try:
        yield
    finally:
        host.check_output("systemctl stop stranger")


def legs(plan: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every leg by its two ends."""
    return [(leg["ends"][0], leg["ends"][1]) for leg in plan["fabric"]["legs"]]


def gid(host: Host, hca: str, index: int) -> tuple[str, str, str]:
    """The IPv4 address, type and device of an entry of a device's GID table."""
    port = f"/sys/class/infiniband/{hca}/ports/1"
    files = f"{port}/gids/{index} {port}/gid_attrs/types/{index} {port}/gid_attrs/ndevs/{index}"
    value, kind, netdev = host.check_output(f"cat {files}").splitlines()
    return str(ipaddress.IPv6Address(value).ipv4_mapped), kind, netdev


def flood(plan: dict[str, Any], hosts: dict[str, Host], mib: int) -> list[str]:
    """Send so much over every leg both ways, all at once; what did not arrive whole, in words."""
    for host in hosts.values():
        host.check_output(f"systemctl is-active --quiet sink || systemd-run --quiet --collect --unit=sink python3 -c {shlex.quote(_SINK)}")
        wait_for(lambda at=host: at.run(f"ss -Hltn 'sport = :{SINK_PORT}' | grep -q LISTEN").rc == 0, 20)

    def send(way: tuple[dict[str, Any], dict[str, Any]]) -> str:
        source, sink = way
        done = hosts[source["member"]].run(f"python3 -c {shlex.quote(_SOURCE)} {source['address']} {sink['address']} {mib}")
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return f"{source['member']} {source['netdev']} to {sink['member']}: {last}" if done.rc else ""

    ways = [way for leg in legs(plan) for way in (leg, leg[::-1])]
    with ThreadPoolExecutor(len(ways)) as pool:
        return [trouble for trouble in pool.map(send, ways) if trouble]
