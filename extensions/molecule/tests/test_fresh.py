# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A part of site.yml alone on hosts that no run has touched: it does its part, or refuses in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from testinfra.host import Host

pytestmark = pytest.mark.fresh


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tags", "service"), "there is no image localhost/gb10-lab-engine:0.32.0: run site.yml --tags runtime"),
        (("--tags", "storage"), "run site.yml --tags fabric"),
        (("--tags", "runtime"), "run site.yml --tags fabric"),
        (("--tags", "verify"), "run the service role"),
        (("--tags", "storage", "--limit", "t2"), "add t1 to --limit"),
    ],
)
def test_what_another_part_must_do_first_is_named(playbook: Any, hosts: dict[str, Host], arguments: tuple[str, ...], words: str) -> None:
    done = playbook("site", *arguments)
    assert done.returncode != 0
    assert words in " ".join(done.stdout.split()), done.stdout
    assert {host.file("/etc/gb10").exists for host in hosts.values()} == {False}


def test_the_fabric_alone_is_complete(playbook: Any, hosts: dict[str, Host]) -> None:
    done = playbook("site", "--tags", "fabric")
    assert done.returncode == 0, done.stdout
    hosts["t3"].check_output("ping -n -c 1 -W 2 -I enp1s0f0np0 10.10.2.1")
