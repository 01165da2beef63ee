# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter gb10.cluster.cabling_picture: a plan to an SVG of its cables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ansible_collections.gb10.cluster.plugins.module_utils import _picture
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters

if TYPE_CHECKING:
    from collections.abc import Callable


@_filters.door
def cabling_picture(plan: Any) -> str:
    """The picture."""
    return _picture.svg(plan)


class FilterModule:
    """The filter by its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"cabling_picture": cabling_picture}
