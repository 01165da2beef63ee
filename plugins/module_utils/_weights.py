# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank keeps of a checkpoint in memory, from the headers of its files and the engine's sharding rules.

Rules: MiaAI-Lab's weight_budget.py (what is replicated), vLLM 0.33's DeepSeek V4.1 (padded groups, vocabulary and widths; MXFP8 scales per row)
and EXL3's parallel form (trellis and one of the two vectors are divided, whole 128-wide blocks). A tensor that no rule knows counts whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from . import _padding
from ._engram import is_table
from ._safetensors import Tensor

_EXL3 = {"trellis", "suh", "svh", "su", "sv"}
_SUFFIXES = {"weight", "scale", "bias", "mcg", "mul1", *_EXL3}
_AXES = {
    "column": {"weight": 0, "scale": 0, "bias": 0, "trellis": 1, "svh": 0, "sv": 0},
    "row": {"weight": 1, "scale": 1, "trellis": 0, "suh": 0, "su": 0},
}
"""Which axis of a tensor the ranks divide: a trellis lies as [inputs, outputs, bits], a weight as [outputs, inputs]."""
_SCALE_ROWS = 32
"""Rows to which one stored scale applies; loaded, every row has its own (MXFP8)."""


@dataclass(frozen=True)
class Rule:
    """How a matrix is divided: the axis, and the units that stay whole. `part` is its line in the report."""

    pattern: re.Pattern[str]
    part: str
    way: str = ""
    unit: str = "width"


def _rules(*rows: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(Rule(re.compile(pattern), *rest) for pattern, *rest in rows)


RULES = _rules(
    (r"^(model\.)?(vision|visual|aligner|image_)", "vision"),
    (r"\.(markov_head|confidence_head|main_proj)\b", "other"),
    (r"(^|\.)(embed|embed_tokens|head|lm_head)$", "vocabulary", "column", "vocabulary"),
    (r"\.shared_experts?\.(w1|w3|gate_proj|up_proj)$", "shared experts", "column"),
    (r"\.shared_experts?\.(w2|down_proj)$", "shared experts", "row"),
    (r"\.experts\.\d+\.(w1|w3|gate_proj|up_proj)$", "experts", "column", "expert"),
    (r"\.experts\.\d+\.(w2|down_proj)$", "experts", "row", "expert"),
    (r"\.attn\.(wq_b|wo_a)$", "attention", "column", "groups"),
    (r"\.attn\.wo_a\.slice\.\d+$", "attention", "whole", "groups"),
    (r"\.attn\.wo_b$", "attention", "row", "groups"),
    (r"\.attn\.", "attention"),
    (r"\.self_attn\.q_proj$", "attention", "column", "heads"),
    (r"\.self_attn\.(k|v)_proj$", "attention", "column", "kv_heads"),
    (r"\.self_attn\.o_proj$", "attention", "row", "heads"),
    (r"\.mlp\.(gate_proj|up_proj)$", "dense", "column"),
    (r"\.mlp\.down_proj$", "dense", "row"),
)
_REST = Rule(re.compile(""), "other")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_DRAFT = re.compile(r"^(model\.)?mtp\.")


@dataclass(frozen=True)
class Sharding:
    """How a group divides a checkpoint: the number of ranks, and what it loads."""

    ranks: int
    expert_parallel: bool = False
    draft: bool = False
    vision: bool = False
    resident_tables: bool = False


@dataclass
class Weights:
    """Bytes of the rank that has most, by part; what stays on the disk; EXL3 bits by layer as (gate and up, down)."""

    parts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    bits: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of the rank."""
        return sum(self.parts.values())


class Model:
    """The numbers of a config.json that the division depends on: the real ones, also where the file reports padded heads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = {**config, **(config.get(_padding.TEXT) or {})}
        text |= text.get(_padding.FROM) or {}
        self.text = text
        self.groups = int(text.get("o_groups") or 0)
        self.heads = int(text.get("num_attention_heads") or 1)
        self.kv_heads = int(text.get("num_key_value_heads") or self.heads)
        self.experts = int(text.get("n_routed_experts") or text.get("num_experts") or text.get("num_local_experts") or 1)
        self.draft_experts = int(text.get("dspark_n_routed_experts") or self.experts)


def weigh(tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], sharding: Sharding) -> Weights:
    """What the largest rank holds of these tensors (name, tensor)."""
    model, weights = Model(config), Weights()
    named = dict(tensors)
    for name, tensor in named.items():
        module, _dot, suffix = name.rpartition(".")
        if suffix not in _SUFFIXES:
            module, suffix = name, "weight"
        draft = bool(_DRAFT.match(module))
        rule = _rule_of(_NUMBER.sub("0", module))
        part = "draft" if draft else rule.part
        if is_table(name):
            part, resident = "engram", sharding.resident_tables
            size = -(-tensor.size // sharding.ranks)
        else:
            resident = not (draft and not sharding.draft) and not (rule.part == "vision" and not sharding.vision)
            size = _share(rule, module, suffix, tensor, model, sharding) * _growth(suffix, tensor, named.get(f"{module}.weight"))
        (weights.parts if resident else weights.left_out)[part] += size
        if suffix == "trellis":
            _note_bits(weights.bits, module, tensor)
    return weights


@cache
def _rule_of(module: str) -> Rule:
    """The rule of a module whose numbers are all 0: there are some dozens of these among 190,000 tensors."""
    return next((rule for rule in RULES if rule.pattern.search(module)), _REST)


def _share(rule: Rule, module: str, suffix: str, tensor: Tensor, model: Model, sharding: Sharding) -> int:
    """Bytes of one tensor in the rank with the largest part."""
    whole = tensor.size
    if not rule.way:
        return whole
    ranks = sharding.ranks
    if rule.unit == "expert" and sharding.expert_parallel:
        experts = model.draft_experts if _DRAFT.match(module) else model.experts
        return _part(whole, experts, -(-experts // ranks))
    axis = 0 if rule.way == "whole" else _AXES[rule.way].get(suffix)
    if axis is None or axis >= len(tensor.shape):
        return whole
    length = tensor.shape[axis] * (16 if suffix == "trellis" else 1)
    units = {"groups": model.groups, "heads": model.heads, "kv_heads": model.kv_heads}.get(rule.unit) or length
    if rule.unit == "vocabulary":
        return _part(whole, length, _padding.padded_vocabulary(length, ranks) // ranks)
    if rule.unit in ("width", "expert") and suffix in _EXL3 and length % _padding.EXL3_GRANULE == 0:
        units = length // _padding.EXL3_GRANULE
    return _part(whole, units, -(-units // ranks))


def _part(whole: int, units: int, own: int) -> int:
    return -(-whole * own // units)


def _growth(suffix: str, tensor: Tensor, weight: Tensor | None) -> int:
    """How many times a tensor is written out at load: the block scales of float8 matrices become one a row."""
    blocks = suffix == "scale" and weight is not None and weight.dtype == "F8_E4M3"
    return _SCALE_ROWS if blocks and weight and tensor.shape[0] * _SCALE_ROWS == weight.shape[0] else 1


def _note_bits(bits: dict[int, tuple[float, float]], module: str, tensor: Tensor) -> None:
    """Bits per weight of a layer's routed experts, which are equal for all of them."""
    match = re.match(r"^(?:model\.)?layers\.(\d+)\..*\.experts\.0\.(w1|w2|gate_proj|down_proj)$", module)
    if match:
        layer, value = int(match[1]), tensor.shape[-1] / 16
        up, down = bits.get(layer, (value, value))
        bits[layer] = (up, value) if match[2] in ("w2", "down_proj") else (value, down)
