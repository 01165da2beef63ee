# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The serving group proven by its answers, from the controller as a user does it."""

from __future__ import annotations

import json
from pathlib import Path

from testinfra.host import Host

from extensions.molecule.tests.conftest import Playbook


def test_all_probes_of_the_profile_hold_and_are_kept(playbook: Playbook, hosts: dict[str, Host], tmp_path: Path) -> None:
    evidence = tmp_path / "verify.json"
    done = playbook("verify", "-e", f"verify_evidence={evidence}")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {result["name"]: result["verdict"] for result in json.loads(evidence.read_text())["results"]}
    passed = {name for name, verdict in verdicts.items() if verdict == "passed"}
    assert passed == {"health", "key", "models", "chat", "parity", "logprobs", "determinism", "prefix_cache", "stop", "streams", "limit"}
    assert {verdict for name, verdict in verdicts.items() if name not in passed} == {"not probed"}
    assert hosts["t1"].file("/var/lib/gb10/verify/lab.json").mode == 0o600
    assert hosts["t1"].check_output("cat /etc/gb10/lab/api-key") not in evidence.read_text() + done.stdout


def test_the_old_group_is_not_believed(playbook: Playbook) -> None:
    done = playbook("verify", "-e", "verify_since=now", "-e", "verify_wait_s=5", "-e", "verify_only=health")
    assert done.returncode != 0
    assert "is still the old one" in " ".join(done.stdout.split())
