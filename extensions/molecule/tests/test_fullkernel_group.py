# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A group that serves on full-kernel hosts: its limits are the kernel's, and memory and reboots are real."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import BY_ITSELF, ONE_COMMAND, phase, recovery
from extensions.molecule.tests.kernel_hosts import GID_INDEX, gid, legs, meminfo, reboot, stranger
from extensions.molecule.tests.lab_hosts import wait_for

# What the other lab proves of a converged group holds here as well.
from extensions.molecule.tests.test_converged import (  # noqa: F401  # pylint: disable=unused-import
    UNIT,
    state,
    test_only_the_key_opens_the_endpoint,
    test_the_checkpoint_is_the_same_everywhere,
    test_the_key_is_only_where_it_must_be,
    test_the_rank_serves_and_comes_back_after_a_boot,
    test_the_same_image_runs_everywhere,
    test_workers_started_before_the_head,
)

START_S = 600
CONTAINER = "gb10-lab"
KILLED_FOR_MEMORY = "fe6faa94e7774663a0da52717891d8ef"  # sd-messages.h: SD_MESSAGE_UNIT_OUT_OF_MEMORY
# In the rank's control group, and safe from the kernel's choice, so that the engine is what goes.
EAT = """
echo $$ >/sys/fs/cgroup{group}/cgroup.procs
echo -1000 >/proc/self/oom_score_adj
exec timeout 60 python3 -c 'import time; x = bytearray({mib} << 20); time.sleep(60)'
"""
START_FREE_MIB = 2048  # of the inventory
LEFT_MIB = 128
"""What a stranger leaves available: below the profile's floor, and above what the kernel kills for."""

pytestmark = pytest.mark.fullkernel


def serves(host: Host) -> bool:
    try:
        return bool(state(host)["phase"] == "serving")
    except (AssertionError, ValueError, RuntimeError):  # just booted, or about to
        return False


def all_serve(hosts: dict[str, Host]) -> bool:
    return all(serves(host) for host in hosts.values())


def control_group(host: Host) -> str:
    """The container's control group, by its first process."""
    return host.check_output(f"cat /proc/$(podman inspect --format '{{{{.State.Pid}}}}' {CONTAINER})/cgroup").removeprefix("0::")


def kills_for_memory(host: Host) -> str:
    """What the kernel has killed since the boot for want of memory."""
    return host.run("journalctl --boot --dmesg --output=cat --grep=oom-kill:").stdout


def ended_by_its_guard(host: Host) -> bool:
    """Whether the guard has ended the host's rank, in order."""
    return phase(host) == "stopped" and "rank told to stop" in host.run("cat /run/gb10/lab/guard.json").stdout


def test_a_rank_has_the_rdma_devices_and_may_lock_all_its_memory(host: Host) -> None:
    limits = host.check_output(f"podman exec {CONTAINER} cat /proc/1/limits")
    assert re.search(r"^Max locked memory +unlimited +unlimited ", limits, re.MULTILINE)
    devices = host.check_output(f"podman exec {CONTAINER} ls /dev/infiniband").split()
    assert {"uverbs0", "uverbs1", "uverbs2", "uverbs3"} <= set(devices)


def test_a_rank_has_the_memory_limit_of_its_profile(host: Host, plan: dict[str, Any]) -> None:
    limit = int(host.check_output(f"cat /sys/fs/cgroup{control_group(host)}/memory.max"))
    assert limit == plan["members"][host.member]["rank_config"]["container"]["memory_mib"] << 20


def test_a_rank_over_its_memory_limit_is_killed_and_ends_the_group_and_status_says_why(
    hosts: dict[str, Host], plan: dict[str, Any], playbook: Callable[..., Any]
) -> None:
    group = control_group(hosts["t2"])
    eat = EAT.format(group=group, mib=plan["members"]["t2"]["rank_config"]["container"]["memory_mib"] - 128)
    hosts["t2"].check_output(f"setsid --fork sh -c {shlex.quote(eat)} >/dev/null 2>&1")
    wait_for(lambda: state(hosts["t1"])["phase"] != "serving" and state(hosts["t3"])["phase"] != "serving")
    status = " ".join(playbook("status").stdout.split())
    assert "not serving" in status
    assert re.search(r"last failure: rank 1 on t2 exited with status \d+: it went over its memory limit of 2048 MiB ->", status), status
    kernel = hosts["t2"].check_output("journalctl --boot --dmesg --output=cat --grep=oom-kill:")
    assert f"task_memcg={group},task=vllm," in kernel
    systemd = hosts["t2"].check_output(f"journalctl --boot --output=json MESSAGE_ID={KILLED_FOR_MEMORY}")
    assert group.split("/")[2] in {json.loads(line)["UNIT"] for line in systemd.splitlines()}
    wait_for(lambda: all_serve(hosts), START_S)


