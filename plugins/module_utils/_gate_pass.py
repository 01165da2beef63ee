# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a pass of the fabric gate is of, and how long it holds. Asked by the roles, and by the head's rank before each start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

VERSION = 1
"""Of a measurement's document."""
CLOCK_SLACK_S = 300
"""A measurement from the future by less is a matter of two clocks."""


def digest(plan: Mapping[str, Any]) -> str:
    """SHA-256 of what a measurement depends on: members, legs, image, transport variables and devices. Another model keeps it valid."""
    ranks = {name: member["rank_config"]["container"] for name, member in plan["members"].items()}
    content = {
        "members": plan["cluster"]["members"],
        "mtu": plan["fabric"]["mtu"],
        "legs": plan["fabric"]["legs"],
        "image": plan["image"]["reference"],
        "environment": {name: transport(container["environment"]) for name, container in ranks.items()},
        "devices": {name: [container["devices"], container["gpus"]] for name, container in ranks.items()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def transport(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how ranks talk."""
    return {key: value for key, value in environment.items() if key.startswith(("NCCL_", "GLOO_", "UCX_"))}


def _span(seconds: float) -> str:
    """A time in its own unit."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"


def stale(artefact: Mapping[str, Any] | None, group: str, wanted_digest: str, now: float, max_age: float) -> str:
    """Why an artefact is no pass that holds, in one sentence; empty where it is. `now`: seconds since 1970; `max_age`: seconds."""
    cure = "run the playbook gb10.cluster.gate"
    if not artefact or artefact.get("version") != VERSION:
        return f"the fabric of group {group} has not been measured on this head: {cure}"
    if artefact["digest"] != wanted_digest:
        return f"the fabric of group {group} was measured with other members, legs, image or NCCL variables: {cure}"
    age = now - artefact["measured_at"]
    if not -CLOCK_SLACK_S <= age <= max_age:
        when = f"{_span(age)} ago, fabric_gate_max_age allows {_span(max_age)}" if age > 0 else "in the future, so a clock is wrong"
        return f"the fabric of group {group} was measured {when}: {cure}"
    if artefact["problems"]:
        return f"the fabric of group {group} did not pass the gate, {artefact['problems'][0]}; then {cure}"
    return ""
