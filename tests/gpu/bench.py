# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Times the ops at the shapes of DeepSeek V4.1: python -m tests.gpu.bench FOLDER (with ceiling.json in it) -> FOLDER/results.json

A cell is a CUDA graph of calls in a row, each with weights of its own, so that they come from memory and not from the cache;
the median of its replays over the number of calls. Limits come from the same run: packed bytes over the copy bandwidth, or
weights over the decode ceiling, whichever takes longer.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gb10_exl3 import native, ops

SHAPES = [(5120, 1536), (5120, 2304), (768, 5120), (1152, 5120), (5120, 1280), (1280, 24576), (2304, 5120), (5120, 4608)]
ROWS = [1, 2, 6, 12, 64, 1024]
MUL1 = 2
EXPERTS, TOP, HIDDEN, INTER = 384, 6, 5120, 2304
COLD_BYTES = 256 << 20  # of weights in a graph: several times the cache


def measure(calls: list[Callable[[], None]], replays: int = 15) -> float:
    """Microseconds per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _replay in range(replays + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return round(statistics.median(times[2:]), 2)


def copy_gbs() -> float:
    """Bytes read and written per second by a large copy, in 1e9. Outside of a graph, whose copies take a slower engine."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _copy in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(2 * source.numel() / statistics.median(times[2:]) / 1e6, 1)


def words(*shape: int) -> torch.Tensor:
    """Any words are a valid trellis."""
    return torch.randint(-32768, 32767, shape, dtype=torch.int16, device="cuda")


def scales(*shape: int) -> torch.Tensor:
    """Scales around one over the root of a thousand, of either sign."""
    return (torch.randn(shape, device="cuda") * 0.03).half()


def linear_cell(k: int, n: int, bits: int, m: int) -> float:
    """One matrix, half precision."""
    size = k * n * bits // 8
    count = max(2, min(96, COLD_BYTES // size)) if m <= ops.DENSE_ROWS else 4
    trellis, suh, svh = words(count, k // 16, n // 16, 16 * bits), scales(count, k), scales(count, n)
    x, out = torch.randn(m, k, device="cuda").half(), torch.empty(m, n, device="cuda", dtype=torch.float16)
    workspace = torch.empty(ops.linear_workspace(m, k, n), dtype=torch.uint8, device="cuda")

    def call(i: int) -> Callable[[], None]:
        return lambda: ops.linear_out(x, [trellis[i]], [suh[i]], [svh[i]], [MUL1], None, workspace, out)

    return measure([call(i) for i in range(count)])


def moe_cells(tp: int, bits: int, limit: Callable[[float, int], float]) -> list[dict[str, Any]]:
    """One layer of experts, split over tp ranks, with random routing."""
    inter = INTER // tp
    shapes = [(HIDDEN, inter), (HIDDEN, inter), (inter, HIDDEN)]
    layers = [[words(EXPERTS, k // 16, n // 16, 16 * bits), scales(EXPERTS, k), scales(EXPERTS, n)] for k, n in shapes]
    rows = []
    for tokens in ROWS:
        count = 12 if tokens <= 12 else 2
        x, out = torch.randn(tokens, HIDDEN, device="cuda").half(), torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.float16)
        ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices.contiguous() for _call in range(count)]
        weights = torch.full((tokens, TOP), 1 / TOP, device="cuda")
        workspace = torch.empty(ops.moe_workspace(tokens, TOP, HIDDEN, inter), dtype=torch.uint8, device="cuda")

        def call(
            routing: torch.Tensor, x: Any = x, out: Any = out, weights: Any = weights, workspace: Any = workspace
        ) -> Callable[[], None]:
            return lambda: ops.moe_out(x, weights, routing, *layers, [MUL1] * 3, 10.0, None, workspace, out)

        us = measure([call(routing) for routing in ids])
        distinct = statistics.mean(len(routing.unique()) for routing in ids)
        rows.append(
            {"tokens": tokens, "tp": tp, "K": bits, "us": us, "peer_us": None, "limit_us": limit(distinct * 3 * HIDDEN * inter, bits)}
        )
        print(rows[-1])
    return rows


def main(folder: Path) -> None:
    """Writes results.json; prints each row as it comes."""
    ceiling = json.loads((folder / "ceiling.json").read_text())
    copy = copy_gbs()

    def limit(weights: float, bits: int) -> float:
        return round(max(weights * bits / 8 / (copy * 1e3), weights / ceiling[str(bits)] * 1e6), 2)

    linear = []
    for k, n in SHAPES:
        for bits in (2, 3, 4, 5):
            for m in ROWS:
                us = linear_cell(k, n, bits, m)
                linear.append({"k": k, "n": n, "K": bits, "m": m, "us": us, "peer_us": None, "limit_us": limit(k * n, bits)})
        print([(row["K"], row["m"], row["us"]) for row in linear if (row["k"], row["n"]) == (k, n)], k, n)
    rows = [row for tp in (2, 3) for bits in (3,) for row in moe_cells(tp, bits, limit)]
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(smi, check=True, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    result = {
        "card": card, "driver": driver, "torch": torch.__version__, "commit": os.environ.get("COMMIT"), "sources_sha256": native.digest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "copy_gbs": copy, "decode_ceiling_weights_per_s": ceiling,
        "linear": linear, "moe": rows,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
