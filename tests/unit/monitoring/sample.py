# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page over synthetic figures, to be looked at: `tools/run python -m tests.unit.monitoring.sample FILE.html`.

docs/status-page.png is what a browser makes of it, with 64 colours:

    chromium-headless-shell --no-sandbox --hide-scrollbars --window-size=1100,1000 --screenshot=docs/status-page.png FILE.html
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from ansible_collections.gb10.cluster.plugins.plugin_utils import _status_page

NOW = 1_790_000_000.0
LEGS = ("enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1")
PLAN: dict[str, Any] = {
    "cluster": {"name": "synthetic", "head": "spark1", "topology": "ring", "members": [f"spark{n}" for n in (1, 2, 3)], "profile": "dsv41-exl3-tp3"},
    "service": {"url": "http://192.0.2.11:8000", "served_model_name": "deepseek-v4.1"},
    "members": {f"spark{rank + 1}": {"rank": rank} for rank in range(3)},
}  # fmt: skip


def history(rank: int) -> list[dict[str, Any]]:
    """A day with three busy times and an hour in which the member was off; one leg of the second member is slow."""
    records = []
    for step in range(288):
        if rank == 1 and 100 < step < 114:
            continue
        wave = max(0.0, math.sin(step / 20)) * (0.93 + 0.07 * math.sin(step * 2.3 + rank))
        legs = {leg: round(2.1e9 * wave * (0.3 if (rank, leg) == (1, LEGS[3]) else 1.0)) for leg in LEGS}
        record = {"at": NOW - 86400 + 300 * (step + 1), "free": round(9800 - 2300 * wave), "available": 12000, "legs": legs}
        if rank == 0:
            record |= {"canary": 0.2 + 2.4 * wave * (0.6 + 0.4 * math.sin(step * 1.7)), "kv": 0.03 + 0.8 * wave}
        records.append(record)
    return records


def member(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "active": "active", "phase": "serving", "detail": "", "failure": None, "leg_problems": [], "legs": 4, "mem_free_mib": 7500,
        "mem_total_mib": 122000, "swaps": [], "guard": None, "events": [], "at_boot": True, "lock": "", "history": history(rank),
    } | more  # fmt: skip


def page() -> str:
    members = {"spark1": member(0), "spark2": member(1, leg_problems=["enP2p1s0f1np1 has MTU 1500 instead of 9000"]), "spark3": member(2)}
    return _status_page.page(PLAN, members, NOW)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
