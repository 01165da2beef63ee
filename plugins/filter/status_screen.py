# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Doors to the state of a cluster: a screen, a document, a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..module_utils._status import screen, summary
from ..plugin_utils._status_page import page


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {"status_page": status_page, "status_screen": status_screen, "status_summary": status_summary}


def status_screen(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """See status_screen.yml."""
    return screen(plan, members)


def status_summary(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """See status_summary.yml."""
    return summary(plan, members)


def status_page(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None], at: float) -> str:
    """See status_page.yml."""
    return page(plan, members, float(at))
