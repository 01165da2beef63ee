# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a kernel of one's own can prove: RDMA over the legs, kernel parameters with their effect, swap, memory, NFS and ZFS."""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[3]
GID_INDEX = 1  # of an IPv4 address on a soft-RoCE device; a ConnectX has it at 3
MIN_FREE_KBYTES = 65536
CUT, PEER = ("t1", "enp1s0f0np0"), ("t2", "enp1s0f1np1")

pytestmark = pytest.mark.fullkernel


def lab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, check=True, timeout=300)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


def boot_id(host: Host) -> str:
    """Tells one boot from another; empty while the host does not answer (a connection of the boot before ends after 30 s)."""
    try:
        return str(host.run("cat /proc/sys/kernel/random/boot_id").stdout.strip())
    except RuntimeError:
        return ""


def booted_since(host: Host, before: str) -> bool:
    return boot_id(host) not in ("", before)


def legs(plan: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(leg["ends"][0], leg["ends"][1]) for leg in plan["fabric"]["legs"]]


def gid(host: Host, hca: str, index: int) -> tuple[str, str, str]:
    """GID, type and device of an entry of a device's table."""
    port = f"/sys/class/infiniband/{hca}/ports/1"
    files = f"{port}/gids/{index} {port}/gid_attrs/types/{index} {port}/gid_attrs/ndevs/{index}"
    value, kind, netdev = host.check_output(f"cat {files}").splitlines()
    return value, kind, netdev


def pingpong(server: Host, client: Host, ends: tuple[dict[str, Any], dict[str, Any]], index: int) -> int:
    """Status of a client's verbs over one leg to a server that waits at its other end."""
    to, source = ends
    server.check_output(f"systemd-run --quiet --collect --unit=pingpong ibv_rc_pingpong -d {to['hca']} -g {index} -e -n 20")
    wait_for(lambda: server.run("ss -Hltn 'sport = :18515' | grep -q LISTEN").rc == 0, 20)
    status = client.run(f"timeout 30 ibv_rc_pingpong -d {source['hca']} -g {index} -e -n 20 {to['address']}").rc
    server.run("systemctl stop pingpong")
    return int(status)