def test_memory_that_a_stranger_takes_ends_the_group_at_the_floor_and_a_start_names_it(
    hosts: dict[str, Host], plan: dict[str, Any], playbook: Callable[..., Any]
) -> None:
    short, killed = hosts["t2"], kills_for_memory(hosts["t2"])
    with stranger(short, LEFT_MIB):
        wait_for(lambda: ended_by_its_guard(short) and phase(hosts["t1"]) == phase(hosts["t3"]) == "waiting")
        status = " ".join(playbook("status").stdout.split())
        floor = plan["members"]["t2"]["rank_config"]["guard"]["floor_mib"]
        told = rf"memory guard: rank told to stop, MemFree \d+ MiB, .* below the floor of {floor} MiB available -> free memory, then ansible-playbook \S+start"
        assert re.search(told, status), status
        assert "last failure: rank 1 on t2 was stopped" in status
        done = playbook("start")
        refused = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert re.search(
        r"rank 1 on t2 cannot start: .*, but a start needs 2\.0 free: stop what holds the memory \(GiB: python3 \(pid \d+\) ", refused
    )
    assert kills_for_memory(short) == killed
    assert short.check_output("systemctl show --property=Result --value gb10-guard@lab gb10-rank@lab").split() == ["success"] * 2
    with recovery("memory taken by a stranger until the guard's floor", ONE_COMMAND):
        assert playbook("start").returncode == 0
    assert all_serve(hosts)
    assert "memory guard:" not in playbook("status").stdout


def test_page_cache_that_fills_a_members_memory_does_not_hinder_a_start(hosts: dict[str, Host], playbook: Callable[..., Any]) -> None:
    assert playbook("stop").returncode == 0
    full, cached = hosts["t3"], "/var/tmp/cached"
    full.check_output(f"head -c 1500M /dev/zero >{cached} && cat {cached} >/dev/null")
    try:
        before = meminfo(full)
        assert before["MemFree"] < START_FREE_MIB < before["MemAvailable"]
        with recovery("page cache full before a start", ONE_COMMAND):
            done = playbook("start")
            assert done.returncode == 0, done.stdout
    finally:
        full.check_output(f"rm {cached}")
    assert all_serve(hosts)
    assert state(full)["checks"]["mem_free_mib"] >= START_FREE_MIB


def test_a_guard_that_has_ended_a_group_ends_the_next_one_which_comes_back_by_itself_once_memory_is_free(
    hosts: dict[str, Host], playbook: Callable[..., Any]
) -> None:
    """Where the units start it, as after a boot: nobody stops a group that is refused, and it tries again."""
    short = hosts["t2"]
    with stranger(short, LEFT_MIB):
        wait_for(lambda: ended_by_its_guard(short))
        short.check_output(f"systemctl start --no-block {UNIT}")
        wait_for(lambda: "needs 2.0 free: stop what holds the memory (GiB: python3" in str(state(hosts["t1"])["failure"]))
    with recovery("memory taken by a stranger before a start, and given back", BY_ITSELF):
        wait_for(lambda: all_serve(hosts), START_S)
    assert "memory guard:" not in playbook("status").stdout


def test_a_reboot_of_every_machine_keeps_the_fabric_and_brings_the_group_back_by_itself(
    hosts: dict[str, Host], plan: dict[str, Any], playbook: Callable[..., Any]
) -> None:
    reboot(*hosts.values())
    for host in hosts.values():
        assert host.check_output("tail -n +2 /proc/swaps") == ""
        assert host.check_output("cat /proc/sys/vm/min_free_kbytes") == "65536"
    for ends in legs(plan):
        for end in ends:
            assert gid(hosts[end["member"]], end["hca"], GID_INDEX) == (end["address"], "RoCE v2", end["netdev"])
    wait_for(lambda: all_serve(hosts), START_S)
    done = playbook("site")
    assert done.returncode == 0, done.stdout
    assert not re.search(r"changed=[1-9]", done.stdout), done.stdout
