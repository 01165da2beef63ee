# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts of the scenario's lab over ssh, its plan, and playbooks run against it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import ROOT, as_user, playbook_argv
from tests.lab.paths import lab_name, state_directory

Playbook = Callable[..., "subprocess.CompletedProcess[str]"]


def run_playbook(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """ansible-playbook from the checkout, as a user would run it."""
    argv = playbook_argv(name, *arguments)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, env=as_user(), check=False)


@pytest.fixture(scope="session")
def playbook() -> Playbook:
    """The function above."""
    return run_playbook


@pytest.fixture(scope="session")
def plan() -> dict[str, Any]:
    """The lab's plan, as the playbook prints it into a file."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"gb10-plan-{os.getpid()}.json"
    done = run_playbook("plan", "-e", f"plan_file={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    finally:
        path.unlink()
    return content


@pytest.fixture(scope="session")
def hosts(plan: dict[str, Any]) -> dict[str, Host]:
    """The lab's hosts by name. ssh goes through the lab's own network namespace."""
    ssh_config = state_directory(lab_name()) / "ssh_config"
    return {name: testinfra.get_host(f"ssh://{name}", ssh_config=str(ssh_config)) for name in plan["cluster"]["members"]}


@pytest.fixture(params=["t1", "t2", "t3"])
def host(request: pytest.FixtureRequest, hosts: dict[str, Host]) -> Host:
    """Each host in turn."""
    host: Host = hosts[request.param]
    host.member = request.param
    return host
