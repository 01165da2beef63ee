# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has no form on a CPU: the output projection with vLLM's rotation kernel before it, and the allocator's release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gb10_vllm import levers, memory

from tests.overlay import checkpoints as made
from tests.overlay import engine
from tests.overlay.test_numbers import TOKENS, close

pytestmark = [pytest.mark.usefixtures("plugin"), pytest.mark.skipif(engine.DEVICE == "cpu", reason="wants a GPU")]


def _turned(heads: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] with the pairs at its end turned by their positions, as attention leaves them."""
    cos, sin = cache[positions].chunk(2, -1)
    plain, pairs = heads.float().split([heads.shape[-1] - cache.shape[-1], cache.shape[-1]], -1)
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([plain, pairs], -1).to(heads.dtype)


def _projected(rank: int, count: int, port: int, config: Any) -> list[Any]:
    with engine.Rank(rank, count, port, config) as one:
        attention = one.finished().language_model.model.layers[2].attn
        heads = values().to(engine.DEVICE)
        cache = attention.rotary_emb.cos_sin_cache.to(engine.DEVICE)
        result = []
        for positions in (torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS) * 97):
            positions = positions.to(engine.DEVICE)
            result.append(attention._o_proj(_turned(heads, positions, cache), positions).float().cpu().numpy())
        return result


def values() -> torch.Tensor:
    """Attention's result before its heads are turned."""
    return torch.randn(TOKENS, made.HEADS, made.HEAD, generator=torch.Generator().manual_seed(9)).bfloat16()


def test_the_output_projection_turns_heads_back(checkpoint: Any) -> None:
    folder, tensors = checkpoint("all")
    name, heads = "layers.2.attn", values().double().numpy().reshape(TOKENS, made.GROUPS, -1)
    groups = [heads[:, group] @ made.dense(tensors, f"{name}.wo_a.slice.{group}") for group in range(made.GROUPS)]
    wanted = torch.cat([torch.from_numpy(group) for group in groups], 1).numpy() @ made.dense(tensors, f"{name}.wo_b")
    ((still, turned),) = engine.run(1, _projected, folder)
    close(still, wanted, "at position 0")
    close(turned, wanted, "at other positions")


def _released(rank: int, count: int, port: int, config: Any) -> tuple[int, int, int]:
    def reserved() -> int:
        return torch.cuda.memory_reserved() >> 20

    release = memory.PrefillRelease()
    held = torch.empty(256 << 20, dtype=torch.uint8, device=engine.DEVICE)
    del held
    before = reserved()
    assert not release.before_step(12, 2)
    between = reserved()
    assert release.before_step(8192, 1)
    return before, between, reserved()


def test_the_allocator_gives_back_what_a_chunk_left(checkpoint: Any) -> None:
    folder, _tensors = checkpoint("all")
    margin = str(2 * memory.meminfo()["MemAvailable"])
    ((before, between, after),) = engine.run(1, _released, folder, **{levers.PREFILL_RELEASE.variable: margin})
    assert before == between >= 256 > after
