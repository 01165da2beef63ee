# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only a kernel of one's own can prove of a host: RDMA, kernel parameters with their effect, swap, memory, NFS and ZFS."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.kernel_hosts import GID_INDEX, gid, legs
from extensions.molecule.tests.lab_hosts import wait_for
from tests.lab.paths import lab_name, state_directory

MIN_FREE_KBYTES = 65536

pytestmark = pytest.mark.fullkernel


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
            assert gid(hosts[end["member"]], end["hca"], GID_INDEX) == (end["address"], "RoCE v2", end["netdev"])


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
    ssh = f"ssh -F {state_directory(lab_name())}/ssh_config"
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
