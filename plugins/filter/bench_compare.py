# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Door to the comparison of two benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..module_utils._bench import compare


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {"bench_compare": bench_compare}


def bench_compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """See bench_compare.yml."""
    said = compare(before, after)
    lines = [*said["differences"]] or ["nothing that is known differs"]
    width = max((len(step["name"]) for step in said["steps"]), default=0)
    for step in said["steps"]:
        figures = f"{step['before']:.4g} to {step['after']:.4g} ({step['ratio'] - 1:+.1%}), " if "ratio" in step else ""
        lines.append(f"{step['name']:<{width}}  {figures}{step['verdict']}")
    return lines
