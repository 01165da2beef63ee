# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two ways in which a GB10 is slow while nvidia-smi shows nothing, told apart from measured series.

Clock latch: the embedded controller holds the GPU at 631 to 949 MHz under load; a reboot does not help. Hidden slow state:
matrix-vector products run at about 70 instead of 230 GB/s while copies keep their speed, mostly after idling.
Sources: tonyd2wild (docs/gpu-clock-latch.md, gpuflip.py) and bot-lab-21 (the floors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from ._findings import REFUSE, WARN, Finding

# The series of a probe, one value a second, and their units. The first four are those of gpuflip.py; `burn` is a product of
# 4096-cubes in fp16 for 15 s, during which clock and power are read.
UNITS = {
    "gemv_duty": "GB/s",
    "gemv_cont": "GB/s",
    "mm_duty": "TFLOPS",
    "copy_cont": "GB/s",
    "burn": "TFLOPS",
    "sm_clock": "MHz",
    "power": "W",
}
GEMV_FLOOR_GBPS = 150
"""bot-lab-21's gate, between about 70 (slow) and about 230 (fast)."""
BURN_FLOOR_TFLOPS = 50
"""bot-lab-21's floor; a healthy GPU has 75 to 90."""
LATCHED_MHZ = 950
"""The highest clock of a latched GPU; a healthy one runs at 2200 to 2400 under load."""
COPY_HOLDS = 2.0
"""Copies that are so many times as fast as products say that the memory is well and the clock is not (derived: 230 / 70 is 3.3)."""
LEAST_SAMPLES = 5
"""Fewer seconds than this say nothing about a state that flips."""

_SAMPLE = re.compile(r"S\s+\S+\s+(\w+)\s+([0-9.]+)\s*")


def parse_series(text: str) -> dict[str, list[float]]:
    """A probe's `S EPOCH KIND VALUE` lines as series by kind; other lines and other kinds are left out."""
    series: dict[str, list[float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match and match[1] in UNITS:
            series.setdefault(match[1], []).append(float(match[2]))
    return series


def judge_gpu(series: Mapping[str, Sequence[float]]) -> list[Finding]:
    """What the series say against the GPU; empty when it is well. What was not measured is not judged, but nothing at all is refused."""
    known = {kind: values for kind, values in series.items() if kind in UNITS and len(values) >= LEAST_SAMPLES}
    if not {"burn", "gemv_duty", "gemv_cont"} & set(known):
        return [
            Finding(
                REFUSE, "gpu-unmeasured", f"the GPU probe recorded no series of {LEAST_SAMPLES} s or more: run it again, alone on the GPU"
            )
        ]
    findings = []
    if latch := _burn(known):
        findings.append(latch)
    # A latched clock slows everything else as well: one cause, one finding.
    if not latch:
        findings += [found for kind in ("gemv_duty", "gemv_cont") if kind in known and (found := _gemv(kind, known))][:1]
    return findings


def _burn(known: Mapping[str, Sequence[float]]) -> Finding | None:
    if "burn" not in known or median(known["burn"]) >= BURN_FLOOR_TFLOPS:
        return None
    speed = f"{median(known['burn']):.0f} TFLOPS under load instead of 75 to 90"
    evidence = ", ".join(f"{kind} {median(known[kind]):.0f} {UNITS[kind]}" for kind in ("burn", "sm_clock", "power") if kind in known)
    if "sm_clock" in known and median(known["sm_clock"]) <= LATCHED_MHZ:
        clock = f"{median(known['sm_clock']):.0f} MHz"
        cure = "take the power adapter out of the Spark for a minute, since a reboot does not help"
        return Finding(REFUSE, "gpu-clock-latch", f"the GPU is latched at {clock} and does {speed}: {cure}", evidence)
    cure = "look for another process on it and at its temperature, then measure again"
    return Finding(REFUSE, "gpu-slow", f"the GPU does {speed} though its clock is not latched: {cure}", evidence)


def _gemv(kind: str, known: Mapping[str, Sequence[float]]) -> Finding | None:
    values = known[kind]
    slow = [value for value in values if value < GEMV_FLOOR_GBPS]
    if not slow:
        return None
    evidence = f"{kind} p50 {median(values):.0f} GB/s, {len(slow)} of {len(values)} s below {GEMV_FLOOR_GBPS}"
    if median(values) >= GEMV_FLOOR_GBPS:
        sentence = f"the GPU was in its slow state for {len(slow)} of {len(values)} s: keep it warm (it falls into it when idle)"
        return Finding(WARN, "gpu-flips", sentence, evidence)
    reads = f"the GPU reads weights at {median(values):.0f} GB/s instead of about 230"
    if "copy_cont" in known and median(known["copy_cont"]) < COPY_HOLDS * median(values):
        sentence = f"{reads}, and copies are as slow: look for another process on its memory, then measure again"
        return Finding(REFUSE, "gpu-memory-slow", sentence, evidence)
    cure = "keep it busy for some minutes, or set `nvidia-smi -lgc 0,2200`, and measure again"
    return Finding(REFUSE, "gpu-slow-state", f"{reads}, the hidden slow state that nvidia-smi does not show: {cure}", evidence)
