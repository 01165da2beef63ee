# SPDX-License-Identifier: Apache-2.0
"""Routed experts in EXL3: each rank has all of them with its part of their width, or with expert parallelism some of them whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gb10_exl3.ops  # noqa: F401  (registers torch.ops.gb10_exl3)  # pylint: disable=unused-import
import torch
from gb10_exl3.format import CODEBOOKS
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3.checkpoint import Matrix
from gb10_vllm.exl3.linear import arrived, awaited, padded_copy, register_markers
from gb10_vllm.geometry import BLOCK, share

_ROLES = {"w1": 0, "w3": 1, "w2": 2}


class Exl3MoEMethod(FusedMoEMethodBase):
    """Gate and up in `w13_*` [2, experts, ...], down in `w2_*` [experts, ...]."""

    def __init__(self, moe: Any, experts: Sequence[tuple[Matrix, Matrix, Matrix]]) -> None:
        super().__init__(moe)
        self.experts = list(experts)

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_more: Any) -> tuple[int, int]:
        """A width that does not divide into blocks is padded: outputs of zero, whose inputs to `down` are zeros."""
        return hidden_size, share(self.experts[0][0].outputs, self.moe.moe_parallel_config.tp_size)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        gate, _up, down = self.experts[0]
        width = intermediate_size_per_partition
        if (gate.inputs, down.outputs) != (hidden_size, hidden_size) or down.inputs != gate.outputs or width % BLOCK:
            raise OverlayError(
                f"{gate.name} is {gate.inputs} x {gate.outputs} and {down.name} {down.inputs} x {down.outputs}, the model's hidden size is "
                f"{hidden_size}: the checkpoint is of another model"
            )
        if layer.activation.value != "silu" or layer.apply_router_weight_on_input:
            raise OverlayError(f"{layer.layer_name}: EXL3 experts compute silu, and weigh what comes out: this model does another thing")
        half = torch.float16
        shapes = {
            "w13_trellis": ((2, num_experts, hidden_size // 16, width // 16, gate.words), torch.int16),
            "w13_suh": ((2, num_experts, hidden_size), half),
            "w13_svh": ((2, num_experts, width), half),
            "w2_trellis": ((num_experts, width // 16, hidden_size // 16, down.words), torch.int16),
            "w2_suh": ((num_experts, width), half),
            "w2_svh": ((num_experts, hidden_size), half),
        }
        for name, (shape, dtype) in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": partial(self._load, layer), "exl3": True})
            layer.register_parameter(name, parameter)
        for stem, matrices in (("w13_", self.experts[0][:2]), ("w2_", self.experts[0][2:])):
            register_markers(layer, matrices, stem)
        awaited(layer, ((local, role, part) for local in range(num_experts) for role in _ROLES for part in ("trellis", "suh", "svh")))

    def _load(
        self,
        layer: nn.Module,
        parameter: nn.Parameter,
        loaded: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local == -1:
            return False if return_success else None
        matrix, part = self.experts[expert_id][_ROLES[shard_id]], weight_name.rpartition("_")[2]
        target = parameter.data[local] if shard_id == "w2" else parameter.data[_ROLES[shard_id], local]
        shapes = {"trellis": (matrix.inputs // 16, matrix.outputs // 16, matrix.words), "suh": (matrix.inputs,), "svh": (matrix.outputs,)}
        if tuple(loaded.shape) != shapes[part]:
            raise OverlayError(f"{matrix.name}.{part} is {list(loaded.shape)}, its header said {list(shapes[part])}: fetch the file again")
        layer.exl3_awaited.discard((local, shard_id, part))
        # Gate and up are split by outputs, down by inputs.
        side = 0 if shard_id == "w2" else 1
        starts = [0] * loaded.dim()
        dim = {"trellis": side, "suh": 0 if side == 0 else None, "svh": 0 if side == 1 else None}[part]
        if dim is not None:
            starts[dim] = self.moe.moe_parallel_config.tp_rank * target.shape[dim]
        padded_copy(target, loaded.view(torch.int16) if part == "trellis" else loaded, starts)
        return True if return_success else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        arrived(layer, layer.layer_name)
        gate, up = ([layer.w13_trellis.data[role], layer.w13_suh.data[role], layer.w13_svh.data[role]] for role in (0, 1))
        down = [layer.w2_trellis.data, layer.w2_suh.data, layer.w2_svh.data]
        layer.exl3_arguments = gate, up, down, [CODEBOOKS[matrix.codebook] for matrix in self.experts[0]]

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        limit = float(layer.swiglu_limit or 0.0)
        # vLLM's map is None unless experts are spread over the ranks.
        return torch.ops.gb10_exl3.moe(x, topk_weights.float(), topk_ids, *layer.exl3_arguments, limit, layer._expert_map)
