# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks that share the indexer's rows of a prefill: vLLM's operator, its own plan of who has which row, its own exchange, over gloo.

A card's kernels (DeepGEMM, top-k, candidates, gather of keys) are written here in plain PyTorch, row by row, as they are documented.
"""

from __future__ import annotations

import os
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.overlay import ranks

pytestmark = pytest.mark.usefixtures("plugin")

HEADS, WIDTH, TOPK, BLOCK, BLOCKS = 2, 128, 4, 3, 2
DECODES = 3
"""Tokens of other requests before those of the prefill."""
LAYERS = ("plain", "source", "consumer", "consumer")
STEPS = {
    "one long request in four launches": ([40], [25], [7]),
    "three requests in one launch": ([9, 30, 17], [4, 12, 17], [100]),
    "both": ([40, 6, 8, 33], [21, 3, 8, 10], [8, 100, 4]),
    "a request that has no keys yet": ([1, 20], [1, 13], [5]),
}
"""Lengths, new tokens of each request, and how many rows a launch takes, in turn."""


def launches(module: Any, lengths: list[int], news: list[int], sizes: list[int], ratio: int) -> list[Any]:
    """What vLLM's metadata kernel makes of a step: a launch is rows of one request, or whole requests together."""
    chunks, request, turn = [], 0, 0
    offsets = [DECODES, *accumulate(news, initial=DECODES)][1:]
    while request < len(lengths):
        size, last = sizes[turn % len(sizes)], request + 1
        turn += 1
        while last < len(lengths) and sum(news[request : last + 1]) <= size:
            last += 1
        keys = [length // ratio for length in lengths[request:last]]
        rows = [
            (sum(keys[:place]), (lengths[one] - news[one] + row + 1) // ratio)
            for place, one in enumerate(range(request, last))
            for row in range(news[one])
        ]
        sums = torch.tensor([0, *accumulate(keys)], dtype=torch.int32)
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            if sum(keys):
                chunks.append(
                    module.DeepseekV32IndexerPrefillChunkMetadata(
                        block_table=torch.arange(request, last, dtype=torch.int32)[:, None],
                        cu_seqlen_ks=torch.tensor([start for start, _seen in part], dtype=torch.int32),
                        cu_seqlen_ke=torch.tensor([start + seen for start, seen in part], dtype=torch.int32),
                        cu_seq_lens=sums, token_to_seq=sums, total_seq_lens=sum(keys), max_seqlen_k=max(keys),
                        token_start=offsets[request] + first, token_end=offsets[request] + first + len(part), num_reqs=last - request,
                        skip_kv_gather=first > 0, local_cu_seq_lens=sums, local_total_seq_lens=sum(keys), max_local_total_seq_lens=sum(keys),
                    )
                )  # fmt: skip
        request = last
    return chunks


def gather(cache: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, sums: torch.Tensor) -> None:
    for number, request in enumerate(table[:, 0].tolist()):
        first, end = sums[number : number + 2].tolist()
        values[first:end] = cache[request, : end - first, :WIDTH].view(values.dtype)
        scales[first:end] = cache[request, : end - first, WIDTH:]


def logits(q: Any, k: Any, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    scored.append(len(starts))
    found = torch.full((len(starts), width), -torch.inf)
    for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        keys = k[0][first:end].float() * k[1][first:end, None]
        found[row, : end - first] = (weights[row] @ (q[0][row].float() @ keys.T).relu()) if end > first else 0
    return found


def select(scores: torch.Tensor, _starts: Any, ends: torch.Tensor, count: int, size: int, out: torch.Tensor) -> None:
    for row, end in enumerate(ends.tolist()):
        best = [max(scores[row, first : min(first + size, end)].tolist()) for first in range(0, end, size)]
        best = [*best[:-1], torch.inf] if best else []
        order = sorted(range(len(best)), key=lambda block: -best[block])[:count]
        out[row] = torch.tensor(order + [-1] * (count - len(order)))


def mask(scores: torch.Tensor, _starts: Any, _ends: torch.Tensor, candidates: torch.Tensor, size: int) -> None:
    for row in range(len(scores)):
        kept = torch.isin(torch.arange(scores.shape[1]) // size, candidates[row])
        scores[row, ~kept] = -torch.inf


def best(scores: torch.Tensor, _starts: Any, ends: torch.Tensor, out: torch.Tensor, _rows: int, _s0: int, _s1: int, count: int) -> None:
    for row, end in enumerate(ends.tolist()):
        order = [key for key in scores[row, :end].argsort(descending=True, stable=True).tolist() if scores[row, key] > -torch.inf][:count]
        out[row] = torch.tensor(order + [-1] * (count - len(order)), dtype=out.dtype)


scored: list[int] = []


def all_gatherv(local: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """As a rank's communicator on a card, which the one of a CPU lacks."""
    assert dim == 0 and len(local) == sizes[dist.get_rank()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return torch.cat(parts)


def _step(rank: int, count: int, _port: int, step: str, ratio: int, minimum: int) -> tuple[list[list[list[int]]], int]:
    """The keys that each layer's rows get, and the rows that this rank scored."""
    import gb10_vllm.indexer as ours
    from vllm.model_executor.layers import sparse_attn_indexer as vllms
    from vllm.v1.attention.backends.mla import indexer as plans

    dist.init_process_group("gloo", rank=rank, world_size=count)
    scored.clear()
    lengths, news, sizes = STEPS[step]
    rows = DECODES + sum(news)
    random = torch.Generator().manual_seed(rows)
    tokens = [torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, news)]

    def planned(_self: Any) -> Any:
        """vLLM's own division of rows, as its build takes it from the configuration."""
        shares = plans.balanced_prefill_row_shard(*tokens, ratio, count, config.attention_config.indexer_tp_shard_min_rows)
        prefill = plans.DeepseekV32IndexerPrefillMetadata(launches(plans, lengths, news, sizes, ratio), row_shard_sizes=shares)
        return plans.DeepseekV32IndexerMetadata(
            seq_lens=tokens[0], max_seq_len=max(lengths), slot_mapping=torch.arange(rows), num_decodes=0, num_decode_tokens=DECODES,
            num_prefills=len(news), num_prefill_tokens=sum(news), prefill=prefill,
        )  # fmt: skip

    def workspace(*specifications: Any) -> list[torch.Tensor]:
        """Whatever memory holds: what is not gathered is seen as wrong keys."""
        return [torch.randint(0, 100, (*shape,), dtype=torch.uint8).repeat(1, kind.itemsize).view(kind) for shape, kind in specifications]

    config = SimpleNamespace(attention_config=SimpleNamespace(indexer_tp_shard_min_rows=65536))
    context = SimpleNamespace(cudagraph_runtime_mode=None)
    group = SimpleNamespace(all_gatherv=all_gatherv, world_size=count)
    with (
        mock.patch.dict(os.environ, GB10_INDEXER_SPLIT=str(minimum)),
        mock.patch.object(ours, "_build", planned),
        mock.patch.object(plans.DeepseekV32IndexerMetadataBuilder, "build", planned),
        mock.patch.object(ours, "get_forward_context", lambda: context),
        mock.patch.multiple(
            vllms, get_forward_context=lambda: context, get_tensor_model_parallel_rank=lambda: rank, get_tp_group=lambda: group,
            current_workspace_manager=lambda: SimpleNamespace(get_simultaneous=workspace), fp8_fp4_mqa_logits=logits,
            _select_candidate_blocks=select, _apply_candidate_mask=mask,
        ),
        mock.patch.object(vllms.ops, "cp_gather_indexer_k_quant_cache", gather, create=True),
        mock.patch.object(vllms.ops, "top_k_per_row_prefill", best, create=True),
    ):  # fmt: skip
        ours.install(config)
        context.attn_metadata = {"cache": plans.DeepseekV32IndexerMetadataBuilder.build(None)}
        buffer = torch.empty(rows, TOPK, dtype=torch.int32)
        candidates = torch.full((rows, BLOCKS), -1, dtype=torch.int32)
        found = []
        for layer in LAYERS:
            values = torch.randn(len(lengths), max(lengths), WIDTH, generator=random).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.rand(len(lengths), max(lengths), 1, generator=random).view(torch.uint8)
            queries = torch.randn(rows, HEADS, WIDTH, generator=random).to(torch.float8_e4m3fn)
            weights = torch.randn(rows, HEADS, generator=random)
            torch.ops.vllm.sparse_attn_indexer(
                torch.empty(rows, 1), "cache", torch.cat([values, scales], 2), queries, None, None, weights, WIDTH, None, TOPK, WIDTH,
                1024, sum(lengths), buffer, True, False, False, "", candidate_blocks=None if layer == "plain" else candidates,
                candidate_block_size=BLOCK, candidate_write=layer == "source",
            )  # fmt: skip
            found.append(buffer.tolist())
    return found, sum(scored)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_rows_that_ranks_share_get_the_keys_that_one_rank_finds(step: str, ratio: int) -> None:
    ((alone, all_rows),) = ranks.run(1, _step, step, ratio, 0)
    assert len({str(layer) for layer in alone}) == len(LAYERS)
    for count in (2, 3):
        answers = ranks.run(count, _step, step, ratio, 1)
        for found, _rows in answers:
            assert found == alone
        shares = [rows for _found, rows in answers]
        assert sum(shares) == all_rows and min(shares) > 0


def test_a_step_of_fewer_rows_is_left_to_each_rank() -> None:
    ((alone, all_rows),) = ranks.run(1, _step, "both", 1, 0)
    for found, rows in ranks.run(2, _step, "both", 1, sum(STEPS["both"][1]) + 1):
        assert (found, rows) == (alone, all_rows)


@pytest.mark.parametrize(("ratios", "dense"), [((1, 2), True), ((1, 1), False)])
def test_layers_that_would_not_agree_on_whose_a_row_is_are_refused(
    monkeypatch: pytest.MonkeyPatch, ratios: tuple[int, int], dense: bool
) -> None:
    """A candidate of one layer must be there for the row's rank in the next; a layer that scores candidates alone plans its rows itself."""
    from gb10_vllm import indexer
    from gb10_vllm.errors import OverlayError
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    monkeypatch.setenv("GB10_INDEXER_SPLIT", "64")
    model = torch.nn.ModuleList()
    for ratio in ratios:
        layer, operator = (
            kind.__new__(kind) for kind in (indexer.attention.DeepseekV4Indexer, SparseAttnIndexer if dense else torch.nn.Module)
        )
        for part in (layer, operator):
            torch.nn.Module.__init__(part)
        layer.compress_ratio, layer.indexer_op, operator.candidate_blocks = ratio, operator, torch.empty(1)
        model.append(layer)
    with pytest.raises(OverlayError, match="set GB10_INDEXER_SPLIT=0"):
        indexer.check(model)
