# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab keeps its promises, on real hosts: `pytest tests/lab/test_hosts.py` as root, in a lab of its own, in about a minute."""

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
from tests.lab.overlay import SYSFS_ROOT
from tests.lab.paths import REPOSITORY
from tests.lab.progress import LabError

NAME = "selftest"
MOMENTS_S = (0.15, 0.3, 0.5, 0.8, 1.3)  # of an `up`: while it makes the network, keys, disks; while the hosts boot
LEG, PEER = ("t1", "enp1s0f0np0"), ("t2", "enp1s0f1np1")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab is root's")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    os.environ["GB10_LAB"] = NAME
    lab = Lab()
    lab.down()
    lab.up(3)
    yield lab
    lab.down()


@pytest.fixture
def sh(lab: Lab) -> Callable[..., str]:
    """Run a shell command inside a host."""

    def run(host: str, command: str, fails: bool = False) -> str:
        done = lab.backend.exec(lab.host(host), ["sh", "-c", command], capture=True)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout.strip()

    return run


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def carrier(lab: Lab, host: str, netdev: str) -> bool:
    return any(link["ifname"] == netdev and "LOWER_UP" in link["flags"] for link in lab.network.links(host))


def ssh(lab: Lab, host: str, command: str) -> str:
    argv = ["ssh", "-F", str(lab.state / "ssh_config"), host, command]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def up_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.lab", "up"], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_hosts_answer_over_ssh_from_this_namespace(lab: Lab) -> None:
    assert [ssh(lab, host.address, "hostname") for host in lab.topology().hosts] == ["t1", "t2", "t3"]


def test_a_second_up_leaves_running_hosts_alone(lab: Lab, sh: Callable[..., str]) -> None:
    boots = [sh(host, "cat /proc/sys/kernel/random/boot_id") for host in ("t1", "t2", "t3")]
    lab.up(3)
    assert [sh(host, "cat /proc/sys/kernel/random/boot_id") for host in ("t1", "t2", "t3")] == boots
    assert len(set(boots)) == 3


def test_no_namespace_has_a_way_out(lab: Lab) -> None:
    for name in lab.network.existing():
        for address in ("192.0.2.1", "2001:db8::1"):  # documentation addresses: asked about, never sent to
            route = subprocess.run(lab.network.enter(name, ["ip", "route", "get", address]), check=False, capture_output=True, timeout=30)
            assert route.returncode != 0


def test_netplan_addresses_a_leg_and_the_gid_table_follows(lab: Lab, sh: Callable[..., str]) -> None:
    for (host, netdev), address in ((LEG, "10.10.0.1/30"), (PEER, "10.10.0.2/30")):
        leg = f"{{mtu: 9000, addresses: [{address}], ignore-carrier: true}}"
        plan = f"network: {{version: 2, renderer: networkd, ethernets: {{{netdev}: {leg}}}}}"
        sh(host, f"umask 077; echo '{plan}' > /etc/netplan/60-test.yaml; netplan apply")
    until(lambda: lab.backend.exec(lab.host("t2"), ["ping", "-c1", "-W1", "-Mdo", "-s8972", "10.10.0.1"], capture=True).returncode == 0)
    gid = f"{SYSFS_ROOT}/class/infiniband/rocep1s0f0/ports/1"
    until(lambda: sh("t1", f"cat {gid}/gids/3") == "0000:0000:0000:0000:0000:ffff:0a0a:0001")
    assert sh("t1", f"cat {gid}/gid_attrs/types/3") == "RoCE v2"
    assert sh("t1", f"ls {SYSFS_ROOT}/class/infiniband/rocep1s0f0/device/net") == "enp1s0f0np0"


def test_a_cut_leg_costs_its_peer_the_carrier(lab: Lab, sh: Callable[..., str]) -> None:
    state = f"cat {SYSFS_ROOT}/class/infiniband/rocep1s0f1/ports/1/state"
    lab.set_leg(*LEG, up=False)
    assert not carrier(lab, *PEER)
    until(lambda: sh("t2", state) == "1: DOWN")
    lab.set_leg(*LEG, up=True)
    until(lambda: carrier(lab, *PEER) and sh("t2", state) == "4: ACTIVE")


