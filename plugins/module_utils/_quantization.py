# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a checkpoint says of its quantization, and whether that agrees with itself and with the tensors.

EXL3 converters write `quantization_config` into config.json, quantization_config.json beside it, or both. K of a tensor always comes from
the shape of its trellis; these settings are read to find a checkpoint that was put together from two.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CONFIG, SEPARATE = "config.json", "quantization_config.json"
METHOD = "exl3"
NOT_QUANTIZED = 16
"""`head_bits` of an output head that was left as it is."""
_SHARED = ("quant_method", "bits", "head_bits", "mtp_bits", "codebook")
"""Keys that both files may hold; `version` is free text."""
_HEADS = ("lm_head", "head", "model.lm_head")


@dataclass(frozen=True)
class Quantization:
    """The settings as given; bits per weight may be fractions. `expert_bits`: (gate and up, down) of the layers that differ from `bits`."""

    version: str
    bits: float
    head_bits: float
    codebook: str
    expert_bits: dict[int, tuple[float, float]] = field(default_factory=dict)
    original_block: tuple[int, ...] = ()

    def of_layer(self, layer: int) -> tuple[float, float]:
        """Bits per weight of a layer's routed experts: gate and up, down."""
        return self.expert_bits.get(layer, (self.bits, self.bits))

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def read(config: Mapping[str, Any], separate: Mapping[str, Any]) -> tuple[Quantization | None, list[str]]:
    """The settings of config.json and of the file beside it (empty where there is none), and what contradicts, one sentence's end each.

    None for a checkpoint of another method.
    """
    inside = config.get("quantization_config") or {}
    both = {key: (inside[key], separate[key]) for key in _SHARED if key in inside and key in separate}
    problems = [
        f"says {key} {there}, {CONFIG} says {here}: the two are of different checkpoints"
        for key, (here, there) in both.items()
        if here != there
    ]
    data = {**separate, **inside}
    if data.get("quant_method") != METHOD:
        return None, problems
    try:
        expert_bits = {int(layer): (bits["gu"], bits["down"]) for layer, bits in (data.get("expert_bits") or {}).items()}
        original = (data.get("original_quantization_config") or {}).get("weight_block_size") or ()
        settings = Quantization(
            version=str(data.get("version", "")),
            bits=float(data["bits"]),
            head_bits=float(data.get("head_bits", 6)),  # the converter's default
            codebook=str(data.get("codebook", "")),
            expert_bits=expert_bits,
            original_block=tuple(original),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return None, [*problems, f"has EXL3 settings that cannot be read ({type(error).__name__}: {error})"]
    return settings, problems


def head_problem(settings: Quantization, names: Container[str]) -> str:
    """What is wrong with the output head among the tensors, as a sentence's end; empty when nothing is."""
    if settings.head_bits >= NOT_QUANTIZED:
        return ""
    for head in _HEADS:
        if f"{head}.weight" in names and f"{head}.trellis" not in names:
            return f"says head_bits {settings.head_bits:g}, but {head} is not quantized: the two are of different checkpoints"
    return ""
