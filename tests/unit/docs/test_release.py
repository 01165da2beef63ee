# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a release says of itself in more than one place is the same everywhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml
from ansible_collections.gb10.cluster.plugins.filter import acceptance
from ansible_collections.gb10.cluster.plugins.module_utils import _acceptance

ROOT = Path(__file__).resolve().parents[3]
GALAXY = yaml.safe_load((ROOT / "galaxy.yml").read_text())
PINS = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\n]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
NEWEST = re.findall(r"^ansible-core==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[0]


def test_a_container_installs_what_a_controller_does() -> None:
    definition = yaml.safe_load((ROOT / "execution-environment.yml").read_text())
    assert definition["dependencies"]["ansible_core"]["package_pip"] == f"ansible-core=={NEWEST}"
    own = yaml.safe_load((ROOT / "meta/execution-environment.yml").read_text())["dependencies"]
    wanted = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / own["python"]).read_text(), re.MULTILINE))
    assert wanted == {name: PINS[name] for name in ("jsonschema", "huggingface_hub", "pyyaml", "matplotlib")}
    assert "rsync" in (ROOT / own["system"]).read_text()


def test_its_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", GALAXY["version"])
    assert f"gb10-cluster-{GALAXY['version']}.tar.gz" in (ROOT / "execution-environment.yml").read_text()
    for folder in ("kernels/exl3", "runtime/overlay"):
        assert f'version = "{GALAXY["version"]}"' in (ROOT / folder / "pyproject.toml").read_text()
    assert acceptance.version() == GALAXY["version"]


def test_the_oldest_ansible_is_named_the_same() -> None:
    oldest = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"].removeprefix(">=").rpartition(".")[0]
    assert f"ansible-core {oldest}" in " ".join((ROOT / "docs/upgrading.md").read_text().split())


def test_every_document_with_a_version_is_promised() -> None:
    """docs/upgrading.md names the documents that programs may read."""
    text = (ROOT / "docs/upgrading.md").read_text()
    schema = json.loads((ROOT / "docs/acceptance.schema.json").read_text())
    assert schema["properties"]["version"]["const"] == _acceptance.VERSION
    assert all(f"`{name}`" in text for name in ("plan", "status", "bench", "acceptance"))


def test_fragments_are_sound() -> None:
    command = [str(Path(sys.executable).with_name("antsibull-changelog")), "lint"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
