# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts the tables of kernels/README.md in the place of those there: python -m tests.gpu.table

They are made from kernels/results/h200.json and from nothing else.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
BEGIN, END = "<!-- made by tests/gpu/table.py -->\n", "<!-- end -->\n"


def tables(results: dict[str, Any]) -> str:
    """Markdown: microseconds, then how many times the peer's time that is, and the part of the limit that was reached."""

    def cell(row: dict[str, Any]) -> str:
        peer = f"{row['peer_us'] / row['us']:.2f}×, " if row["peer_us"] else ""
        return f"{row['us']:.1f} ({peer}{100 * row['limit_us'] / row['us']:.0f} %)"

    def gain(rows: list[dict[str, Any]]) -> str:
        gains = [row["peer_us"] / row["us"] for row in rows]
        return f"{statistics.geometric_mean(gains):.2f}× ({min(gains):.2f} to {max(gains):.2f})"

    rows = [row for row in results["linear"] if row["K"] == 3]
    counts = sorted({row["m"] for row in rows})
    lines = ["| inputs → outputs | " + " | ".join(f"m = {m}" for m in counts) + " |", "|---|" + "---:|" * len(counts)]
    for k, n in dict.fromkeys((row["k"], row["n"]) for row in rows):
        cells = {row["m"]: cell(row) for row in rows if (row["k"], row["n"]) == (k, n)}
        lines.append(f"| {k} → {n} | " + " | ".join(cells[m] for m in counts) + " |")
    counts = sorted({row["tokens"] for row in results["moe"]})
    lines += ["", "| 384 experts, 6 per token | " + " | ".join(f"{t} tokens" for t in counts) + " |", "|---|" + "---:|" * len(counts)]
    for tp in sorted({row["tp"] for row in results["moe"]}):
        cells = {row["tokens"]: cell(row) for row in results["moe"] if (row["tp"], row["K"]) == (tp, 3)}
        lines.append(f"| one of {tp} ranks | " + " | ".join(cells[t] for t in counts) + " |")
    if all(row["peer_us"] for row in results["linear"] + results["moe"]):
        lines += ["", f"| all bits, against {results['peer']} | geometric mean (least to most) |", "|---|---:|"]
        lines += [f"| linear, m up to 12 | {gain([row for row in results['linear'] if row['m'] <= 12])} |"]
        lines += [f"| linear, m = {m} | {gain([row for row in results['linear'] if row['m'] == m])} |" for m in (64, 1024)]
        lines += [f"| MoE, up to 12 tokens | {gain([row for row in results['moe'] if row['tokens'] <= 12])} |"]
        lines += [f"| MoE, {t} tokens | {gain([row for row in results['moe'] if row['tokens'] == t])} |" for t in (64, 1024)]
    return "\n".join(lines) + "\n"


def with_tables(text: str, results: dict[str, Any]) -> str:
    """The text with its tables made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables(results) + END + rest.split(END)[1]


def main() -> None:
    """Writes kernels/README.md."""
    readme = KERNELS / "README.md"
    readme.write_text(with_tables(readme.read_text(), json.loads((KERNELS / "results/h200.json").read_text())))


if __name__ == "__main__":
    main()
