# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.vllm_args: members, settings and a profile to the argument vector of each member's rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters, _inputs

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def vllm_args(members: Any, settings: Any, profile: Any = None) -> dict[str, list[str]]:
    """Each member's arguments."""
    plan = _inputs.plan(members, settings, profile)
    return {name: member["rank_config"]["container"]["command"] for name, member in plan["members"].items()}


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"vllm_args": vllm_args}
