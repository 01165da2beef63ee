# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank has to log the lines of the levers that its profile's variables turn on, and of no others; what a rank logs, tests/overlay asks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _levers
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

ROOT = Path(__file__).resolve().parents[3]
LEVERS: list[dict[str, Any]] = json.loads((ROOT / _levers.LEVERS).read_text())
PROFILES = {path.stem: _inputs.load_profile(path.stem) for path in _inputs.PROFILES.glob("*.yml")}
OWN = {name: profile for name, profile in PROFILES.items() if profile["image"]["source"] == {"kind": "build", "recipe": "gb10.cluster"}}

DEFAULT = {"memory log", "page cache dropped"}
ON = {
    "dsv41-exl3-2.9bpw-tp2-own": {"Engram from disk", "indexer buffer", "allocator release"},
    "dsv41-exl3-3.5bpw-tp3-lakyfx": {"virtual heads", "Engram from disk"},
    "dsv41-exl3-3.5bpw-tp3-own": {"virtual heads", "Engram from disk", "indexer buffer"},
}
FOREIGN = re.compile(r"(DSV41|EXL3|CUDA_EXL3|GLM53)_")
"""Variables of the published images, by their beginnings."""


def awaited(name: str, changes: dict[str, Any] | None = None) -> dict[str, str]:
    """What the plan wants of its ranks, which is the same for all."""
    ranks = PROFILES[name]["parallelism"]["tensor_parallel_size"]
    members = [{"name": f"t{rank}", "address": f"198.51.100.{rank + 1}"} for rank in range(ranks)]
    settings = {"cluster_name": "x", "cluster_profile": name, "cluster_topology": "ring" if ranks > 2 else "pair"}
    settings |= {"cluster_checkpoint_source": "/srv/x", "cluster_image_archive": "/srv/x"}
    plan = _inputs.plan(members, settings | {"cluster_profile_changes": changes or {}})
    first, *others = (member["rank_config"]["start"]["log_lines"] for member in plan["members"].values())
    assert all(other == first for other in others)
    return dict(first)


def test_every_profile_of_the_own_image_awaits_its_levers() -> None:
    lines = {lever["name"]: lever["proof"] for lever in LEVERS}
    for name in OWN:
        assert awaited(name) == {lever: lines[lever] for lever in ON[name] | DEFAULT}
    assert set(ON) == set(OWN)


def test_a_profile_of_the_own_image_names_no_variable_of_another() -> None:
    """The beginnings are those that other profiles have, so that none is forgotten when an image comes in."""
    own = {lever["variable"] for lever in LEVERS}
    for name, profile in OWN.items():
        variables = set(profile["engine"]["environment"])
        assert not [variable for variable in variables if FOREIGN.match(variable)], name
        assert {variable for variable in variables if variable.startswith("GB10_")} <= own, name
        assert "/opt/" not in json.dumps(profile["engine"]), name
    others = {variable for name in set(PROFILES) - set(OWN) for variable in PROFILES[name]["engine"]["environment"]}
    assert {variable.partition("_")[0] for variable in others} >= {"DSV41", "EXL3", "GLM53"}
    assert not others & own


def test_other_images_log_what_their_profiles_say() -> None:
    assert awaited("lab-smollm2") == PROFILES["lab-smollm2"]["engine"]["log_lines"]
    assert awaited("dsv41-exl3-3.5bpw-tp3") == {}


def test_a_lever_that_is_changed_in_the_inventory_is_awaited_or_not() -> None:
    name = "dsv41-exl3-3.5bpw-tp3-own"
    changes = {"engine": {"environment": {"GB10_ENGRAM_CACHE_MIB": 64, "GB10_MEMORY_LOG": "0", "GB10_INDEXER_FACTOR": None}}}
    assert set(awaited(name, changes)) == set(awaited(name)) - {"memory log", "indexer buffer"} | {"Engram row cache"}
    own = awaited(name, {"engine": {"log_lines": {"graphs": "Graph capturing finished", "memory log": "memory after build"}}})
    assert own == awaited(name) | {"graphs": "Graph capturing finished", "memory log": "memory after build"}, (
        "the profile's own word counts"
    )


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, DEFAULT),
        ({"GB10_MEMORY_LOG": "0", "GB10_DROP_PAGE_CACHE": "0"}, set()),
        ({"GB10_MEMORY_LOG": "", "GB10_VIRTUAL_TP": "00"}, DEFAULT),
        ({"GB10_PREFILL_RELEASE_MIB": 1}, {*DEFAULT, "allocator release"}),
        # Without tables on disk there is nothing to read or to keep.
        ({"GB10_ENGRAM_THREADS": "8", "GB10_ENGRAM_CACHE_MIB": "8"}, DEFAULT),
        ({"GB10_ENGRAM_DIR": "/x", "GB10_ENGRAM_THREADS": "32"}, {*DEFAULT, "Engram from disk"}),
        ({"GB10_ENGRAM_DIR": "/x", "GB10_ENGRAM_THREADS": "8"}, {*DEFAULT, "Engram from disk", "Engram readers"}),
    ],
)
def test_which_levers_are_on(variables: dict[str, Any], on: set[str]) -> None:
    assert set(_levers.proofs({"VLLM_PLUGINS": "other,gb10_vllm", **variables}, LEVERS)) == on
    assert _levers.proofs(variables, LEVERS) == {}, "vLLM skips a plugin that is not named"
    assert _levers.proofs({"VLLM_PLUGINS": "gb10_vllm_x", **variables}, LEVERS) == {}


@pytest.mark.parametrize("value", ["on", "-1", "1.5"])
def test_a_value_that_the_overlay_would_refuse_is_refused_by_the_plan(value: str) -> None:
    wanted = (
        "profile dsv41-exl3-3.5bpw-tp3-own: engine.environment.GB10_INDEXER_FACTOR is {!r}, expected a whole number, 0 or more: correct it"
    )
    with pytest.raises(PlanError) as error:
        awaited("dsv41-exl3-3.5bpw-tp3-own", {"engine": {"environment": {"GB10_INDEXER_FACTOR": value}}})
    assert str(error.value) == wanted.format(value)


def test_heads_are_padded_in_one_place() -> None:
    heads = PROFILES["dsv41-exl3-3.5bpw-tp3"]["checkpoint"]["preparation"]
    with pytest.raises(PlanError, match="GB10_VIRTUAL_TP may not be set, since checkpoint"):
        awaited("dsv41-exl3-3.5bpw-tp3-own", {"checkpoint": {"preparation": heads}})
    padded = awaited(
        "dsv41-exl3-3.5bpw-tp3-own", {"checkpoint": {"preparation": heads}, "engine": {"environment": {"GB10_VIRTUAL_TP": "0"}}}
    )
    assert "virtual heads" not in padded
