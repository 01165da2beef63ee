# SPDX-License-Identifier: Apache-2.0
"""Layers of DeepSeek V4.1 whose sizes do not divide by the ranks. vLLM takes them by the name of the class that they stand for.

Each does what its base does unless the size in question does not divide, so they change nothing for a model whose sizes do.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE, ParallelLMHead, VocabParallelEmbedding

from gb10_vllm.exl3.config import Exl3Config
from gb10_vllm.geometry import BLOCK, vocabulary_step


def _step(kwargs: dict[str, Any], granule: int) -> None:
    if kwargs.get("disable_tp") or kwargs.get("parallel_group") is not None:
        return
    step = max(granule, kwargs.get("padding_size", DEFAULT_VOCAB_PADDING_SIZE))
    kwargs["padding_size"] = vocabulary_step(get_tensor_model_parallel_world_size(), step)


class Gb10VocabParallelEmbedding(VocabParallelEmbedding):
    """A vocabulary padded to whole parts: 129280 over three ranks are 129408."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _step(kwargs, DEFAULT_VOCAB_PADDING_SIZE)
        super().__init__(*args, **kwargs)


class Gb10ParallelLMHead(ParallelLMHead):
    """The same for the output head; of an EXL3 head, which vLLM's model would build dense, each part is whole blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        granule = DEFAULT_VOCAB_PADDING_SIZE
        quantization = get_current_vllm_config().quant_config
        if isinstance(quantization, Exl3Config) and quantization.matrices_of(kwargs.get("prefix", "")):
            kwargs["quant_config"] = quantization
            granule = BLOCK * get_tensor_model_parallel_world_size()
        _step(kwargs, granule)
        super().__init__(*args, **kwargs)


class Gb10ColumnParallelLinear(ColumnParallelLinear):
    """Engram's projection is replicated where its 25600 outputs do not divide; its result is gathered anyway."""

    def __init__(self, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
        whole = kwargs.get("gather_output") and kwargs.get("prefix", "").endswith(".engram.wkv")
        if whole and output_size % (BLOCK * get_tensor_model_parallel_world_size()):
            kwargs["disable_tp"] = True
        super().__init__(input_size, output_size, *args, **kwargs)


def install() -> None:
    """Once per process; the second time nothing."""
    for name, layer in (
        ("VocabParallelEmbedding", Gb10VocabParallelEmbedding),
        ("ParallelLMHead", Gb10ParallelLMHead),
        ("ColumnParallelLinear", Gb10ColumnParallelLinear),
    ):
        if op_registry_oot.get(name) is not layer:
            PluggableLayer.register_oot(layer, name=name)
