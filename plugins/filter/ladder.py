# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Doors to the rules of a ladder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.gb10.cluster.plugins.module_utils import _ladder
from ansible_collections.gb10.cluster.plugins.plugin_utils import _filters, _inputs, _report


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        doors = (ladder_rungs, ladder_begin, ladder_resumed, ladder_turn, ladder_tried, ladder_report)
        return {door.__name__: _filters.door(door) for door in doors}


def ladder_rungs(rungs: Any) -> list[dict[str, Any]]:
    """See ladder_rungs.yml."""
    return _ladder.rungs_of(_inputs.plain(rungs, "ladder_rungs"))


def ladder_begin(
    rungs: Sequence[Mapping[str, Any]], first: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], case: Any, utc: str
) -> dict[str, Any]:
    """See ladder_begin.yml."""
    rungs = ladder_rungs(rungs)
    _ladder.check_plans(first, {rung["name"]: plan for rung, plan in zip(rungs, plans, strict=True)})
    return _ladder.begin(utc, first, rungs, _inputs.plain(case, "ladder_case"))


def ladder_resumed(fresh: Mapping[str, Any], kept: Mapping[str, Any], again: bool) -> dict[str, Any]:
    """See ladder_resumed.yml."""
    return _ladder.resumed(_inputs.plain(kept, "kept"), _inputs.plain(fresh, "fresh"), again)


def ladder_turn(ladder: Mapping[str, Any], place: int) -> dict[str, Any]:
    """See ladder_turn.yml."""
    return _ladder.turn(ladder, place)


def ladder_tried(ladder: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """See ladder_tried.yml."""
    return _ladder.tried(_inputs.plain(ladder, "ladder"), _inputs.plain(outcome, "outcome"))


def ladder_report(ladder: Mapping[str, Any]) -> dict[str, Any]:
    """See ladder_report.yml."""
    return {"table": _ladder.table(ladder), "html": _report.ladder_html(ladder), "best": _ladder.base(ladder)}
