# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts the tables of kernels/README.md in the place of those there: python -m tests.gpu.table [FOLDER]

They are made from kernels/results/h200.json and from nothing else. With FOLDER, where tests/gpu/run.sh has left what it found
on an H200, that file is made first: the times and what became of the checks.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
RESULTS = KERNELS / "results/h200.json"
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


# What each of run.sh's steps says last if it found nothing wrong.
CLEAN = {
    "checks": r"^(\d+ passed) in .*\Z",
    **dict.fromkeys(("memcheck", "initcheck", "synccheck"), r"ERROR SUMMARY: (0 errors)\Z"),
    "racecheck": r"RACECHECK SUMMARY: (0 hazards) displayed",
}


def published(folder: Path) -> dict[str, Any]:
    """The results of a whole run. ValueError if a step failed or is not there."""
    said = {}
    for step, pattern in CLEAN.items():
        file = folder / f"{step}.txt"
        found = re.search(pattern, file.read_text().rstrip(), re.MULTILINE) if file.is_file() else None
        if found is None:
            raise ValueError(f"{file}: {step} has not run or found something wrong; run tests/gpu/run.sh whole and see what it says")
        said[step] = found[1]
    selfcheck = json.loads((folder / "selfcheck.txt").read_text().splitlines()[-1])["checks"]
    if failed := [name for name, check in selfcheck.items() if not check["passed"]]:
        raise ValueError(f"{folder}/selfcheck.txt: {', '.join(failed)} failed; see there")
    checks = {"pytest": said.pop("checks"), "selfcheck": f"{len(selfcheck)} passed", "sanitizer": said}
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return {**{key: value for key, value in results.items() if key not in {"linear", "moe"}}, "checks": checks} | {
        key: results[key] for key in ("linear", "moe")
    }


def lines(results: dict[str, Any]) -> str:
    """JSON with a line for each entry and for each row of times."""

    def value(entry: Any) -> str:
        rows = entry if isinstance(entry, list) else []
        return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]" if rows else json.dumps(entry)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value(entry)}" for key, entry in results.items()) + "\n}\n"


def main() -> None:
    """Writes kernels/README.md, and h200.json before that if there is a folder."""
    if len(sys.argv) > 1:
        RESULTS.write_text(lines(published(Path(sys.argv[1]))))
    readme = KERNELS / "README.md"
    readme.write_text(with_tables(readme.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
