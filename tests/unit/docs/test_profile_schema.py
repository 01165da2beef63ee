# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schema for editors is the one that is checked with, says something of every key, and takes every profile."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _schema
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from jsonschema import Draft202012Validator

from tests.unit.docs import profile_schema

ROOT = Path(__file__).resolve().parents[3]
PROFILES = sorted((ROOT / "profiles").glob("*.yml"))
MODELINE = "# yaml-language-server: $schema=../docs/profile.schema.json\n"
INVENTORIES = {2: "pair", 3: "ring3", 4: "ring4"}


def test_the_file_is_current() -> None:
    assert profile_schema.PATH.read_text() == profile_schema.text(), "run tools/profile-schema"


def test_every_key_is_explained_and_nothing_else() -> None:
    known = {path for path, _properties, _name in profile_schema.keys(_schema.PROFILE)}
    assert not {".".join(path) for path in known if profile_schema.about(path) is None}
    spoken = {key for path in known for key in (".".join(path), ".".join(path[-2:]), path[-1])}
    assert not set(profile_schema.ABOUT) - spoken


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_names_the_schema_and_fits_it(path: Path) -> None:
    assert MODELINE in path.read_text()
    validator = Draft202012Validator(json.loads(profile_schema.PATH.read_text()))
    profile = yaml.safe_load(path.read_text())
    validator.validate(profile)
    assert not validator.is_valid({**profile, "statuss": {}})


@pytest.mark.parametrize("level", ["proven", None])
def test_a_level_that_there_is_none_of_is_refused(level: str | None) -> None:
    profile = copy.deepcopy(yaml.safe_load(PROFILES[0].read_text()))
    profile["status"]["level"] = level
    assert not Draft202012Validator(profile_schema.document()).is_valid(profile)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_plans_on_a_fitting_sample_inventory(path: Path) -> None:
    profile = _inputs.load_profile(path.stem)
    folder = ROOT / "inventories" / INVENTORIES[profile["parallelism"]["tensor_parallel_size"]]
    hosts = yaml.safe_load((folder / "hosts.yml").read_text())["sparks"]["hosts"]
    members = [{"name": name, "address": host["ansible_host"]} for name, host in hosts.items()]
    settings: dict[str, Any] = yaml.safe_load((folder / "group_vars/sparks.yml").read_text()) | {"cluster_profile": path.stem}
    for part, setting in (("checkpoint", "cluster_checkpoint_source"), ("image", "cluster_image_archive")):
        if profile[part]["source"]["kind"] in ("directory", "archive"):
            settings[setting] = "/srv/x"
    plan = _inputs.plan(members, settings)
    Draft202012Validator(_schema.PLAN).validate(plan)
    command = next(iter(plan["members"].values()))["rank_config"]["container"]["command"]
    assert command[command.index("--tensor-parallel-size") + 1] == str(len(members))
