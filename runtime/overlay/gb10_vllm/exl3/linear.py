# SPDX-License-Identifier: Apache-2.0
"""EXL3 matrices as vLLM's linear layers, fused ones and the output head; each rank with its part.

Parameters keep the checkpoint's names. Matrices that vLLM fuses may differ in bits, and each has its own input scales, so they stay apart: one
flat parameter holds their trellises one after the other, one launch serves them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gb10_exl3.ops  # noqa: F401  (registers torch.ops.gb10_exl3)  # pylint: disable=unused-import
import torch
from gb10_exl3.format import CODEBOOKS, MARKERS
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.utils import set_weight_attrs

from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3.checkpoint import Matrix
from gb10_vllm.geometry import BLOCK, share

_QKV = {"q": 0, "k": 1, "v": 2}
_MLP = (".gate_up_proj", ".down_proj")


@dataclass(frozen=True)
class Part:
    """A rank's part of one matrix: inputs from `first_input`, outputs from `first_output`; beyond the matrix's own sizes are zeros."""

    matrix: Matrix
    first_input: int
    inputs: int
    first_output: int
    outputs: int

    @property
    def words(self) -> int:
        """Elements of its trellis."""
        return self.inputs // 16 * (self.outputs // 16) * self.matrix.words


def _check_part(part: Part, prefix: str, ranks: int, rows: bool, columns: bool) -> None:
    """Raises OverlayError for a part that is no whole number of blocks, and for a side that is not split and not the matrix's."""
    matrix = part.matrix
    for what, size, own, split in (("inputs", part.inputs, matrix.inputs, rows), ("outputs", part.outputs, matrix.outputs, columns)):
        if size % BLOCK:
            raise OverlayError(
                f"{matrix.name}: {size} {what} for each of {ranks} ranks are no multiple of {BLOCK}: choose another number of ranks"
            )
        if not split and size != own and not prefix.endswith("lm_head"):
            raise OverlayError(f"{matrix.name} has {own} {what}, and {prefix} takes {size}: the checkpoint is of another model")


def padded_copy(target: torch.Tensor, source: torch.Tensor, starts: Sequence[int]) -> None:
    """target = the part of source that begins at `starts`; zeros beyond its end."""
    for dim, start in enumerate(starts):
        count = max(0, min(target.shape[dim], source.shape[dim] - start))
        if count < target.shape[dim]:
            target.narrow(dim, count, target.shape[dim] - count).zero_()
            target = target.narrow(dim, 0, count)
        source = source.narrow(dim, min(start, source.shape[dim]), count)
    target.copy_(source)


def awaited(layer: nn.Module, parts: Iterable[Hashable]) -> None:
    """What has to come before the layer may compute. vLLM itself does not look, for a quantized model."""
    layer.exl3_awaited = set(parts)


def arrived(layer: nn.Module, what: str) -> None:
    """Raises OverlayError where something never came: the parameter would hold whatever memory held."""
    if layer.exl3_awaited:
        lacking = min(str(one) for one in layer.exl3_awaited)
        raise OverlayError(f"{what}: {lacking} was in no file that was loaded: fetch the checkpoint again")


def marker_loader(matrices: Sequence[Matrix], name: str, parameter: nn.Parameter, loaded: torch.Tensor, *_place: Any, **_more: Any) -> bool:
    """The marker's presence was seen in the header; here its value is. Nothing is kept."""
    value = int(loaded.reshape(-1)[0]) & 0xFFFFFFFF
    if value != MARKERS[name]:
        raise OverlayError(
            f"{matrices[0].name}.{name} is {value:#x}, expected {MARKERS[name]:#x}: the matrix is coded for a kernel that is not known"
        )
    return True


def register_markers(layer: nn.Module, matrices: Sequence[Matrix], prefix: str = "") -> None:
    """Empty parameters by the markers' names, for vLLM to find."""
    for name in {matrix.codebook for matrix in matrices} & set(MARKERS):
        marker = nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
        set_weight_attrs(marker, {"weight_loader": partial(marker_loader, matrices, name), "exl3": True})
        layer.register_parameter(prefix + name, marker)


