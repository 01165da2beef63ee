# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.plan: members, settings and a profile to the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters, _inputs

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def plan(members: Any, settings: Any, profile: Any = None) -> dict[str, Any]:
    """The whole plan."""
    return _inputs.plan(members, settings, profile)


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"plan": plan}
