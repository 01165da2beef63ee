# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.fabric_addresses: members and settings to the legs of each member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.module_utils import _plan, _topology
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters, _inputs

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def fabric_addresses(members: Any, settings: Any) -> dict[str, list[dict[str, Any]]]:
    """Each member's legs."""
    settings = _inputs.check_settings(settings, "FABRIC_SETTINGS")
    fabric = _topology.plan_fabric(_plan.members_of(_inputs.check_members(members), settings), settings)
    return {name: _plan.member_legs(fabric, name) for name in fabric.members}


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fabric_addresses": fabric_addresses}