class Exl3LinearMethod(LinearMethodBase):
    """One matrix, or the matrices of a fused layer side by side."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = list(matrices)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        if len(output_partition_sizes) != len(self.matrices):
            raise OverlayError(f"{layer.prefix} has {len(output_partition_sizes)} parts in vLLM and {len(self.matrices)} in the checkpoint")
        rows = input_size_per_partition != input_size
        columns = sum(output_partition_sizes) != output_size
        ranks, rank = (layer.tp_size, layer.tp_rank) if rows or columns else (1, 0)
        parts = []
        for index, (matrix, outputs) in enumerate(zip(self.matrices, output_partition_sizes, strict=True)):
            inputs, place = input_size_per_partition, rank
            if columns and index and hasattr(layer, "num_kv_head_replicas"):
                place = rank // layer.num_kv_head_replicas
            elif layer.prefix.endswith(_MLP):
                # Any width will do between the two, so where blocks do not divide the ranks' parts are padded.
                inputs = share(matrix.inputs, ranks) if rows else inputs
                outputs = share(matrix.outputs, ranks) if columns else outputs
            part = Part(matrix, rank * inputs if rows else 0, inputs, place * outputs if columns else 0, outputs)
            _check_part(part, layer.prefix, ranks, rows, columns)
            parts.append(part)
        layer.exl3_parts = parts
        tensors = {
            "trellis": (torch.empty(sum(part.words for part in parts), dtype=torch.int16), 1, 0),
            "suh": (torch.empty(len(parts), parts[0].inputs, dtype=torch.float16), None, 0),
            "svh": (torch.empty(sum(part.outputs for part in parts), dtype=torch.float16), 0, None),
        }
        for name, (tensor, output_dim, input_dim) in tensors.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            # Dimensions of the checkpoint's tensor, for those who pad it on its way.
            given = {"weight_loader": partial(self._load, layer, name), "output_dim": output_dim, "input_dim": input_dim, "exl3": True}
            set_weight_attrs(parameter, given)
            layer.register_parameter(name, parameter)
        register_markers(layer, self.matrices)
        awaited(layer, ((index, name) for index in range(len(parts)) for name in tensors))

    def _load(self, layer: nn.Module, name: str, parameter: nn.Parameter, loaded: torch.Tensor, shard: int | str | None = None) -> None:
        parts: list[Part] = layer.exl3_parts
        if (shard is None and len(parts) > 1) or isinstance(shard, tuple):
            raise OverlayError(f"{parts[0].matrix.name}.{name} comes fused with others: an EXL3 checkpoint keeps them apart")
        index = _QKV.get(shard, shard) if shard is not None else 0
        part = parts[index]
        self._check(layer, part, name, loaded)
        layer.exl3_awaited.discard((index, name))
        if name == "suh":
            padded_copy(parameter.data[index], loaded, [part.first_input])
        elif name == "svh":
            before = sum(other.outputs for other in parts[:index])
            padded_copy(parameter.data[before : before + part.outputs], loaded, [part.first_output])
        else:
            padded_copy(_view(parameter.data, parts, index), loaded.view(torch.int16), [part.first_input // 16, part.first_output // 16, 0])

    @staticmethod
    def _check(layer: nn.Module, part: Part, name: str, loaded: torch.Tensor) -> None:
        """The tensor is the header's; or where vLLM built more, as for virtual heads, one that was padded to that on its way."""
        matrix = part.matrix
        inputs, outputs = matrix.inputs, matrix.outputs
        if len(layer.exl3_parts) == 1 and not layer.prefix.endswith((*_MLP, "lm_head")):
            inputs, outputs = layer.input_size, layer.output_size
        wanted = {"trellis": [inputs // 16, outputs // 16, matrix.words], "suh": [inputs], "svh": [outputs]}[name]
        if list(loaded.shape) != wanted:
            raise OverlayError(
                f"{matrix.name}.{name} is {list(loaded.shape)}, and {layer.prefix} takes {wanted}: "
                "the checkpoint is of another model, or was padded by something else"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        arrived(layer, self.matrices[0].name)
        parts: list[Part] = layer.exl3_parts
        ends, end = [], 0
        for part in parts:
            ends.append(slice(end, end + part.outputs))
            end += part.outputs
        layer.exl3_arguments = (
            [_view(layer.trellis.data, parts, index) for index in range(len(parts))],
            [layer.suh.data[index] for index in range(len(parts))],
            [layer.svh.data[where] for where in ends],
            [CODEBOOKS[part.matrix.codebook] for part in parts],
        )

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.ops.gb10_exl3.linear(x.reshape(-1, x.shape[-1]), *layer.exl3_arguments, None)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias


def _view(flat: torch.Tensor, parts: Sequence[Part], index: int) -> torch.Tensor:
    part, begin = parts[index], sum(part.words for part in parts[:index])
    return flat[begin : begin + part.words].view(part.inputs // 16, part.outputs // 16, part.matrix.words)


class Exl3GroupedMethod(LinearMethodBase):
    """`wo_a`: one matrix for each output group, of that group's inputs. A rank has whole groups."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = list(matrices)
        first = self.matrices[0]
        for matrix in self.matrices:
            if (matrix.inputs, matrix.outputs, matrix.bits, matrix.codebook) != (first.inputs, first.outputs, first.bits, first.codebook):
                raise OverlayError(f"{matrix.name} is not like {first.name} in size, bits or codebook: the groups must be alike")

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        first = self.matrices[0]
        if input_size != first.inputs or output_size % first.outputs or output_partition_sizes[0] % first.outputs:
            raise OverlayError(
                f"{layer.prefix} takes {input_size} inputs and {output_size} outputs, {first.name} has {first.inputs} and {first.outputs}: "
                "the checkpoint is of another model"
            )
        groups = output_partition_sizes[0] // first.outputs
        shapes = {
            "trellis": ((first.inputs // 16, first.outputs // 16, first.words), torch.int16),
            "suh": ((first.inputs,), torch.float16),
            "svh": ((first.outputs,), torch.float16),
        }
        for name, (shape, dtype) in shapes.items():
            parameter = nn.Parameter(torch.empty(groups, *shape, dtype=dtype), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": partial(self._load, layer, name), "output_dim": 0, "exl3": True})
            layer.register_parameter(name, parameter)
        register_markers(layer, self.matrices)
        awaited(layer, shapes)

    @staticmethod
    def _load(layer: nn.Module, name: str, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        layer.exl3_awaited.discard(name)
        groups = parameter.shape[0]
        if loaded.shape[0] != groups * layer.tp_size or loaded.shape[1:] != parameter.shape[1:]:
            raise OverlayError(
                f"{layer.prefix} takes {groups * layer.tp_size} groups of {list(parameter.shape[1:])}, not {list(loaded.shape)}"
            )
        parameter.data.copy_(loaded.narrow(0, groups * layer.tp_rank, groups))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        arrived(layer, self.matrices[0].name)
        codebook = CODEBOOKS[self.matrices[0].codebook]
        layer.exl3_groups = [
            ([layer.trellis.data[index]], [layer.suh.data[index]], [layer.svh.data[index]], [codebook])
            for index in range(layer.trellis.shape[0])
        ]

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, groups, inputs] -> [tokens, groups, outputs]."""
        return torch.stack([torch.ops.gb10_exl3.linear(x[:, index], *group, None) for index, group in enumerate(layer.exl3_groups)], 1)
