# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is published about the kernels belongs to these sources, and keeps to what GB10 allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gb10_exl3 import native
from gb10_exl3.format import RATES

from tests.gpu import table

RESOURCES: dict[str, Any] = json.loads((table.KERNELS / "results/resources.json").read_text())
RESULTS: dict[str, Any] = json.loads((table.KERNELS / "results/h200.json").read_text())
KERNELS = [(arch, name) for arch, kernels in RESOURCES["kernels"].items() for name in kernels]


def test_reports_are_of_these_sources() -> None:
    assert RESOURCES["sources_sha256"] == native.digest()
    assert RESULTS["sources_sha256"] == native.digest()
    assert set(RESOURCES["kernels"]) == set(native.ARCHITECTURES)
    # Times of earlier sources must say so, here and to the reader.
    if RESULTS["timed_sources_sha256"] != native.digest():
        assert RESULTS["timed_before"] in " ".join((table.KERNELS / "README.md").read_text().split())


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


def test_no_time_is_below_its_limit() -> None:
    assert all(row["us"] >= row["limit_us"] > 0 for row in RESULTS["linear"] + RESULTS["moe"])
