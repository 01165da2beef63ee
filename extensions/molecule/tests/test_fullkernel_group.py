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

from extensions.molecule.tests.kernel_hosts import GID_INDEX, gid, legs, reboot
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
