# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/fabric.md tells how to read every verdict that there is."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.gb10.cluster.plugins.module_utils import _cabling, _gate

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/fabric.md").read_text()


def section(title: str) -> str:
    """The text below one heading."""
    return PAGE.split(f"## Reading `{title}`")[1].split("\n## ")[0]


def words(pattern: str, *modules: str) -> set[str]:
    """All matches in the sources of modules of the core."""
    return {word for module in modules for word in re.findall(pattern, (ROOT / f"plugins/module_utils/{module}.py").read_text())}


def test_every_verdict_of_a_port_is_explained() -> None:
    known = {value for name, value in vars(_cabling).items() if name.isupper() and isinstance(value, str)}
    missing = {word for word in known - {_cabling.SPARE} if f"| {word} |" not in section("cable_check")}
    assert known and not missing


def test_every_verdict_of_an_hca_is_explained() -> None:
    known = words(r'(?:return|verdict, problem =) "([a-z0-9-]+)"', "_roce") | {"pinned"}
    assert len(known) > 8
    assert not {word for word in known if not re.search(rf"(?<![\w-]){word}(?![\w-])", section("roce_info"))}


def test_every_finding_on_a_log_is_explained() -> None:
    known = words(r'(?:REFUSE|WARN|severity), "([a-z-]+)"', "_nccl_causes", "_nccl_verdict", "_nccl_library")
    assert len(known) > 20
    assert not {word for word in known if f"`{word}`" not in section("nccl_verdict")}


def test_the_marks_are_those_of_the_gate() -> None:
    rows = {"ring of three": ("ring", 3), "pair": ("pair", 2), "longer ring": ("ring", 4), "switched": ("switched", 3)}
    for title, topology in rows.items():
        marks = _gate.marks(*topology, "nccl")
        assert f"| {title} | {marks['all']:g} | {marks['pair']:g} |" in section("fabric_gate")
