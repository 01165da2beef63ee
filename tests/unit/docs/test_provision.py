# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The example of a CI job where it has to fail; where it succeeds, and where the fabric gate fails, is tested on the lab (scenario ladder)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
SECRET = "a-secret-of-the-job"
SETTINGS = {
    "cluster_name": "lab", "cluster_profile": "lab-tiny", "cluster_topology": "ring", "cluster_devices": [], "cluster_gpu": False,
    "cluster_management_interface": "lo", "cluster_checkpoint_source": "/srv/tiny", "cluster_image_archive": "/srv/image.tar",
}  # fmt: skip


def provision(folder: Path, *arguments: str, **settings: Any) -> tuple[int, str]:
    """The program over three hosts that refuse every connection; exit status and output."""
    # Port 1 of addresses of this machine.
    hosts = {f"t{rank}": {"ansible_host": f"127.0.0.{rank}", "ansible_port": 1} for rank in (1, 2, 3)}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": {**SETTINGS, **settings}}}))
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env |= {
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ANSIBLE_SSH_RETRIES": "0",
        "HF_TOKEN": SECRET,
    }
    command = [sys.executable, ROOT / "examples" / "provision.py", "hosts.yml", "artefacts", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    """Steps of the summary by their playbook."""
    content = json.loads((folder / "artefacts" / "summary.json").read_text())
    assert content["succeeded"] is False
    return {step["playbook"]: step for step in content["steps"]}


def test_a_bad_inventory_ends_it_before_a_member_is_asked(tmp_path: Path) -> None:
    status, said = provision(tmp_path, cluster_mtu=90)
    assert status == 1
    [step] = steps(tmp_path).values()
    assert (step["playbook"], step["status"]) == ("plan", "failed")
    assert "cluster_mtu is 90, expected at least 1280" in step["failures"][0] and step["failures"][0] in said


def test_members_that_do_not_answer_are_no_success_and_the_evidence_is_asked_for(tmp_path: Path) -> None:
    status, said = provision(tmp_path, "-e", f"storage_token={SECRET}")
    assert status == 1
    # Neither what the job's environment has nor what it was given is in what it leaves.
    left = [path for path in (tmp_path / "artefacts").rglob("*") if path.is_file()]
    assert len(left) > 10 and not any(SECRET in path.read_text() for path in left) and SECRET not in said
    ran = steps(tmp_path)
    assert list(ran) == ["plan", "site", "status", "evidence"]
    assert ran["plan"]["status"] == "successful" and ran["site"]["status"] == "failed"
    assert json.loads((tmp_path / "artefacts" / "plan.json").read_text())["cluster"]["name"] == "lab"
    assert "Connection refused" in ran["site"]["failures"][0]


def test_a_setting_without_a_value_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    status, said = provision(tmp_path, "-e", "fabric_gate")
    assert status == 2 and "-e fabric_gate is not NAME=VALUE" in said
    (tmp_path / "artefacts").mkdir()
    status, said = provision(tmp_path)
    assert status == 2 and "artefacts exists" in said
