# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of all scenarios share: the lab's verbs, playbooks beside a test, and waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ansible_collections.gb10.cluster.plugins.module_utils import _host

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = os.environ.get("GB10_INVENTORY", "inventories/lab")


def as_user() -> dict[str, str]:
    """The environment of one who runs a playbook from the checkout: without molecule's settings of Ansible."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")} | {"ANSIBLE_NOCOLOR": "1"}


def playbook_argv(name: str, *arguments: str) -> list[str]:
    """ansible-playbook of this environment."""
    return [str(Path(sys.executable).with_name("ansible-playbook")), "-i", INVENTORY, f"playbooks/{name}.yml", *arguments]


def begin(name: str, *arguments: str) -> subprocess.Popen[str]:
    """A playbook beside this test."""
    argv = playbook_argv(name, *arguments)
    return subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=as_user(), start_new_session=True
    )


def kill(run: subprocess.Popen[str]) -> None:
    """A controller that loses its power. Ansible's workers lead sessions of their own, so that no group has them all."""
    for pid in _host.descendants(run.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.communicate(timeout=20)


def lab(*arguments: str) -> None:
    """A verb of the lab."""
    subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, check=True, timeout=300)


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Return when the condition holds; it may take so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.3)
