# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A group in containers of a real Docker: what a rank gets, what ends it, and what an earlier life, the daemon or another store leaves."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _image, _units
from testinfra.host import Host

from extensions.molecule.tests.conftest import Playbook
from extensions.molecule.tests.group_hosts import START_S, UNIT, all_serve, phase, state
from extensions.molecule.tests.lab_hosts import wait_for
from tests.lab.paths import lab_name, state_directory

CONTAINER = "gb10-lab"
RANK_FILE = "/etc/gb10/lab/rank.json"
DAEMON_FILE = "/etc/docker/daemon.json"

pytestmark = pytest.mark.docker

# What a container sees of what it was given, and the same container but for its name, a device and this program.
SEEN = """
import json, os, resource
size = os.statvfs("/dev/shm")
print(json.dumps({
    "devices": sorted(os.listdir("/dev/infiniband")), "read": os.read(os.open("/dev/infiniband/uverbs0", os.O_RDONLY), 2).hex(),
    "shm_mib": size.f_blocks * size.f_frsize >> 20, "adjusted": int(open("/proc/self/oom_score_adj").read()),
    "key": "VLLM_API_KEY" in os.environ, "network": sorted(os.listdir("/sys/class/net")),
}))
"""
LIKE_A_RANK = f"""
import dataclasses, os, pathlib, sys
sys.path.insert(0, "{_units.NODE_PACKAGE}")
from gb10_node import config, engine
rank = config.load("lab")
container = dataclasses.replace(rank.container, name="look", devices=("/dev/infiniband",), command=("python3", "-c", {SEEN!r}))
rank = dataclasses.replace(rank, container=container)
engine.write_environment(rank, pathlib.Path("/run/look.env"), {{}})
words = engine.run_arguments(rank, pathlib.Path("/run/look.env"))
os.execvp(words[0], words)
"""


def inspected(host: Host) -> dict[str, Any]:
    """The rank's container, as its engine describes it."""
    content: dict[str, Any] = json.loads(host.check_output(f"docker inspect {CONTAINER}"))[0]
    return content


def image(host: Host, reference: str) -> _image.Image:
    """The image of this name on a host."""
    return _image.described(json.loads(host.check_output("docker image inspect %s", reference))[0])


def ended(hosts: dict[str, Host], words: str) -> bool:
    """Whether every rank knows that the group ended for a reason with these words."""
    return all(words in str((state(host).get("failure") or {}).get("reason")) for host in hosts.values())


def forgive(hosts: dict[str, Host]) -> None:
    """Let the next failure be the first, for the group and for systemd's limit of starts."""
    for host in hosts.values():
        host.check_output(f"rm -f {_units.failures_file('lab')} && systemctl reset-failed {UNIT}")


def test_there_is_docker_alone(host: Host) -> None:
    driver, version = host.check_output("docker info --format '{{.Driver}} {{.ServerVersion}}'").split()
    assert driver == "overlay2" and int(version.partition(".")[0]) >= 26
    assert not host.exists("podman")


