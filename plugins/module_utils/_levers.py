# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of the overlay's levers a profile turns on, and so which lines each of its ranks has to log.

The levers are data of the overlay itself (runtime/overlay/gb10_vllm/levers.json). A profile names variables alone: the lines that say that they took
effect follow, also for those that `cluster_profile_changes` adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEVERS = "runtime/overlay/gb10_vllm/levers.json"
PLUGINS, OVERLAY = "VLLM_PLUGINS", "gb10_vllm"
"""The variable by which vLLM loads plugins, names with commas between them, and the overlay's."""


def loaded(environment: Mapping[str, Any]) -> bool:
    """Whether the overlay is."""
    return OVERLAY in str(environment.get(PLUGINS, "")).split(",")


def proofs(environment: Mapping[str, Any], levers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name and line of each lever that these variables, or their defaults, turn on; none where the overlay is not loaded. Raises PlanError."""
    if not loaded(environment):
        return {}
    on: set[str] = set()
    found = {}
    for lever in levers:
        variable = lever["variable"]
        value = str(environment.get(variable, "")).strip() or lever["default"]
        if lever.get("number", True):
            if not value.isdecimal():
                raise PlanError(f"engine.environment.{variable} is {value!r}, expected a whole number, 0 or more: correct it")
            value = str(int(value))
        if value != lever["off"] and lever.get("needs", variable) in {variable, *on}:
            on.add(variable)
            found[lever["name"]] = lever["proof"]
    return found


def awaited(profile: Mapping[str, Any], levers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The profile with the lines of its levers among its own. Raises PlanError."""
    engine = profile["engine"]
    try:
        lines = proofs(engine["environment"], levers)
    except PlanError as error:
        raise PlanError(f"profile {profile['name']}: {error}") from None
    return {**profile, "engine": {**engine, "log_lines": {**lines, **engine.get("log_lines", {})}}}
