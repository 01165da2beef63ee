# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cabling pictures of docs/: `tools/run python -m tests.unit.fabric.figures` draws them anew from the sample inventories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _picture, _plan
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

ROOT = Path(__file__).resolve().parents[3]
INVENTORIES = ("pair", "ring3", "ring4", "switched")


def plan_of(inventory: str) -> dict[str, Any]:
    """A sample inventory's plan."""
    folder = ROOT / "inventories" / inventory
    hosts = yaml.safe_load((folder / "hosts.yml").read_text())["sparks"]["hosts"]
    variables = yaml.safe_load((folder / "group_vars/sparks.yml").read_text())
    members = [{"name": name, "address": host["ansible_host"]} for name, host in hosts.items()]
    settings = {key: value for key, value in variables.items() if key.startswith("cluster_")}
    return _plan.build_plan(members, settings, _inputs.load_profile(settings["cluster_profile"]))


def figure(inventory: str) -> Path:
    return ROOT / "docs" / f"fabric-{inventory}.svg"


if __name__ == "__main__":
    for name in INVENTORIES:
        figure(name).write_text(_picture.svg(plan_of(name)))