def test_a_reboot_from_inside_is_a_new_boot_with_the_same_disk(lab: Lab, sh: Callable[..., str]) -> None:
    before = sh("t3", "echo kept > /root/file; cat /proc/sys/kernel/random/boot_id")
    lab.backend.exec(lab.host("t3"), ["systemctl", "reboot"])

    def rebooted() -> bool:
        try:
            return sh("t3", "cat /proc/sys/kernel/random/boot_id") != before
        except (LabError, AssertionError):
            return False

    until(rebooted)
    lab.backend.wait([lab.host("t3")])
    assert sh("t3", "cat /root/file") == "kept"


def test_a_power_cut_takes_the_carrier_and_keeps_the_disk(lab: Lab, sh: Callable[..., str]) -> None:
    sh("t2", "echo kept > /root/file")
    lab.power_off("t2")
    assert lab.backend.state(lab.host("t2")) is State.OFF
    assert not carrier(lab, *LEG)
    with pytest.raises(LabError, match="t2 is off"):
        sh("t2", "true")
    lab.power_on("t2")
    assert sh("t2", "cat /root/file") == "kept"
    until(lambda: carrier(lab, *LEG))


def test_a_hung_host_keeps_its_carrier_and_goes_on_where_it_was(lab: Lab, sh: Callable[..., str]) -> None:
    boot = sh("t2", "cat /proc/sys/kernel/random/boot_id")
    lab.backend.hang(lab.host("t2"))
    assert lab.backend.state(lab.host("t2")) is State.HUNG
    assert carrier(lab, *LEG)
    with pytest.raises(LabError, match="t2 hangs"):
        sh("t2", "true")
    lab.backend.resume(lab.host("t2"))
    assert sh("t2", "cat /proc/sys/kernel/random/boot_id") == boot


def test_a_memory_limit_is_enforced(sh: Callable[..., str]) -> None:
    ask = "/usr/bin/python3 -c 'bytearray(200 << 20)'"
    sh("t1", f"systemd-run --quiet --wait --collect -p MemoryMax=400M {ask}")
    sh("t1", f"systemd-run --quiet --wait --collect -p MemoryMax=50M {ask}", fails=True)


def test_machine_wide_settings_stay_a_hosts_own(sh: Callable[..., str]) -> None:
    machine = Path("/proc/sys/vm/swappiness").read_text()
    sh("t1", "sysctl -q -w vm.swappiness=7")
    assert sh("t1", "sysctl -n vm.swappiness") == "7"
    assert sh("t2", "sysctl -n vm.swappiness") == machine.strip()
    assert Path("/proc/sys/vm/swappiness").read_text() == machine
    sh("t1", "sysctl -q -w net.ipv4.ip_forward=1")  # a namespace's own: real
    assert sh("t1", "cat /proc/sys/net/ipv4/ip_forward") == "1"


def test_a_full_disk_is_full(lab: Lab, sh: Callable[..., str]) -> None:
    lab.fill("t1", leave_mib=4)
    sh("t1", "dd if=/dev/zero of=/root/big bs=1M count=16", fails=True)
    lab.drain("t1")
    sh("t1", "dd if=/dev/zero of=/root/big bs=1M count=16")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_up_is_taken_over(lab: Lab, how: signal.Signals) -> None:
    for moment in MOMENTS_S:
        lab.down()
        process = up_process()
        time.sleep(moment)
        process.send_signal(how)
        process.wait(timeout=30)
        lab.up(3)
        assert all(lab.backend.state(host).booted for host in lab.topology().hosts)


def test_down_leaves_nothing_whatever_was_going_on(lab: Lab) -> None:
    ssh(lab, "t1", "true")  # leaves a shared connection behind
    busy = subprocess.Popen([sys.executable, "-m", "tests.lab", "run", "--", "sleep", "600"], cwd=REPOSITORY)
    until(lambda: busy.pid in lab.network.processes("ctl"))
    lab.backend.hang(lab.host("t2"))
    lab.power_off("t3")
    lab.down()
    assert busy.wait(timeout=10) == -signal.SIGTERM
    assert lab.leftovers() == []
    everything = Path("/proc/mounts").read_text() + Path("/proc/self/mountinfo").read_text()
    assert f"gb10-{NAME}" not in everything
    assert f"labs/{NAME}" not in everything
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if f"labs/{NAME}".encode() in command]
    with pytest.raises(LabError, match="not up"):
        lab.topology()
