# SPDX-License-Identifier: Apache-2.0
"""The ops of gb10_exl3 on a CPU, by its reference in numpy, from the moment that this is imported. For small models: nothing here is fast."""

from __future__ import annotations

import gb10_exl3.ops  # noqa: F401  (defines the ops)  # pylint: disable=unused-import
import numpy as np
import torch
from gb10_exl3.format import CODEBOOKS, Layer, engram_rows, moe
from torch import Tensor

_NAMES = {number: name for name, number in CODEBOOKS.items()}


def _layer(trellis: Tensor, suh: Tensor | None, svh: Tensor | None, codebook: int) -> Layer:
    return Layer(trellis.numpy(), *(vector.numpy() for vector in (suh, svh)), _NAMES[codebook])


def dequant(trellis: Tensor, suh: Tensor | None, svh: Tensor | None, codebook: int, dtype: torch.dtype) -> Tensor:
    """[k, n]."""
    if suh is None:
        plain = (torch.ones(16 * size, dtype=torch.float16) for size in trellis.shape[:2])
        return torch.from_numpy(_layer(trellis, *plain, codebook).rotated()).to(dtype)
    return torch.from_numpy(_layer(trellis, suh, svh, codebook).dense()).to(dtype)


def linear(x: Tensor, trellis: list[Tensor], suh: list[Tensor], svh: list[Tensor], codebooks: list[int], bias: Tensor | None) -> Tensor:
    """[m, n of all shards]."""
    rows = x.double().numpy()
    shards = [_layer(*one).linear(rows) for one in zip(trellis, suh, svh, codebooks, strict=True)]
    y = torch.from_numpy(np.concatenate(shards, 1))
    return (y if bias is None else y + bias.double()).to(x.dtype)


def experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor], codebooks: list[int],
    limit: float, expert_map: Tensor | None,
) -> Tensor:  # fmt: skip
    """[m, hidden]. Only experts that are asked for are decoded."""
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where((ids >= 0) & (ids < len(expert_map)), expert_map.long()[ids.clamp(0, len(expert_map) - 1)], -1)
    wanted = sorted({int(i) for i in ids.reshape(-1) if 0 <= i < gate[0].shape[0]})
    layers = [
        tuple(_layer(*(t[i] for t in matrix), book) for matrix, book in zip((gate, up, down), codebooks, strict=True)) for i in wanted
    ]
    places = torch.full((gate[0].shape[0] + 1,), -1, dtype=torch.int64)
    places[wanted] = torch.arange(len(wanted))
    outside = (ids < 0) | (ids >= gate[0].shape[0])
    local = torch.where(outside, -1, places[ids.clamp(0, gate[0].shape[0])])
    return torch.from_numpy(moe(x.double().numpy(), local.numpy(), topk_weights.double().numpy(), layers, limit)).to(x.dtype)


def engram_gather(weight: Tensor, scale: Tensor, ids: Tensor, offset: int) -> Tensor:
    """[r, width] bfloat16."""
    rows = ids - offset
    inside = (rows >= 0) & (rows < weight.shape[0])
    picked = rows.clamp(0, max(0, weight.shape[0] - 1))
    values = engram_rows(weight.view(torch.uint8)[picked].numpy(), scale.view(torch.uint8)[picked].numpy())
    return torch.where(inside[:, None], torch.from_numpy(values), 0.0).to(torch.bfloat16)


def engram_gather_out(weight: Tensor, scale: Tensor, ids: Tensor, offset: int, out: Tensor) -> None:
    """See engram_gather."""
    out.copy_(engram_gather(weight, scale, ids, offset))


# For tensors on a CPU alone; it lasts as long as this object.
_LIBRARY = torch.library.Library("gb10_exl3", "IMPL")
for _name, _function in (
    ("dequant", dequant),
    ("linear", linear),
    ("moe", experts),
    ("engram_gather", engram_gather),
    ("engram_gather_out", engram_gather_out),
):
    _LIBRARY.impl(_name, _function, "CPU")
