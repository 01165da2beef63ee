# SPDX-License-Identifier: Apache-2.0
"""Weights of virtual heads: what a checkpoint of 64 heads in 8 output groups gives a model that was built with 72 in 9.

The tensors that come in are padded, never sized from the parameter, so it does not matter how a quantization method lays its parameters out.
Rows of wq_b and wo_a repeat the last real group, scales included: no block of zeros meets a quantizer. Columns of wo_b are zeros, which alone
takes the invented heads out of the result; sinks are minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gb10_vllm.config import GROUPS, HEADS
from gb10_vllm.errors import OverlayError

_ONE_E8M0 = 127
"""The byte of a scale of 1: zero times any scale is zero, but a scale byte of 0 is a denormal that kernels treat in different ways."""


def padded(tensor: torch.Tensor, dim: int, real: int, groups: int, repeat: bool) -> torch.Tensor:
    """The tensor with `groups` groups along `dim` instead of `real`; the new ones repeat the last, or are zeros."""
    size = tensor.shape[dim]
    if size % real:
        raise OverlayError(f"virtual heads: a tensor of shape {list(tensor.shape)} does not divide into {real} groups")
    more = size // real * (groups - real)
    # torch.cat knows no float8: bytes will do.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    if repeat:
        extra = raw.narrow(dim, size - size // real, size // real)
        extra = torch.cat([extra] * (groups - real), dim)
    else:
        shape = [*raw.shape]
        shape[dim] = more
        extra = raw.new_full(shape, _ONE_E8M0 if tensor.dtype == torch.float8_e8m0fnu else 0)
    result = torch.cat([raw, extra], dim)
    return result.view(tensor.dtype) if tensor.element_size() == 1 else result


def _wrap(parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    load = parameter.weight_loader

    def loader(target: nn.Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return load(target, change(loaded), *args, **kwargs)

    try:
        parameter.weight_loader = loader
    except AttributeError:  # vLLM's own parameter classes have a property
        parameter._weight_loader = loader


def _sized(parameter: nn.Parameter, name: str, default: int) -> int | None:
    """The dimension to pad. EXL3's vectors along the other side have none; native scales say nothing and lie as their weights."""
    found = getattr(parameter, name, None)
    return default if found is None and not getattr(parameter, "exl3", False) else found


def pad_loaders(attentions: Iterable[nn.Module], real: Mapping[str, int], ranks: int) -> int:
    """Makes every attention layer's loaders pad. Returns how many layers."""
    count = 0
    for attention in attentions:
        heads, groups = attention.n_heads, attention.n_groups
        if groups % ranks:
            raise OverlayError(f"{groups} output groups do not divide by {ranks} ranks: set GB10_VIRTUAL_TP to {ranks}")
        count += 1

        def sinks(tensor: torch.Tensor, heads: int = heads) -> torch.Tensor:
            if tensor.numel() != real[HEADS]:
                raise OverlayError(f"attn_sink has {tensor.numel()} heads, expected {real[HEADS]}: the checkpoint is of another model")
            return torch.cat([tensor, tensor.new_full((heads - real[HEADS],), -float("inf"))])

        _wrap(attention.attn_sink, sinks)
        for linear, side, default, repeat in (
            (attention.wq_b, "output_dim", 0, True),
            (attention.wo_a, "output_dim", 0, True),
            (attention.wo_b, "input_dim", 1, False),
        ):
            for parameter in linear.parameters(recurse=False):
                dim = _sized(parameter, side, default)
                if dim is None:
                    continue

                def change(tensor: torch.Tensor, dim: int = dim, groups: int = groups, repeat: bool = repeat) -> torch.Tensor:
                    return padded(tensor, dim, real[GROUPS], groups, repeat)

                _wrap(parameter, change)
    return count
