# SPDX-License-Identifier: Apache-2.0
"""vLLM's quantization method `exl3`: which layer is quantized, and who loads the others.

A layer is EXL3 when the checkpoint has a trellis for each of its parts. Everything else is loaded as the checkpoint's original was, by vLLM's own
method for it: an experts-only checkpoint keeps its attention in FP8, one that is quantized whole has bfloat16 beside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3 import checkpoint
from gb10_vllm.exl3.checkpoint import METHOD, Matrix

_LAYER = re.compile(r"layers\.(\d+)\.")
_V41_PACKED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "fused_wqa_wkv": ("wq_a", "wkv")}
_EXPERTS = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


class Exl3Config(QuantizationConfig):
    """Holds the matrices of the checkpoint; made in vLLM's head process and sent to its workers."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__()
        self.said = dict(said)
        self.matrices: dict[str, Matrix] = {}
        self.names: dict[str, str] = {}
        self.native: QuantizationConfig | None = None
        self.v41_layers = 0
        self.weight_block_size: list[int] | None = None

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90  # what the kernels are built for: 9.0a and 12.1a

    @staticmethod
    def get_config_filenames() -> list[str]:
        return [checkpoint.SEPARATE]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> str | None:
        return METHOD if isinstance(hf_quant_cfg, dict) and hf_quant_cfg.get("quant_method") == METHOD else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None, **more: Any) -> None:
        """Reads the checkpoint's headers. Raises OverlayError."""
        folder = Path(model_name)
        if not folder.is_dir():
            raise OverlayError(f"{model_name} is no folder: an EXL3 checkpoint is served from a folder that holds it")
        self.matrices, names, self.said = checkpoint.read(folder, self.said)
        self.said.pop("tensor_storage", None)  # tens of MiB, and looked at
        self.names = {name: name for name in self.matrices}
        if getattr(hf_config, "model_type", "") == "deepseek_v41":
            self.v41_layers = hf_config.num_hidden_layers
        original = self.said.get("original_quantization_config")
        if original:
            self.native = self._original(original)
            # Read by DeepSeek V4.1's loaders: what its FP8 layers call their scales, and whether they pad.
            if any(name.endswith(".scale") and ".experts." not in name and ".engram." not in name for name in names):
                self.weight_block_size = getattr(self.native, "weight_block_size", None)

    def _original(self, config: dict[str, Any]) -> QuantizationConfig:
        if self.v41_layers:
            from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

            return DeepseekV4FP8Config.from_config(config)
        from vllm.model_executor.layers.quantization import get_quantization_config

        return get_quantization_config(config["quant_method"]).from_config(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names of modules as the model calls them. DeepSeek V4.1 has more to it: see `_v41`."""
        if not self.v41_layers:
            renamed = {name: hf_to_vllm_mapper.apply_list([name]) for name in self.matrices}
            self.names = {new[0]: name for name, new in renamed.items() if new}

    def _v41(self, prefix: str) -> str:
        """A layer of DeepSeek V4.1 as its checkpoint calls it: no prefix, drafter layers under `mtp`, the output head `head`."""
        name = prefix.removeprefix("language_model.").removeprefix("model.")
        found = _LAYER.match(name)
        if found and int(found[1]) >= self.v41_layers:
            return f"mtp.{int(found[1]) - self.v41_layers}.{name[found.end() :]}"
        return {"lm_head": "head", "main_proj": "mtp.0.main_proj"}.get(name, name)

    def parts_of(self, prefix: str) -> list[str]:
        """What a layer is called in the checkpoint: one name, or one for each matrix that vLLM fuses into it."""
        prefix = prefix.removesuffix(".routed_experts")
        outer, _dot, last = (self._v41(prefix) if self.v41_layers else prefix).rpartition(".")
        packed = {**self.packed_modules_mapping, **(_V41_PACKED if self.v41_layers else {})}
        if last == "down_proj" and not outer.endswith("shared_experts"):
            packed.pop(last, None)
        return [f"{outer}.{part}" if outer else part for part in packed.get(last, (last,))]

    def matrices_of(self, prefix: str) -> list[Matrix]:
        """The matrices of a layer, in vLLM's order; empty for one that is not EXL3. Raises OverlayError where only some of them are."""
        parts = self.parts_of(prefix)
        found = [self.matrices[self.names[part]] for part in parts if part in self.names]
        if found and len(found) < len(parts):
            lacking = next(part for part in parts if part not in self.names)
            raise OverlayError(f"{found[0].name} is EXL3 and {lacking} is not, but vLLM keeps them in one layer: quantize both or neither")
        return found

    def groups_of(self, prefix: str) -> list[Matrix]:
        """The matrices of a projection that is stored as one for each output group; empty for another."""
        return checkpoint.slices(self.matrices, self.parts_of(prefix)[0])

    def experts_of(self, prefix: str, count: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        """Gate, up and down of each routed expert; empty for experts that are not EXL3. Raises OverlayError where they are not alike."""
        base = self.parts_of(prefix)[0]
        order = next((names for names in _EXPERTS if f"{base}.0.{names[0]}" in self.names), None)
        if order is None:
            return []
        result = []
        for expert in range(count):
            three = [self.matrices.get(self.names.get(f"{base}.{expert}.{part}", "")) for part in order]
            if None in three:
                raise OverlayError(f"{base}.{expert} is not EXL3, but expert 0 of its layer is: quantize all of a layer or none")
            result.append(tuple(three))
        for role in range(3):
            first = result[0][role]
            for three in result:
                one = three[role]
                if (one.bits, one.codebook, one.inputs, one.outputs) != (first.bits, first.codebook, first.inputs, first.outputs):
                    raise OverlayError(
                        f"{one.name} is {one.inputs} x {one.outputs} at {one.bits:g} bits in {one.codebook}, {first.name} {first.inputs} x "
                        f"{first.outputs} at {first.bits:g} in {first.codebook}: the experts of a layer must be alike"
                    )
        if result[0][0].bits != result[0][1].bits:
            raise OverlayError(f"{result[0][1].name} has {result[0][1].bits:g} bits and its gate {result[0][0].bits:g}: they must be equal")
        return result

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from gb10_vllm.exl3.linear import Exl3GroupedMethod, Exl3LinearMethod
        from gb10_vllm.exl3.moe import Exl3MoEMethod

        if isinstance(layer, RoutedExperts):
            experts = self.experts_of(prefix, layer.moe_config.num_logical_experts)
            if experts:
                return Exl3MoEMethod(layer.moe_config, experts)
            return self._native(layer, prefix) or UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, LinearBase | ParallelLMHead):
            groups = self.groups_of(prefix)
            if groups:
                return Exl3GroupedMethod(groups)
            matrices = self.matrices_of(prefix)
            if matrices:
                return Exl3LinearMethod(matrices)
        if isinstance(layer, LinearBase):
            return self._native(layer, prefix) or UnquantizedLinearMethod()
        return self._native(layer, prefix)

    def _native(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if self.native is None:
            return None
        self.native.packed_modules_mapping = self.packed_modules_mapping
        return self.native.get_quant_method(layer, prefix)
