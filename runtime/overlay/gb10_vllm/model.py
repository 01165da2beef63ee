# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1 and its drafter: vLLM's own classes with padded loaders, EXL3 names, tables on disk and memory lines.

Imported when vLLM looks one of the two architectures up, so nothing here concerns another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM, DSparkDeepseekV4ForCausalLM
from vllm.models.deepseek_v41.attention import DeepseekV4Attention

from gb10_vllm import indexer, layers, memory
from gb10_vllm.config import FROM, GROUPS, HEADS
from gb10_vllm.engram import embedding
from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3.config import Exl3Config
from gb10_vllm.exl3.linear import Exl3GroupedMethod
from gb10_vllm.exl3.stream import prepared
from gb10_vllm.heads import pad_loaders
from gb10_vllm.levers import ENGRAM_DISK
from gb10_vllm.log import say

_TABLE = re.compile(r"(?:.*\.)?engram\.embed\.(?:weight|scale)")


def grouped_o_proj(self: nn.Module, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """vLLM's output projection with `wo_a` in EXL3: the same inverse rotation of positions, unquantized, then one matrix for each group."""
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant

    rotated, _scale = fused_inv_rope_fp8_quant(
        attn_out[:, : self.n_local_heads],
        positions,
        self.rotary_emb.cos_sin_cache,
        n_groups=self.n_local_groups,
        heads_per_group=self.n_local_heads // self.n_local_groups,
        nope_dim=self.nope_head_dim,
        rope_dim=self.rope_head_dim,
        quant_group_size=self._einsum_recipe[2],
        tma_aligned_scales=self._tma_aligned_scales,
        quantize=False,
    )
    return self._wo_b_proj(self.wo_a.quant_method.apply(self.wo_a, rotated).flatten(1))


def finish(model: nn.Module, config: Any) -> None:
    """What is left to do to a model that vLLM has built."""
    attentions = [module for module in model.modules() if isinstance(module, DeepseekV4Attention)]
    for attention in attentions:
        if isinstance(attention.wo_a.quant_method, Exl3GroupedMethod):
            attention._o_proj = MethodType(grouped_o_proj, attention)
    indexer.check(model)
    real: Mapping[str, int] | None = getattr(config, FROM, None)
    if real:
        ranks = get_tensor_model_parallel_world_size()
        pad_loaders(attentions, real, ranks)
        say(
            f"virtual heads: {real[HEADS]} heads in {real[GROUPS]} groups run as {config.num_attention_heads} in {config.o_groups} "
            f"for {ranks} ranks"
        )


def stream(
    model: nn.Module, vllm_config: Any, weights: Iterable[tuple[str, torch.Tensor]], head: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors as vLLM's loaders take them."""
    quantization = vllm_config.quant_config
    if isinstance(quantization, Exl3Config):
        # Where images are turned off their parameters come first, and have no memory.
        device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
        weights = prepared(weights, quantization.matrices, head, device)
    return iter(weights)


class Gb10DeepseekV41ForCausalLM(DeepseekV41ForCausalLM):
    """The target."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        layers.install()
        embedding.install()
        indexer.install(vllm_config)
        with memory.phase("build"):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._gb10_config = vllm_config
        finish(self, vllm_config.model_config.hf_config)

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM does not open a shard that has nothing but such tensors."""
        return embedding.enabled() and bool(_TABLE.fullmatch(name))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        used = (item for item in weights if not self.is_unused_checkpoint_weight(item[0]))
        with memory.phase("load_weights"):
            loaded = super().load_weights(stream(self, self._gb10_config, used, "language_model.lm_head"))
        folder = Path(self._gb10_config.model_config.model)
        # A checkpoint may come without its tables, and vLLM does not miss them: rows would be whatever memory held.
        unread = {name for name, _parameter in self.named_parameters() if name.endswith(".engram.embed_tokens.weight")} - loaded
        if unread:
            raise OverlayError(f"no file of {folder} has {min(unread)}: set {ENGRAM_DISK.variable} to the folder that has the tables")
        if folder.is_dir():
            memory.drop_page_cache(folder)
        return loaded

    def get_model_state_cls(self) -> type:
        return _with_release(super().get_model_state_cls())


class Gb10DSparkDeepseekV4ForCausalLM(DSparkDeepseekV4ForCausalLM):
    """The drafter. Its experts need not divide by the ranks: each rank has all of them, with a part of their width."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        layers.install()
        indexer.install(vllm_config)
        if vllm_config.parallel_config.enable_expert_parallel and self._uneven(vllm_config):
            raise OverlayError("the drafter's experts do not divide by the ranks: leave expert parallelism off")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._gb10_config = vllm_config
        finish(self, self.config)
        self.lm_head.exl3_awaited = set()  # the target's takes its place

    @staticmethod
    def _uneven(vllm_config: Any) -> bool:
        config = vllm_config.speculative_config.draft_model_config.hf_config
        return bool(getattr(config, "dspark_n_routed_experts", 0) % get_tensor_model_parallel_world_size())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        with memory.phase("load_drafter"):
            return super().load_weights(stream(self, self._gb10_config, weights, "lm_head"))


def _with_release(base: type) -> type:
    """vLLM's model state, which sees every step before it runs, with the allocator's release."""

    class Gb10ModelState(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.gb10_release = memory.PrefillRelease()

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            self.gb10_release.before_step(input_batch.num_tokens, input_batch.num_reqs)
            return super().prepare_inputs(input_batch, req_states)

    return Gb10ModelState
