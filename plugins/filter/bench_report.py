# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Door to a benchmark's report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..module_utils._bench import table
from ..plugin_utils._report import html, plots


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {"bench_report": bench_report}


def bench_report(document: Mapping[str, Any], with_plots: bool = True) -> dict[str, Any]:
    """See bench_report.yml."""
    pictures = plots(document) if with_plots else {}
    return {"table": table(document), "html": html(document, pictures), "plots": pictures}
