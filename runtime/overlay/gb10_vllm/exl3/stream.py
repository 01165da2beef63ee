# SPDX-License-Identifier: Apache-2.0
"""Tensors of an EXL3 checkpoint of DeepSeek V4.1 on their way into vLLM's loaders, which know its original's names.

Most pass as they are. A matrix that vLLM keeps dense, because its code reads the weight itself, is decoded here, once; they are small (the
compressor's and the indexer's keys). Slices of `wo_a` are stacked. The output head gets the model's name for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import gb10_exl3.ops  # noqa: F401  (registers torch.ops.gb10_exl3)  # pylint: disable=unused-import
import torch
from gb10_exl3.format import CODEBOOKS

from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3.checkpoint import PARTS, Matrix, slices

_DENSE = re.compile(r".*\.attn\.(compressor\.(wkv|wgate)|indexer\.(wk|weights_proj))")
_SLICE = re.compile(r"(.*)\.slice\.(\d+)")
_NEEDED = ("trellis", "suh", "svh")


def decoded(matrix: Matrix, parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """[outputs, inputs] bfloat16, as vLLM keeps a dense weight."""
    trellis, suh, svh = (parts[part].to(device) for part in _NEEDED)
    return torch.ops.gb10_exl3.dequant(trellis.view(torch.int16), suh, svh, CODEBOOKS[matrix.codebook], torch.bfloat16).t()


def prepared(
    weights: Iterable[tuple[str, torch.Tensor]], matrices: Mapping[str, Matrix], head: str, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that vLLM's loaders take, from those of the checkpoint. `head`: the model's name for the output head.

    Raises OverlayError at the end for a matrix of which a part never came.
    """
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        module, _dot, part = name.rpartition(".")
        if part not in PARTS or module not in matrices:
            yield name, tensor
        elif _DENSE.fullmatch(module):
            own = waiting.setdefault(module, {})
            own[part] = tensor
            if all(needed in own for needed in _NEEDED):
                yield f"{module}.weight", decoded(matrices[module], waiting.pop(module), device)
        elif found := _SLICE.fullmatch(module):
            if part in _NEEDED:
                stack = waiting.setdefault(f"{found[1]}.{part}", {})
                stack[found[2]] = tensor
                groups = len(slices(matrices, found[1]))
                if len(stack) == groups:
                    waiting.pop(f"{found[1]}.{part}")
                    yield f"{found[1]}.{part}", torch.stack([stack[str(index)] for index in range(groups)])
            elif found[2] == "0":
                yield f"{found[1]}.{part}", tensor
        elif module == "head":
            yield f"{head}.{part}", tensor
        else:
            yield name, tensor
    # Markers may come after the three that matter.
    lacking = [name for name, own in waiting.items() if not set(own) <= {"mcg", "mul1"}]
    if lacking:
        raise OverlayError(f"{lacking[0]} is not whole in the checkpoint's files: fetch them again")
