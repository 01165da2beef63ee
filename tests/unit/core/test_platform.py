# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel, driver, firmware and the state of a GPU: what is known to work, what is known to fail, what is merely unknown.

All series here are synthetic, made from the ranges that the public reports name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils._findings import REFUSE, WARN, refused
from ansible_collections.gb10.cluster.plugins.module_utils._gpu import BURN_FLOOR_TFLOPS, GEMV_FLOOR_GBPS, judge_gpu, parse_series
from ansible_collections.gb10.cluster.plugins.module_utils._platform import (
    KNOWN_GOOD,
    differences,
    judge_platform,
    read_platform,
)
from hypothesis import given
from hypothesis import strategies as st

GOOD: dict[str, Any] = {
    "kernel": "6.17.0-1031-nvidia",
    "driver": "580.173.02",
    "firmware": {"rocep1s0f0": "28.45.4028"},
    "cmdline": "root=/dev/nvme0n1p2 ro quiet",
    "cma_total_kib": 131072,
    "cma_free_kib": 131000,
}
# Case C15.
BROKEN = {**GOOD, "kernel": "7.0.0-1019-nvidia", "driver": "580.178.04", "cma_total_kib": 0, "cma_free_kib": 9961472}


def codes(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.code) for finding in judge_platform(facts)]


def test_a_known_good_platform_has_no_finding() -> None:
    assert judge_platform(GOOD) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(REFUSE, "kernel-registration")]),
        ({"cmdline": "root=/dev/x kho=off"}, []),
        ({"cma_free_kib": 0}, [(REFUSE, "kernel-registration")]),
        ({"cma_total_kib": 131072, "cma_free_kib": 131000}, []),
        # Not a whole word: another parameter's value.
        ({"cmdline": "note=kho=off"}, [(REFUSE, "kernel-registration")]),
    ],
)
def test_the_triple_of_kernel_7_is_refused_and_nothing_less(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert codes({**BROKEN, **change}) == expected


def test_a_pair_or_firmware_that_no_report_names_is_only_told() -> None:
    assert codes({**GOOD, "driver": "590.1"}) == [(WARN, "platform-unknown")]
    assert codes({**GOOD, "firmware": {"rocep1s0f0": "28.47.1000"}}) == [(WARN, "firmware-unknown")]


def test_a_host_that_is_no_spark_is_judged_by_nothing() -> None:
    """A Debian kernel without CMA, without a driver, with a soft-RoCE device that has no firmware."""
    assert judge_platform({"kernel": "6.1.0-40-amd64", "cma_total_kib": 0, "cma_free_kib": 0, "firmware": {}}) == []
    assert judge_platform({}) == []


def test_members_that_differ_are_named_with_their_versions() -> None:
    (finding,) = differences({"a": GOOD, "b": {**GOOD, "kernel": "6.17.0-1032-nvidia"}, "c": {}})
    assert finding.code == "kernel-differs"
    assert "a 6.17.0-1031-nvidia, b 6.17.0-1032-nvidia" in finding.sentence
    assert differences({"a": GOOD, "b": GOOD}) == []


def test_facts_are_read_from_a_host(tmp_path: Path) -> None:
    files = {
        "proc/sys/kernel/osrelease": BROKEN["kernel"],
        "proc/cmdline": BROKEN["cmdline"],
        "proc/meminfo": "MemTotal:       127601216 kB\nCmaTotal:              0 kB\nCmaFree:         9961472 kB",
        "sys/module/nvidia/version": BROKEN["driver"],
        "sys/class/infiniband/rocep1s0f0/fw_ver": "28.45.4028",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert read_platform(str(tmp_path / "proc"), str(tmp_path / "sys")) == BROKEN
    assert read_platform(str(tmp_path / "none"), str(tmp_path / "none")) == {"firmware": {}}


def test_this_hosts_own_facts_can_be_read() -> None:
    assert read_platform()["kernel"]


@pytest.mark.parametrize(("kernel", "driver"), KNOWN_GOOD)
def test_no_known_good_pair_is_called_unknown(kernel: str, driver: str) -> None:
    assert codes({**GOOD, "kernel": kernel, "driver": driver or "590.1"}) == []


# The GPU ---------------------------------------------------------------------------------------------------------------------

HEALTHY = {
    "gemv_duty": [229.0, 231.5, 230.2] * 4,
    "copy_cont": [221.0] * 10,
    "burn": [82.0] * 15,
    "sm_clock": [2310.0] * 15,
    "power": [91.0] * 15,
}
SLOW = {**HEALTHY, "gemv_duty": [69.0, 71.2, 70.4] * 4}
LATCHED = {**SLOW, "burn": [27.0] * 15, "sm_clock": [851.0] * 15, "power": [18.0] * 15}


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (HEALTHY, []),
        ({"burn": HEALTHY["burn"]}, []),
        (LATCHED, [(REFUSE, "gpu-clock-latch")]),
        ({**LATCHED, "sm_clock": [2300.0] * 15}, [(REFUSE, "gpu-slow")]),
        ({"burn": LATCHED["burn"]}, [(REFUSE, "gpu-slow")]),
        (SLOW, [(REFUSE, "gpu-slow-state")]),
        ({"gemv_duty": SLOW["gemv_duty"]}, [(REFUSE, "gpu-slow-state")]),
        ({**SLOW, "copy_cont": [75.0] * 10}, [(REFUSE, "gpu-memory-slow")]),
        ({**HEALTHY, "gemv_cont": [230.0] * 8 + [70.0] * 3}, [(WARN, "gpu-flips")]),
        ({}, [(REFUSE, "gpu-unmeasured")]),
        ({"burn": [80.0]}, [(REFUSE, "gpu-unmeasured")]),
        ({"power": [80.0] * 10}, [(REFUSE, "gpu-unmeasured")]),
    ],
)
def test_the_states_of_a_gpu_are_told_apart(series: dict[str, list[float]], expected: list[tuple[str, str]]) -> None:
    assert [(finding.severity, finding.code) for finding in judge_gpu(series)] == expected


def test_a_probes_lines_are_read_and_others_are_not() -> None:
    text = "S 1764400000.1 gemv_duty 229.5\nBLOCK r0 gemv_duty GB/s 10 1 2 3 4\nS 1764400001 gemv_duty 70\nS 1 other 5\nS 1 burn 81.0\n"
    assert parse_series(text) == {"gemv_duty": [229.5, 70.0], "burn": [81.0]}


values = st.lists(st.floats(1, 400), min_size=5, max_size=30)


@given(gemv=values, burn=values)
def test_a_gpu_passes_exactly_when_every_second_is_above_the_floors(gemv: list[float], burn: list[float]) -> None:
    findings = judge_gpu({"gemv_duty": gemv, "burn": burn})
    assert (not findings) == (
        min(gemv) >= GEMV_FLOOR_GBPS and sorted(burn)[len(burn) // 2] + sorted(burn)[(len(burn) - 1) // 2] >= 2 * BURN_FLOOR_TFLOPS
    )
    assert len(refused(findings)) <= len(findings) <= 1
