# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab keeps its promises with full-kernel hosts too: `pytest tests/lab/test_uml_hosts.py` as root, in a lab of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.backend import State
from tests.lab.lab import Lab
from tests.lab.paths import REPOSITORY
from tests.lab.progress import LabError

NAME, HOSTS, KIND = "umltest", 2, "uml"
MOMENTS_S = (0.3, 4.0)  # of an `up`: while it makes network and disks; while the hosts boot
FIRST_LINE = "Linux version"  # of a kernel

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab is root's")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    os.environ["GB10_LAB"] = NAME
    lab = Lab()
    lab.down()
    lab.up(HOSTS, KIND)
    yield lab
    lab.down()


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def boots(lab: Lab, host: str) -> int:
    return lab.backend.console(lab.host(host)).read_text(errors="replace").count(FIRST_LINE)


def sh(lab: Lab, host: str, command: str) -> str:
    return lab.backend.exec(lab.host(host), ["sh", "-c", command], capture=True).stdout.strip()


def test_every_host_has_a_kernel_of_its_own(lab: Lab) -> None:
    assert len({sh(lab, host.name, "cat /proc/sys/kernel/random/boot_id") for host in lab.topology().hosts}) == HOSTS
    assert sh(lab, "t1", "uname -r") != os.uname().release


def test_a_second_up_leaves_running_hosts_alone(lab: Lab) -> None:
    before = boots(lab, "t1")
    lab.up(HOSTS, KIND)
    assert boots(lab, "t1") == before


def test_a_power_cut_keeps_disk_and_console(lab: Lab) -> None:
    before = boots(lab, "t2")
    sh(lab, "t2", "echo kept >/root/file; sync")
    lab.power_off("t2")
    assert lab.backend.state(lab.host("t2")) is State.OFF
    with pytest.raises(LabError, match="t2 is off"):
        sh(lab, "t2", "true")
    lab.power_on("t2")
    assert sh(lab, "t2", "cat /root/file") == "kept"
    assert boots(lab, "t2") == before + 1


def test_a_host_that_goes_off_by_itself_takes_its_legs_along(lab: Lab) -> None:
    # A moment later: going off takes the connection of the command along.
    lab.backend.exec(lab.host("t2"), ["systemd-run", "--quiet", "--on-active=1", "systemctl", "poweroff"])
    until(lambda: lab.backend.state(lab.host("t2")) is State.OFF)
    assert not any("LOWER_UP" in link["flags"] for link in lab.backend.links(lab.host("t1")) if link["ifname"].startswith("en"))
    lab.power_on("t2")
    until(lambda: any("LOWER_UP" in link["flags"] for link in lab.backend.links(lab.host("t1")) if link["ifname"] == "enp1s0f0np0"))


def test_a_hung_host_is_said_to_hang(lab: Lab) -> None:
    lab.backend.hang(lab.host("t2"))
    assert lab.backend.state(lab.host("t2")) is State.HUNG
    with pytest.raises(LabError, match="t2 hangs"):
        sh(lab, "t2", "true")
    lab.backend.resume(lab.host("t2"))
    assert lab.backend.state(lab.host("t2")) is State.RUNNING


@pytest.mark.parametrize("moment", MOMENTS_S)
def test_a_stopped_up_is_taken_over(lab: Lab, moment: float) -> None:
    lab.down()
    command = [sys.executable, "-m", "tests.lab", "up", "--backend", KIND, "--hosts", str(HOSTS)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    lab.up(HOSTS, KIND)
    assert all(lab.backend.state(host).booted for host in lab.topology().hosts)


def test_down_leaves_nothing_whatever_was_going_on(lab: Lab) -> None:
    lab.backend.hang(lab.host("t1"))
    lab.power_off("t2")
    lab.down()
    assert lab.leftovers() == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if f"labs/{NAME}".encode() in command]
    assert f"labs/{NAME}" not in Path("/proc/mounts").read_text()
    with pytest.raises(LabError, match="not up"):
        lab.topology()
