# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input on a serving cluster: one sentence with cause and cure, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

FOLDERS = "/etc/netplan /etc/sysctl.d /etc/gb10 /etc/systemd/system /usr/local/lib/gb10"
# A rank's state without the canary's last token, which comes and goes.
STATE = r"""sed 's/"canary": {[^}]*}//' /run/gb10/lab/state.json"""
WATCHED = f"find {FOLDERS} -type f | sort | xargs stat -c '%n %Y %s'; {STATE}"


@pytest.fixture(autouse=True)
def unchanged(hosts: dict[str, Host]) -> Iterator[None]:
    """Each test here must leave every host's files and running rank as they are."""
    before = {name: host.check_output(WATCHED) for name, host in hosts.items()}
    yield
    assert {name: host.check_output(WATCHED) for name, host in hosts.items()} == before


def refused(done: Any, *words: str) -> None:
    """The run failed, changed nothing, and says all the words."""
    assert done.returncode != 0, done.stdout
    assert not re.search(r"changed=[1-9]", done.stdout), done.stdout
    flat = " ".join(done.stdout.split())
    for word in words:
        assert word in flat, f"{word!r} is not in:\n{done.stdout}\n{done.stderr}"


def test_a_pool_over_the_management_network(playbook: Any) -> None:
    refused(playbook("site", "-e", "cluster_leg_pool=10.99.0.0/16"), "cluster_leg_pool", "overlaps", "10.99.0.0/24")


def test_a_network_that_a_host_already_has(playbook: Any, hosts: dict[str, Host]) -> None:
    hosts["t3"].check_output(
        "ip link add other0 type veth peer name other1 && ip addr add 10.10.4.200/24 dev other0 && ip link set other0 up"
    )
    try:
        refused(playbook("site"), "other0 already uses 10.10.4.0/24", "choose another cluster_leg_pool")
    finally:
        hosts["t3"].check_output("ip link del other0")


def test_a_cable_that_names_a_cage_twice(playbook: Any) -> None:
    cables = '{"cluster_cables": ["t1.0 - t2.1", "t2.0 - t3.1", "t3.0 - t2.1"]}'
    refused(playbook("site", "-e", cables), "cluster_cables", "cage 1 of t2 twice")


def test_a_tensor_parallel_size_that_does_not_fit(playbook: Any, tmp_path: Path) -> None:
    profile = Path(__file__).resolve().parents[3] / "profiles" / "lab-smollm2.yml"
    other = tmp_path / "other.yml"
    other.write_text(
        profile.read_text().replace("name: lab-smollm2", "name: other").replace("tensor_parallel_size: 3", "tensor_parallel_size: 2")
    )
    arguments = ("-e", f"cluster_profile={other}", "-e", "lab_checkpoint=smollm2-135m-instruct")
    refused(playbook("site", *arguments), "parallelism.tensor_parallel_size is 2", "3 members")


def test_an_unreachable_host(playbook: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.yml"
    elsewhere.write_text("sparks: {hosts: {t2: {ansible_host: 10.99.0.99}}}\n")
    refused(playbook("site", "-i", str(elsewhere)), "UNREACHABLE", "10.99.0.99")


def test_a_change_that_would_end_the_running_group(playbook: Any) -> None:
    refused(playbook("site", "--tags", "service", "-e", "cluster_api_port=8010"), "stop it first", "cluster_allow_disruption=true")


def test_a_change_of_the_legs_that_would_end_the_running_group(playbook: Any) -> None:
    done = playbook("site", "--tags", "fabric", "-e", "cluster_leg_pool=10.20.0.0/16")
    refused(done, "group lab runs, and changing its legs ends it: stop it first", "cluster_allow_disruption=true")


def test_check_mode_says_that_it_would_end_the_group(playbook: Any) -> None:
    done = playbook("site", "--tags", "service", "--check", "--diff", "-e", "cluster_api_port=8010")
    assert done.returncode == 0, done.stdout
    assert '"--port",' in done.stdout and "8010" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--tags", "fabric"), ("--tags", "storage"), ("--tags", "runtime"), ("--tags", "service"), ("--limit", "t2")]
)
def test_a_part_alone_does_its_part_and_changes_nothing(playbook: Any, arguments: tuple[str, str]) -> None:
    done = playbook("site", *arguments)
    assert done.returncode == 0, done.stdout
    assert not re.search(r"changed=[1-9]", done.stdout), done.stdout
