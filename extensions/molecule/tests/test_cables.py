# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cables in wrong cages, by moving the ends of the lab's cables between its hosts: `cable_check` names the plug to move."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from testinfra.host import Host

from tests.lab.topology import PORTS

pytestmark = pytest.mark.fabric_faults


def ip(member: str, *arguments: str) -> None:
    subprocess.run(["ip", "-n", namespace(member), *arguments], check=True, timeout=30)


def namespace(member: str) -> str:
    return f"gb10-{os.environ.get('GB10_LAB', 'lab')}-{member}"


def exchange(one: str, other: str) -> None:
    """What is plugged in at one member.cage and at the other, both halves."""
    (here, cage), (there, far_cage) = (place.split(".") for place in (one, other))
    for half in "AB":
        device, far_device = PORTS[int(cage), half][0], PORTS[int(far_cage), half][0]
        ip(here, "link", "set", device, "name", "plug")
        ip(there, "link", "set", far_device, "netns", namespace(here), "name", device)
        ip(here, "link", "set", "plug", "netns", namespace(there), "name", far_device)
        ip(here, "link", "set", device, "up")
        ip(there, "link", "set", far_device, "up")


@contextmanager
def swapped(one: str, other: str) -> Iterator[None]:
    exchange(one, other)
    try:
        yield
    finally:
        exchange(one, other)


def cables(playbook: Any, status: int) -> str:
    """What the check says, on one line."""
    done = playbook("gate", "--tags", "cables")
    assert (done.returncode != 0) == bool(status), done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_cables_as_planned(playbook: Any) -> None:
    assert "changed=0" in cables(playbook, 0)


def test_the_swapped_plugs_of_a_member_are_named_exactly(playbook: Any) -> None:
    with swapped("t2.0", "t2.1"):
        said = cables(playbook, 2)
    assert "swap the two plugs of t2 (or keep them so and set cluster_cables to" in said
    assert "cage 0 of t1 is cabled to cage 0 of t2 instead of cage 1 of t2" in said


def test_plugs_swapped_between_members_are_named_exactly(playbook: Any) -> None:
    with swapped("t1.0", "t3.0"):
        said = cables(playbook, 2)
    assert (
        "swap the plugs in cage 1 of t1 and cage 1 of t2, since" in said or "swap the plugs in cage 0 of t1 and cage 0 of t3, since" in said
    )


def test_a_port_that_is_down_is_raised_for_the_check_alone(playbook: Any, hosts: dict[str, Host]) -> None:
    device = PORTS[0, "A"][0]
    hosts["t1"].check_output(f"ip link set {device} down")
    cables(playbook, 0)
    assert "UP" not in hosts["t1"].check_output(f"ip -br link show {device}").split("<")[1]
    hosts["t1"].check_output(f"ip link set {device} up")


def test_an_absent_cable_is_told_from_a_wrong_one(playbook: Any) -> None:
    """One end is administratively down, in a host that did not take part: what both ends of a pulled cable see."""
    for half in "AB":
        ip("t1", "link", "set", PORTS[0, half][0], "netns", namespace("ctl"), "name", f"pulled{half}")
    try:
        said = cables(playbook, 2)
    finally:
        for half in "AB":
            ip("ctl", "link", "set", f"pulled{half}", "netns", namespace("t1"), "name", PORTS[0, half][0])
            ip("t1", "link", "set", PORTS[0, half][0], "up")
    assert f"half A of cage 0 of t1 ({PORTS[0, 'A'][0]}) does not exist" in said
    assert "cage 1 of t2 has no carrier, the plan has cage 0 of t1 there" in said


def test_nothing_left_by_management(playbook: Any, hosts: dict[str, Host]) -> None:
    """No frame of the check's EtherType is sent there."""
    listen = "import socket,sys; s=socket.socket(socket.AF_PACKET,socket.SOCK_RAW,socket.htons(3)); s.bind(('mgmt0',0)); s.settimeout(20)"
    listen += "\nwhile True:\n f=s.recv(9999)\n print('beacon' if f[12:14]==b'\\x88\\xb5' else 'other', flush=True)"
    command = ["nsenter", f"--net=/run/netns/{namespace('t1')}", "python3", "-c", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sniffer:
        cables(playbook, 0)
        sniffer.terminate()
        heard = sniffer.communicate(timeout=30)[0].split()
    assert "other" in heard and "beacon" not in heard


def test_the_role_addresses_the_moved_devices_again(playbook: Any) -> None:
    assert playbook("site", "--tags", "fabric").returncode == 0
