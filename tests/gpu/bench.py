# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Times the ops at the shapes of DeepSeek V4.1: python -m tests.gpu.bench FOLDER (with ceiling.json in it) -> FOLDER/results.json

A cell is a CUDA graph of calls in a row, each with weights of its own, so that they come from memory and not from the cache;
the median of its replays over the number of calls. exllamav3 (peer.py) is measured the same way in the same run, beside each
cell. Limits come from that run too: the longest of packed bytes over the copy bandwidth, weights over the decode ceiling, and
operations over the rate of a large matrix product.
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

from tests.gpu import peer

SHAPES = [(5120, 1536), (5120, 2304), (768, 5120), (1152, 5120), (5120, 1280), (1280, 24576), (2304, 5120), (5120, 4608)]
ROWS = [1, 2, 6, 12, 64, 1024]
MUL1 = 2
BITS = (2, 3, 4, 5)
EXPERTS, TOP, HIDDEN, INTER = 384, 6, 5120, 2304
PEER_BOUND = 0.02  # how far a path may be off and still be the same product: its 8-bit activations make 0.8 %
COLD_BYTES = 256 << 20  # of weights in a graph: several times the cache


def measure(calls: list[Callable[[], None]], replays: int = 15) -> float:
    """Microseconds per call."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what fills the inputs runs on another stream
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


def product_tflops() -> float:
    """1e12 operations per second of a large matrix product by the library, half precision, random data."""
    a, b = torch.randn(8192, 8192, device="cuda").half(), torch.randn(8192, 8192, device="cuda").half()
    return round(2 * 8192**3 / measure([lambda: torch.mm(a, b)] * 4) / 1e6, 1)


def best_peer(paths: dict[str, peer.Calls], result: Callable[[], torch.Tensor], wanted: torch.Tensor) -> dict[str, Any]:
    """Its fastest path for a cell, after as many calls as it takes to choose its kernels; each must give what is wanted."""
    assert wanted.isfinite().all()
    found = {}
    for name, calls in paths.items():
        for call in calls * 2:
            call()
        calls[0]()
        distance = ((result().float() - wanted.float()).norm() / wanted.float().norm()).item()
        assert distance < PEER_BOUND, f"{name}: off by {distance}"
        found[name] = measure(calls)
    path = min(found, key=lambda name: found[name]) if found else None
    return {"peer_us": found[path] if path else None, "peer_path": path}


def words(*shape: int) -> torch.Tensor:
    """Any words are a valid trellis."""
    return torch.randint(-32768, 32767, shape, dtype=torch.int16, device="cuda")


def scales(*shape: int) -> torch.Tensor:
    """Scales around one over the root of a thousand, of either sign."""
    return (torch.randn(shape, device="cuda") * 0.03).half()


def linear_cell(k: int, n: int, bits: int, m: int) -> dict[str, Any]:
    """One matrix, half precision."""
    size = k * n * bits // 8
    count = max(2, min(96, COLD_BYTES // size)) if m <= ops.DENSE_ROWS else 4
    trellis, suh, svh = words(count, k // 16, n // 16, 16 * bits), scales(count, k), scales(count, n)
    x, out = torch.randn(m, k, device="cuda").half(), torch.empty(m, n, device="cuda", dtype=torch.float16)
    workspace = torch.empty(ops.linear_workspace(m, k, n), dtype=torch.uint8, device="cuda")

    def call(i: int) -> Callable[[], None]:
        return lambda: ops.linear_out(x, [trellis[i]], [suh[i]], [svh[i]], [MUL1], None, workspace, out)

    calls = [call(i) for i in range(count)]
    us = measure(calls)
    calls[0]()
    wanted = out.clone()
    theirs = best_peer(peer.linear(x, trellis, suh, svh, bits, out) if peer.extension() else {}, lambda: out, wanted)
    return {"us": us, **theirs}


def moe_cell(layers: list[list[torch.Tensor]], bits: int, tokens: int) -> tuple[dict[str, Any], float]:
    """A layer of experts with random routing; and how many experts that takes, on average."""
    inter, count = layers[0][2].shape[1], 12 if tokens <= 12 else 2
    x, out = torch.randn(tokens, HIDDEN, device="cuda").half(), torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.float16)
    ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices.contiguous() for _call in range(count)]
    weights = torch.full((tokens, TOP), 1 / TOP, device="cuda")
    workspace = torch.empty(ops.moe_workspace(tokens, TOP, HIDDEN, inter), dtype=torch.uint8, device="cuda")

    def call(routing: torch.Tensor) -> Callable[[], None]:
        return lambda: ops.moe_out(x, weights, routing, *layers, [MUL1] * 3, 0.0, None, workspace, out)

    us = measure([call(routing) for routing in ids])
    call(ids[0])()
    paths = peer.moe(x, ids, weights, layers, bits, 0.0) if peer.extension() else {}
    cell: dict[str, Any] = {"us": us, "peer_us": None, "peer_path": None}
    for name, calls in paths.items():
        theirs = best_peer({name: calls}, calls[0], out)
        if cell["peer_us"] is None or theirs["peer_us"] < cell["peer_us"]:
            cell |= theirs
    return cell, statistics.mean(len(routing.unique()) for routing in ids)


def main(folder: Path) -> None:
    """Writes results.json; prints each row as it comes."""
    ceiling = json.loads((folder / "ceiling.json").read_text())
    copy, product = copy_gbs(), product_tflops()

    def limit(weights: float, bits: int, operations: float) -> float:
        return round(max(weights * bits / 8 / (copy * 1e3), weights / ceiling[str(bits)] * 1e6, operations / product / 1e6), 2)

    linear, moe = [], []
    for k, n in SHAPES:
        for bits in BITS:
            for m in ROWS:
                cell = linear_cell(k, n, bits, m)
                linear.append({"k": k, "n": n, "K": bits, "m": m, **cell, "limit_us": limit(k * n, bits, 2 * m * k * n)})
        print([(row["K"], row["m"], row["us"], row["peer_us"]) for row in linear if (row["k"], row["n"]) == (k, n)], k, n)
    for tp in (2, 3):
        inter = INTER // tp
        for bits in BITS:
            shapes = [(HIDDEN, inter), (HIDDEN, inter), (inter, HIDDEN)]
            layers = [[words(EXPERTS, k // 16, n // 16, 16 * bits), scales(EXPERTS, k), scales(EXPERTS, n)] for k, n in shapes]
            for tokens in ROWS:
                cell, distinct = moe_cell(layers, bits, tokens)
                one = 3 * HIDDEN * inter  # weights of an expert
                row = {"tokens": tokens, "tp": tp, "K": bits, **cell, "limit_us": limit(distinct * one, bits, 2 * TOP * tokens * one)}
                moe.append(row)
                print(row)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(smi, check=True, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    result = {
        "card": card, "driver": driver, "torch": torch.__version__, "commit": os.environ.get("COMMIT"), "sources_sha256": native.digest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "peer": f"exllamav3 {peer.version()}" if peer.extension() else None,
        "copy_gbs": copy, "product_tflops": product, "decode_ceiling_weights_per_s": ceiling, "linear": linear, "moe": moe,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