def test_every_member_has_the_archives_image_and_runs_it(hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    wanted = _image.archive_of(str(state_directory(lab_name()) / "assets/engine.tar")).content
    for host in hosts.values():
        found = image(host, plan["image"]["reference"])
        assert found.content == wanted
        assert _image.plain_id(inspected(host)["Image"]) == found.id


def test_a_rank_has_the_limits_of_its_plan(host: Host, plan: dict[str, Any]) -> None:
    planned = plan["members"][host.member]["rank_config"]["container"]
    shown = inspected(host)
    given = shown["HostConfig"]
    assert given["Memory"] == planned["memory_mib"] << 20 and given["ShmSize"] == planned["shm_mib"] << 20
    assert given["OomScoreAdj"] == planned["oom_score_adj"] and given["NetworkMode"] == "host"
    assert given["LogConfig"]["Type"] == "none"  # the journal has it
    group = host.check_output(f"sed -n 's/^[0-9]*:memory://p' /proc/{shown['State']['Pid']}/cgroup")
    assert int(host.check_output(f"cat /sys/fs/cgroup/memory{group}/memory.limit_in_bytes")) == given["Memory"]


def test_a_container_like_a_ranks_gets_the_folder_of_devices(host: Host, plan: dict[str, Any]) -> None:
    """The hosts have no RDMA devices: what lies in their place is read zeros."""
    planned = plan["members"][host.member]["rank_config"]["container"]
    host.check_output(
        "mkdir -p /dev/infiniband && cd /dev/infiniband && for at in uverbs0 rdma_cm; do test -e $at || mknod $at c 1 5; done"
    )
    done = host.run("python3 -c %s", LIKE_A_RANK)
    host.check_output("docker rm --force look && rm -r /dev/infiniband /run/look.env")
    assert done.rc == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["devices"] == ["rdma_cm", "uverbs0"] and seen["read"] == "0000"
    assert (seen["shm_mib"], seen["adjusted"]) == (planned["shm_mib"], planned["oom_score_adj"])
    assert seen["key"] == (host.member == "t1") and {"mgmt0", "enp1s0f0np0"} <= set(seen["network"])


def test_the_key_is_in_no_command_line(hosts: dict[str, Host]) -> None:
    key = hosts["t1"].check_output("cat /etc/gb10/lab/api-key")
    for host in hosts.values():
        shown = inspected(host)
        assert key not in json.dumps([shown["Path"], shown["Args"], shown["Config"]["Cmd"], shown["Config"]["Labels"]])
        assert key not in host.check_output("ps -ww -eo args; journalctl --no-pager -u docker -u containerd -u gb10-rank@lab")
        assert host.file("/run/gb10/lab/rank.env").mode == 0o600
    assert f"VLLM_API_KEY={key}" in inspected(hosts["t1"])["Config"]["Env"]
    assert not any(name.startswith("VLLM_API_KEY=") for name in inspected(hosts["t2"])["Config"]["Env"])


def test_a_killed_rank_ends_the_group_and_it_comes_back_by_itself(hosts: dict[str, Host]) -> None:
    forgive(hosts)
    hosts["t3"].check_output(f"docker kill {CONTAINER}")
    wait_for(lambda: ended(hosts, "rank 2 on t3 exited with status 137"), 60)
    wait_for(lambda: all_serve(hosts), START_S)
    assert not any("No such container" in host.check_output(f"journalctl --no-pager --unit {UNIT}") for host in hosts.values())


def test_a_rank_over_its_memory_limit_is_said_to_be(playbook: Playbook, hosts: dict[str, Host]) -> None:
    forgive(hosts)
    config = json.loads(hosts["t2"].check_output(f"cat {RANK_FILE}"))
    config["container"]["memory_mib"] = 300
    hosts["t2"].check_output(f"cp --preserve {RANK_FILE} /root/kept && printf %s {shlex.quote(json.dumps(config))} > {RANK_FILE}")
    try:
        hosts["t2"].check_output(f"systemctl restart {UNIT}")
        wait_for(lambda: ended(hosts, "it went over its memory limit of 300 MiB"), START_S)
        assert playbook("stop").returncode == 0
    finally:
        hosts["t2"].check_output(f"mv /root/kept {RANK_FILE}")


def test_a_stop_leaves_no_container_and_a_start_goes_over_those_of_earlier_lives(
    playbook: Playbook, hosts: dict[str, Host], plan: dict[str, Any]
) -> None:
    """One that was created, one that runs, and one that is frozen."""
    assert {host.check_output("docker ps --all --quiet") for host in hosts.values()} == {""}
    left = f"--name {CONTAINER} --entrypoint sleep {plan['image']['reference']} 4711"
    hosts["t1"].check_output(f"docker create {left}")
    hosts["t2"].check_output(f"docker run --detach {left}")
    hosts["t3"].check_output(f"docker run --detach {left} && docker pause {CONTAINER}")
    done = playbook("start")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts)
    assert {host.run("pgrep --full --exact 'sleep 4711'").rc for host in hosts.values()} == {1}


def test_a_member_with_dockers_other_store_has_the_same_image_by_another_id(
    playbook: Playbook, hosts: dict[str, Host], plan: dict[str, Any]
) -> None:
    """containerd's, which names an image by its manifest and is sent archives whole."""
    assert playbook("stop").returncode == 0
    settings = json.loads(hosts["t3"].check_output(f"cat {DAEMON_FILE}")) | {"features": {"containerd-snapshotter": True}}
    hosts["t3"].check_output(f"printf %s {shlex.quote(json.dumps(settings))} > {DAEMON_FILE} && systemctl restart docker")
    assert "containerd.snapshotter" in hosts["t3"].check_output("docker info --format '{{json .DriverStatus}}'")
    done = playbook("site")
    assert done.returncode == 0, done.stdout
    images = [image(host, plan["image"]["reference"]) for host in hosts.values()]
    assert len({each.content for each in images}) == 1 and images[0].id == images[1].id != images[2].id
    assert all_serve(hosts)
    again = playbook("site")
    assert again.returncode == 0 and "changed=0" in again.stdout and "changed=1" not in again.stdout, again.stdout


@pytest.mark.parametrize("how", ["systemctl restart docker", "systemctl kill --signal=KILL docker"])
def test_a_daemon_that_ends_takes_the_group_along_and_it_comes_back_by_itself(hosts: dict[str, Host], how: str) -> None:
    """Killed, it leaves the containers running, and its next life ends them."""
    forgive(hosts)
    before = inspected(hosts["t2"])["Id"]
    hosts["t2"].check_output(how)
    wait_for(lambda: ended(hosts, "rank 1 on t2"), 120)
    wait_for(lambda: all_serve(hosts), START_S)
    assert hosts["t2"].check_output("docker ps --all --quiet --no-trunc") == inspected(hosts["t2"])["Id"] != before


def test_a_rebooted_host_brings_the_group_back(hosts: dict[str, Host]) -> None:
    hosts["t2"].check_output("systemd-run --quiet --on-active=1 systemctl reboot")
    wait_for(lambda: phase(hosts["t1"]) not in ("serving", ""), 120)
    wait_for(lambda: all_serve(hosts), START_S)
