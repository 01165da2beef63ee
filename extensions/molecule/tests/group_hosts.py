# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of a serving group share: its phases, and how long it took to recover from a fault."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import ROOT

UNIT = "gb10-rank@lab.service"
STATE = "/run/gb10/lab/state.json"
START_S = 600.0
"""A start of the real engine beside other work on the machine."""
RECORD = ROOT / "tests" / "output" / "faults.json"
"""What was measured in this checkout; tools/reliability makes the documentation's table of it."""

BY_ITSELF, ONE_COMMAND, UNTOUCHED = "by itself", "one command", "keeps serving"


def state(host: Host) -> dict[str, Any]:
    """What the rank says of itself; empty while its host does not answer."""
    try:
        content: dict[str, Any] = json.loads(host.run(f"cat {STATE}").stdout)
    except (ValueError, RuntimeError):
        return {}
    return content


def phase(host: Host) -> str:
    """The rank's phase."""
    return str(state(host).get("phase", ""))


def all_serve(hosts: dict[str, Host]) -> bool:
    """Whether every rank runs and serves."""
    return all(phase(host) == "serving" and host.run(f"systemctl is-active {UNIT}").rc == 0 for host in hosts.values())


@contextmanager
def recovery(fault: str, how: str) -> Iterator[None]:
    """Keep how long the block took: from the fault, or the end of what causes it, until the group serves."""
    began = time.monotonic()
    yield
    try:
        kept = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        kept = {}
    kept[fault] = {
        "how": how,
        "seconds": round(time.monotonic() - began, 1),
        "load": round(os.getloadavg()[1], 1),
        "date": time.strftime("%Y-%m-%d"),
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
