# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.nccl_env: members and settings to the NCCL environment of each member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.module_utils import _nccl, _plan, _topology
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters, _inputs

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def nccl_env(members: Any, settings: Any, explain: bool = False) -> dict[str, Any]:
    """Each member's variables; or these with their reasons, what must be absent and what the library must know."""
    settings = _inputs.check_settings(settings, "FABRIC_SETTINGS")
    ranks = _plan.members_of(_inputs.check_members(members), settings)
    fabric = _topology.plan_fabric(ranks, settings)
    environments = {member.name: _plan.nccl_environment(fabric, member, settings, {}) for member in ranks}
    if not explain:
        return environments
    return {"members": environments, **_nccl.explain(fabric, devices=bool(settings["cluster_devices"]), overrides={})}


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"nccl_env": nccl_env}
