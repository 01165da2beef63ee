# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.cabling: a plan and what all members saw at their ports to a verdict, and which plug to move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.module_utils import _cabling
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def cabling(plan: Any, observed: Any) -> dict[str, Any]:
    """The cabling as a whole."""
    return _cabling.judge(plan, observed)


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"cabling": cabling}
