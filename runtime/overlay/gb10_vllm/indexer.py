# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer's buffer for the keys of a prefill, smaller than vLLM takes it.

vLLM takes 16 to 40 times the context (`attention_config.sparse_mla_prefill_workspace_factor`, at least 2, times 8), so that one step may gather
the keys of many requests. A request needs its own context once; a step that holds more is split into more launches, with the same result.
"""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v41 import attention
from vllm.v1.attention.backends.mla import indexer

from gb10_vllm.levers import INDEXER_FACTOR
from gb10_vllm.log import say


def entries(vllm_config: Any) -> int:
    """Keys that the buffer holds, before compression: factor times the context."""
    return INDEXER_FACTOR.amount() * vllm_config.model_config.max_model_len


def install() -> None:
    """Before a model is built: the layer and the metadata that splits steps must agree, and each looks the size up by this name."""
    if not INDEXER_FACTOR.amount() or attention.get_max_prefill_buffer_size is entries:
        return
    for module in (attention, indexer):
        module.get_max_prefill_buffer_size = entries
    say(f"indexer buffer of {INDEXER_FACTOR.amount()} times the context")