def test_every_legs_address_is_in_the_gid_table_of_its_device(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    for ends in legs(plan):
        for end in ends:
            value, kind, netdev = gid(hosts[end["member"]], end["hca"], GID_INDEX)
            assert ipaddress.IPv6Address(value).ipv4_mapped == ipaddress.IPv4Address(end["address"])
            assert (kind, netdev) == ("RoCE v2", end["netdev"])


def test_verbs_cross_every_leg_with_that_gid(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    for ends in legs(plan):
        assert pingpong(hosts[ends[0]["member"]], hosts[ends[1]["member"]], ends, GID_INDEX) == 0, ends


def test_the_index_of_a_connectx_is_the_wrong_one_here(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    ends = legs(plan)[0]
    assert pingpong(hosts[ends[0]["member"]], hosts[ends[1]["member"]], ends, 3) != 0


def test_the_kernel_keeps_as_much_free_as_it_was_told(host: Host) -> None:
    assert host.check_output("cat /proc/sys/vm/min_free_kbytes") == str(MIN_FREE_KBYTES)
    pages = sum(int(number) for number in re.findall(r"^ +min +(\d+)$", host.check_output("cat /proc/zoneinfo"), re.MULTILINE))
    page_kib = int(host.check_output("getconf PAGESIZE")) // 1024
    assert pages * page_kib == pytest.approx(MIN_FREE_KBYTES, rel=0.01)


def test_swap_that_was_on_is_off(host: Host) -> None:
    # Of its activation an early journal does not always know.
    assert "Deactivated successfully" in host.check_output("journalctl --boot --unit=swap.img.swap")
    assert host.file("/swap.img").exists
    assert host.check_output("tail -n +2 /proc/swaps") == ""


def test_drop_caches_frees_what_it_says(host: Host) -> None:
    mib = 200

    def meminfo(key: str) -> int:
        return int(host.check_output(f"sed -n 's/^{key}: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo"))

    host.check_output(f"dd if=/dev/zero of=/root/cached bs=1M count={mib} conv=fsync status=none && cat /root/cached >/dev/null")
    cached, free = meminfo("Cached"), meminfo("MemFree")
    host.check_output("echo 3 >/proc/sys/vm/drop_caches")
    host.check_output("rm /root/cached")
    assert cached - meminfo("Cached") > 0.9 * mib * 1024
    assert meminfo("MemFree") - free > 0.9 * mib * 1024


def test_a_container_with_the_rdma_devices_may_lock_all_its_memory(host: Host) -> None:
    run = "podman run --rm --rootfs --network host --device /dev/infiniband --ulimit memlock=-1"
    output = host.check_output(f"{run} /:O bash -c 'ulimit -l; ibv_devinfo --list'")
    assert output.splitlines()[0] == "unlimited"
    assert "roceP2p1s0f1" in output


def test_a_service_over_its_limit_ends_as_oom_kill(host: Host) -> None:
    limits = "--property=MemoryMax=64M --property=MemorySwapMax=0"
    eat = "x = bytearray(512 << 20)"
    assert host.run(f"systemd-run --quiet --wait --unit=eater {limits} python3 -c '{eat}'").rc != 0
    assert host.check_output("systemctl show --property=Result --value eater") == "oom-kill"
    host.check_output("systemctl reset-failed eater")


def test_a_folder_is_served_by_nfs_over_a_leg(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    to, source = legs(plan)[0]
    server, client = hosts[to["member"]], hosts[source["member"]]
    server.check_output("mkdir -p /srv/models && head -c 10M /dev/urandom >/srv/models/weights")
    server.check_output(f"systemctl start nfs-server && exportfs -o ro,no_subtree_check,fsid=1 {source['address']}:/srv/models")
    try:
        client.check_output(f"mkdir -p /mnt/models && mount -t nfs4 -o ro,soft,timeo=100 {to['address']}:/srv/models /mnt/models")
        there, here = (host.check_output(f"sha256sum <{path}/weights") for host, path in ((server, "/srv/models"), (client, "/mnt/models")))
        assert there == here
        assert client.run("touch /mnt/models/new").rc != 0
    finally:
        client.run("umount /mnt/models")
        server.run("exportfs -ua; systemctl stop nfs-server")


def test_a_zfs_snapshot_goes_to_another_host_and_back_in_time(hosts: dict[str, Host]) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    ssh = f"ssh -F {cache}/gb10-cluster/labs/{os.environ['GB10_LAB']}/ssh_config"
    first, second = hosts["t1"], hosts["t2"]

    def send(what: str) -> None:
        pipe = f"set -o pipefail; {ssh} t1 zfs send {what} | {ssh} t2 zfs receive -F tank/models"
        subprocess.run(["bash", "-c", pipe], check=True, timeout=120)

    try:
        for host in (first, second):
            host.check_output("modprobe zfs && truncate -s 256M /root/tank.img && zpool create tank /root/tank.img")
        first.check_output("zfs create tank/models && head -c 20M /dev/urandom >/tank/models/a && zfs snapshot tank/models@1")
        send("tank/models@1")
        first.check_output("head -c 5M /dev/urandom >/tank/models/b && zfs snapshot tank/models@2")
        send("-i @1 tank/models@2")
        sums = "cd /tank/models && sha256sum a b"
        assert first.check_output(sums) == second.check_output(sums)
        second.check_output("zfs rollback -r tank/models@1")
        assert second.check_output("ls /tank/models") == "a"
    finally:
        for host in (first, second):
            host.run("zpool destroy tank; rm -f /root/tank.img")


def test_both_ends_of_a_pulled_cable_lose_the_carrier_and_keep_the_address(hosts: dict[str, Host]) -> None:
    def state(end: tuple[str, str]) -> tuple[bool, bool]:
        text = hosts[end[0]].check_output(f"ip address show {end[1]}")
        return "LOWER_UP" in text, "inet 10.10." in text

    lab("cut", *CUT)
    try:
        wait_for(lambda: state(CUT) == (False, True) and state(PEER) == (False, True))
    finally:
        lab("mend", *CUT)
    wait_for(lambda: state(CUT) == (True, True) and state(PEER) == (True, True))
    hosts["t1"].check_output("ping -n -c 1 -W 2 -M do -s 8972 -I enp1s0f0np0 10.10.0.2")


def test_a_power_cut_takes_the_carrier_from_the_neighbours_and_power_brings_it_back(hosts: dict[str, Host]) -> None:
    def carrier(name: str, netdev: str) -> bool:
        return "LOWER_UP" in hosts[name].check_output(f"ip link show {netdev}")

    lab("off", "t2")
    try:
        wait_for(lambda: not carrier("t1", "enp1s0f0np0") and not carrier("t3", "enp1s0f1np1"))
    finally:
        lab("on", "t2")
    wait_for(lambda: carrier("t1", "enp1s0f0np0") and carrier("t3", "enp1s0f1np1"))
    hosts["t1"].check_output("ping -n -c 1 -W 2 -I enp1s0f0np0 10.10.0.2")
    wait_for(lambda: boot_id(hosts["t2"]) != "")


def test_a_hung_host_answers_again_when_it_goes_on(hosts: dict[str, Host]) -> None:
    ping = "ping -n -c 1 -W 2 -I enp1s0f0np0 10.10.0.2"
    lab("hang", "t2")
    try:
        assert hosts["t1"].run(ping).rc != 0
    finally:
        lab("resume", "t2")
    wait_for(lambda: hosts["t1"].run(ping).rc == 0)


def test_a_reboot_keeps_all_of_the_fabric(plan: dict[str, Any], hosts: dict[str, Host], playbook: Any) -> None:
    before = {name: boot_id(host) for name, host in hosts.items()}
    for host in hosts.values():
        host.check_output("systemd-run --quiet --on-active=1 systemctl reboot")
    for name, host in hosts.items():
        wait_for(partial(booted_since, host, before[name]), 120)
        assert host.check_output("systemctl is-system-running --wait") == "running"
        assert host.check_output("tail -n +2 /proc/swaps") == ""
        assert host.check_output("cat /proc/sys/vm/min_free_kbytes") == str(MIN_FREE_KBYTES)
    test_every_legs_address_is_in_the_gid_table_of_its_device(plan, hosts)
    done = playbook("site", "--tags", "fabric")
    assert done.returncode == 0, done.stdout
    assert not re.search(r"changed=[1-9]", done.stdout), done.stdout
