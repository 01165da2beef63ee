# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The same calls by exllamav3, for comparison: the folder of its unpacked wheel in $EXLLAMAV3, its extension built there or beside it.

Its own Python chooses between kernels; here each path that could serve a cell is called directly, as that code calls it, and
the fastest counts. What it does on the host between two launches (sorting ids, reading counts back) is done before timing.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_COOP_SLOTS = 256  # (token, expert) pairs of its cooperative path
FUSED_ROWS = 256  # of one expert in its fused path with wide tiles
ROW_TILES = ((64, 33, FUSED_ROWS), (32, 17, 32), (16, 1, 16))  # rows per tile, for experts of so many rows: a launch each
Calls = list[Callable[[], Any]]


@cache
def extension() -> Any:
    """Its compiled module, or None where there is no exllamav3. Only that is imported: the package itself wants a tokenizer."""
    if "EXLLAMAV3" not in os.environ:
        return None
    package = types.ModuleType("exllamav3")
    package.__path__ = [os.path.join(os.environ["EXLLAMAV3"], "exllamav3")]
    sys.modules["exllamav3"] = package
    return importlib.import_module("exllamav3.ext").exllamav3_ext


def version() -> str | None:
    """Its version."""
    return str(importlib.import_module("exllamav3.version").__version__) if extension() else None


def linear(x: Tensor, trellis: Tensor, suh: Tensor, svh: Tensor, bits: float, out: Tensor) -> dict[str, Calls]:
    """Paths for one of each of the stacked matrices (codebook mul1), by name."""
    ext, count = extension(), trellis.shape[0]
    k, n = x.shape[1], out.shape[1]
    if x.shape[0] <= 144:
        scratch = torch.empty_like(x[:1])
        layers = [ext.BC_LinearEXL3(trellis[i], suh[i], svh[i], bits, None, False, True, scratch) for i in range(count)]
        return {"kernel": [lambda layer=layer: layer.run(x, out) for layer in layers]}
    dense, rotated = torch.empty(k, n, dtype=torch.half, device="cuda"), torch.empty_like(x)

    def folded(i: int) -> None:
        ext.reconstruct_had_slice(dense, trellis[i], suh[i], svh[i], bits, False, True, 0)
        ext.hgemm_recon(x, dense, out)

    def apart(i: int) -> None:
        ext.had_r_128(x, rotated, suh[i], None, 1.0)
        ext.reconstruct(dense, trellis[i], bits, False, True)
        ext.hgemm_recon(rotated, dense, out)
        ext.had_r_128(out, out, None, svh[i], 1.0)

    return {path.__name__: [lambda i=i, path=path: path(i) for i in range(count)] for path in (folded, apart)}


def _addresses(matrix: list[Tensor]) -> list[Tensor]:
    """Of each expert's trellis, suh and svh."""
    return [torch.tensor([expert.data_ptr() for expert in tensor], device="cuda") for tensor in matrix]


def moe(x: Tensor, ids: list[Tensor], weights: Tensor, matrices: list[list[Tensor]], bits: float, limit: float) -> dict[str, Calls]:
    """Paths for each of the routings, by name; a call returns its result."""
    ext, (tokens, hidden), top = extension(), x.shape, ids[0].shape[1]
    experts, inter = matrices[0][2].shape
    gate, up, down = [_addresses(matrix) for matrix in matrices]
    half = weights.half().contiguous()
    halves = {"dtype": torch.half, "device": "cuda"}
    result: dict[str, Calls] = {}
    if tokens * top <= MAX_COOP_SLOTS:
        slots, out = tokens * top, torch.empty(tokens, hidden, device="cuda")
        rotated = [torch.empty(slots, hidden, **halves) for _matrix in range(2)]
        inner = [torch.empty(slots, inter, **halves) for _matrix in range(3)]
        rows = torch.empty(slots, hidden, device="cuda")
        counters = torch.zeros(slots * (inter // 128) + tokens * (hidden // 128) + 2 * slots + 3, dtype=torch.int, device="cuda")

        def coop(routing: Tensor) -> Tensor:
            ext.exl3_moe_coop(
                x, routing, half, -1, -1, hidden, *gate, *up, *down, None, None, None, bits, bits, bits, False, True, 0, limit, True,
                *rotated, *inner, rows, counters, out, None, None,
            )  # fmt: skip
            return out

        result["cooperative"] = [lambda routing=routing: coop(routing) for routing in ids]
    groups = ext.exl3_moe_max_concurrency(0)
    states = [torch.empty(groups, FUSED_ROWS, hidden, **halves) for _matrix in range(2)]
    inners = [torch.empty(groups, FUSED_ROWS, inter, **halves) for _matrix in range(2)]

    def fused(routing: Tensor) -> Callable[[], Tensor]:
        flat = routing.reshape(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=experts + 1)
        token, weight = torch.arange(tokens, device="cuda").repeat_interleave(top)[order], half.reshape(-1)[order]
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device="cuda"))
        start = torch.cumsum(counts, 0) - counts
        tables = torch.stack([start, start, (counts > 0).long()])
        scratch, total = torch.empty(len(flat), hidden, device="cuda"), torch.zeros(tokens, hidden, device="cuda")
        tiles = [((-1, 1, FUSED_ROWS), 16)]  # so few rows that it need not know the counts
        if tokens * top > FUSED_ROWS:
            tiles = [((int(((counts >= low) & (counts <= high)).sum()), low, high), tile) for tile, low, high in ROW_TILES]

        def call() -> Tensor:
            total.zero_()
            for (active, low, high), tile in tiles:
                if active:
                    ext.exl3_moe(
                        x, total, counts, token, weight, *states, *inners, 0, bits, bits, bits, *gate, *up, *down,
                        False, True, False, True, False, True, limit, active, scratch, tables[0], low, high, tile,
                    )  # fmt: skip
            ext.exl3_moe_gather(total, scratch, flat, inverse, *[tables[row, :experts] for row in (1, 0, 2)], weight)
            return total

        return call

    result["fused"] = [fused(routing) for routing in ids]
    return result
