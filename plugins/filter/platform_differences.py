# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.platform_differences: kernels, drivers and firmware that are not the same on all members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.module_utils import _platform
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def platform_differences(platforms: Any) -> list[str]:
    """One sentence on each kind of version that differs."""
    return [finding.sentence for finding in _platform.differences(platforms)]


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"platform_differences": platform_differences}
