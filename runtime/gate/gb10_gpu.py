# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The speed of a GPU as series of one value a second, for states that nvidia-smi does not show. Runs inside the serving image.

    python3 gb10_gpu.py '{"seconds": 10, "burn_seconds": 15}'

Prints `S EPOCH KIND VALUE` lines, which module_utils/_gpu.py judges. What is measured is what gpuflip.py and gpu-clock-latch.md of
tonyd2wild measure: products of a few rows with a large matrix as in decoding, in bursts and without a pause; products of squares; copies;
and a burn of large products with clock and power read beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

ROWS, INNER, COLUMNS = 6, 5120, 16384
"""A decode step's product; its weights (168 MB in bf16) are several times any cache."""
SQUARE, BURN = 2048, 4096
COPY_BYTES = 64 << 20
BURST, PAUSE_S = 90, 0.03
"""Iterations of a burst, about 70 ms on a GB10, and the pause after it."""
CONTINUOUS = 30
"""Iterations between two looks at the clock where there is no pause."""


def tell(kind: str, value: float) -> None:
    """One second's value."""
    print(f"S {time.time():.1f} {kind} {value:.1f}", flush=True)


def series(kind: str, seconds: float, work: Callable[[], object], amount: float, repeat: int, pause: float) -> None:
    """Repeat `work`, of `amount` units each, and tell every second how many units a busy second had."""
    import torch

    def busy() -> float:
        begin = time.perf_counter()
        for _iteration in range(repeat):
            work()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    busy()  # the first call chooses kernels and loads them
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        spent, done, second = 0.0, 0, time.monotonic() + 1
        while time.monotonic() < second:
            spent += busy()
            done += repeat
            time.sleep(pause)
        tell(kind, done * amount / spent)
        if kind == "burn":
            clock_and_power()


def clock_and_power() -> None:
    """What nvidia-smi reads under load; nothing where it is not in the image."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        clock, power = (float(text) for text in done.stdout.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return
    tell("sm_clock", clock)
    tell("power", power)


def main() -> None:
    """Each series in turn; nothing else may use the GPU meanwhile."""
    import torch

    spec = json.loads(sys.argv[1])
    seconds = spec["seconds"]

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    rows, weights = random(ROWS, INNER, dtype=torch.bfloat16), random(INNER, COLUMNS, dtype=torch.bfloat16)
    square, large = random(SQUARE, SQUARE, dtype=torch.float16), random(BURN, BURN, dtype=torch.float16)
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    weight_gb, copy_gb = weights.numel() * 2 / 1e9, 2 * COPY_BYTES / 1e9
    series("gemv_duty", seconds, lambda: rows @ weights, weight_gb, BURST, PAUSE_S)
    series("gemv_cont", seconds, lambda: rows @ weights, weight_gb, CONTINUOUS, 0)
    series("mm_duty", seconds, lambda: square @ square, 2 * SQUARE**3 / 1e12, BURST, PAUSE_S)
    series("copy_cont", seconds, lambda: target.copy_(source), copy_gb, CONTINUOUS, 0)
    series("burn", spec["burn_seconds"], lambda: large @ large, 2 * BURN**3 / 1e12, CONTINUOUS, 0)


if __name__ == "__main__":
    main()
