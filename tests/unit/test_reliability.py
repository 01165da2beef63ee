# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fault table of the documentation is that of the kept results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "reliability"))


def test_the_table_is_current() -> None:
    text = TOOL["PAGE"].read_text()
    assert TOOL["page"](text, json.loads(TOOL["KEPT"].read_text())) == text


def test_a_result_changes_the_table_and_nothing_else() -> None:
    results = {"a rank killed": {"how": "by itself", "seconds": 31.4, "load": 2.6, "date": "2026-01-01"}}
    text = f"before\n{TOOL['BEGIN']}\nold\n{TOOL['END']}\nafter\n"
    made = TOOL["page"](text, results)
    assert made.startswith("before\n") and made.endswith("\nafter\n") and "old" not in made
    assert "| a rank killed | by itself | 31 | 3 | 2026-01-01 |" in made
    with pytest.raises(ValueError, match="not enough values"):
        TOOL["page"]("a page without the marks", results)
