# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer in a prefill: a smaller buffer for its keys, and its rows shared by the ranks.

vLLM's buffer is 16 to 40 times the context (`attention_config.sparse_mla_prefill_workspace_factor`, at least 2, times 8), so that one step may
gather the keys of many requests. A request needs its own context once; a step that holds more is split into more launches, with the same result.

A row's scores and its best keys depend on no other row, so each rank may do a part of them and give the numbers of the keys, 2 KiB a row and
layer, to the others. vLLM does so from 65536 rows on, which no step of a Spark has, and not in the layers that filter candidates, which are five of
eight and see the most keys. But a layer's candidates are made and read by the rank that has the row: nothing more needs to be exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard, SparseAttnIndexer, sparse_attn_indexer
from vllm.models.deepseek_v41 import attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _resolve_layer_name, vllm_lib
from vllm.v1.attention.backends.mla import indexer

from gb10_vllm.errors import OverlayError
from gb10_vllm.levers import INDEXER_FACTOR, INDEXER_SPLIT
from gb10_vllm.log import say

_build = indexer.DeepseekV32IndexerMetadataBuilder.build
_score = sparse_attn_indexer.__wrapped__
_PARAMETERS = inspect.signature(_score)


def entries(vllm_config: Any) -> int:
    """Keys that the buffer holds, before compression: factor times the context."""
    return INDEXER_FACTOR.amount() * vllm_config.model_config.max_model_len


def own(chunks: Iterable[Any], shard: PrefillRowShard) -> list[Any]:
    """The launches of a step with this rank's rows alone.

    A launch that goes on with the keys of the one before it gathers them itself where that one is another rank's.
    """
    kept: list[Any] = []
    gathered = False
    for chunk in chunks:
        gathered = gathered and chunk.skip_kv_gather
        window = shard.narrow(chunk)
        if window is None:
            continue
        first, end, starts, ends = window
        kept.append(replace(chunk, token_start=first, token_end=end, cu_seqlen_ks=starts, cu_seqlen_ke=ends, skip_kv_gather=gathered))
        gathered = True
    return kept


def shard_of(metadata: Any) -> PrefillRowShard | None:
    """This rank's rows of a step; None where each rank scores all, or there is no prefill in it."""
    return metadata.prefill and PrefillRowShard.from_metadata(metadata.prefill, metadata.num_decode_tokens)


def build(self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's plan of a step, of which this rank scores its own rows."""
    metadata = _build(self, *args, **kwargs)
    shard = shard_of(metadata)
    if shard is not None:
        metadata.prefill.chunks = own(metadata.prefill.chunks, shard)
    return metadata


@eager_break_during_capture
def score(hidden_states: Any, k_cache_prefix: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's operator, with the exchange that it leaves out where there are candidates. A step without a prefill is left after two looks."""
    buffer = _score(hidden_states, k_cache_prefix, *args, **kwargs)
    step = get_forward_context().attn_metadata
    shard = shard_of(step[_resolve_layer_name(k_cache_prefix)]) if isinstance(step, dict) else None
    if shard is not None:
        given = _PARAMETERS.bind(hidden_states, k_cache_prefix, *args, **kwargs).arguments
        if given.get("candidate_blocks") is not None:
            shard.exchange_topk(buffer, given["topk_tokens"])
    return buffer


def install(vllm_config: Any) -> None:
    """Before a model is built: the layer and the metadata that splits steps must agree, and each looks the size up by this name."""
    if INDEXER_FACTOR.amount() and attention.get_max_prefill_buffer_size is not entries:
        for module in (attention, indexer):
            module.get_max_prefill_buffer_size = entries
        say(f"indexer buffer of {INDEXER_FACTOR.amount()} times the context")
    if INDEXER_SPLIT.amount():
        vllm_config.attention_config.indexer_tp_shard_min_rows = INDEXER_SPLIT.amount()
        if indexer.DeepseekV32IndexerMetadataBuilder.build is not build:
            indexer.DeepseekV32IndexerMetadataBuilder.build = build
            vllm_lib.impl("sparse_attn_indexer", score, dispatch_key=current_platform.dispatch_key, allow_override=True)


def check(model: nn.Module) -> None:
    """Say that rows are shared, once a model is built. Raises OverlayError where its layers would not agree on whose a row is."""
    if not INDEXER_SPLIT.amount():
        return
    layers = [layer for layer in model.modules() if isinstance(layer, attention.DeepseekV4Indexer)]
    dense = all(isinstance(layer.indexer_op, SparseAttnIndexer) for layer in layers)
    if not dense or len({layer.compress_ratio for layer in layers if layer.indexer_op.candidate_blocks is not None}) > 1:
        raise OverlayError(
            f"the indexers of this model cannot share rows: set {INDEXER_SPLIT.variable}=0, or leave attention_config.indexer_sparse_logits off"
        )
    ranks = get_tensor_model_parallel_world_size()
    if layers:
        say(f"indexer's rows shared by {ranks} ranks from {INDEXER_SPLIT.amount()} on, in {len(layers)} layers")
