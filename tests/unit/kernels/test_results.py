# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is published about the kernels belongs to these sources, and keeps to what GB10 allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gb10_exl3 import native
from gb10_exl3.format import RATES

from tests.gpu import table

RESOURCES: dict[str, Any] = json.loads((table.KERNELS / "results/resources.json").read_text())
RESULTS: dict[str, Any] = json.loads(table.RESULTS.read_text())
KERNELS = [(arch, name) for arch, kernels in RESOURCES["kernels"].items() for name in kernels]


def test_reports_are_of_these_sources() -> None:
    assert RESOURCES["sources_sha256"] == native.digest()
    assert RESULTS["sources_sha256"] == native.digest()
    assert set(RESOURCES["kernels"]) == set(native.ARCHITECTURES)


@pytest.mark.parametrize(("arch", "name"), KERNELS)
def test_a_kernel_fits(arch: str, name: str) -> None:
    """A block of GB10 has 99 KiB of shared memory. Registers that spill go to memory in the middle of decoding."""
    kernel = RESOURCES["kernels"][arch][name]
    assert 0 <= kernel["dynamic_shared_bytes"] + kernel["static_shared_bytes"] <= 99 * 1024
    assert kernel["spilled_bytes"] == 0


@pytest.mark.parametrize("arch", native.ARCHITECTURES)
def test_a_tile_takes_so_many_instructions(arch: str) -> None:
    """The survey's decode probe takes 42 to 49 at these rates: more would be a step back."""
    counts = RESOURCES["instructions_per_tile"][arch]
    assert [float(bits) for bits in counts] == list(RATES)
    assert all(counts[bits] <= most for bits, most in {"2": 43, "3": 48, "4": 42, "5": 49, "6": 49}.items())


def test_the_readmes_tables_are_the_results() -> None:
    text = (table.KERNELS / "README.md").read_text()
    assert table.with_tables(text, RESULTS) == text


def test_the_results_are_as_they_are_written() -> None:
    assert table.lines(RESULTS) == table.RESULTS.read_text()


def _run(folder: Path, **changed: str) -> Path:
    """What a run leaves, made up."""
    said = {
        "checks": "...\n3 passed in 1.00s\n",
        **dict.fromkeys(("memcheck", "initcheck", "synccheck"), "========= ERROR SUMMARY: 0 errors\n"),
        "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        "selfcheck": 'ok     decode\n{"device": "made up", "checks": {"decode": {"passed": true}}}\n',
    } | changed
    for step, text in said.items():
        (folder / f"{step}.txt").write_text(text)
    (folder / "results.json").write_text('{"card": "made up", "linear": [{"k": 1}, {"k": 2}], "moe": []}')
    return folder


def test_a_whole_run_is_published(tmp_path: Path) -> None:
    found = table.published(_run(tmp_path))
    assert found["checks"]["pytest"] == "3 passed"
    assert found["checks"]["selfcheck"] == "1 passed"
    assert set(found["checks"]["sanitizer"].values()) == {"0 errors", "0 hazards"}
    assert json.loads(table.lines(found)) == found


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("checks", "1 failed, 2 passed in 1.00s\n"),
        ("checks", "2 passed, 1 error in 1.00s\n"),
        ("memcheck", "========= ERROR SUMMARY: 10 errors\n"),
        ("racecheck", "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"),
        ("initcheck", ""),
        ("selfcheck", '{"checks": {"decode": {"passed": false}}}'),
    ],
)
def test_a_run_with_a_failure_is_not(tmp_path: Path, step: str, text: str) -> None:
    with pytest.raises(ValueError, match=step):
        table.published(_run(tmp_path, **{step: text}))


def test_no_time_is_below_its_limit() -> None:
    assert all(row["us"] >= row["limit_us"] > 0 for row in RESULTS["linear"] + RESULTS["moe"])
