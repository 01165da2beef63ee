# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds in EXL3, from the headers of its files; and whether its settings are of the same checkpoint.

Bits, sizes and codebook of a matrix are those of its tensors, never of a setting. Settings are held against them, to find a checkpoint that was
put together from two. Standard library only. The rules on settings are those of the collection's `_quantization`; a test holds the two together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gb10_exl3.format import BLOCK, FormatError, codebook_of, rate_of

from gb10_vllm.errors import OverlayError

METHOD = "exl3"
CONFIG, SEPARATE, INDEX = "config.json", "quantization_config.json", "model.safetensors.index.json"
NOT_QUANTIZED = 16
"""`head_bits` of an output head that was left as it is."""
HEADS = ("lm_head", "head", "model.lm_head")
PARTS = ("trellis", "suh", "svh", "mcg", "mul1", "bias")
_SHARED = ("quant_method", "bits", "head_bits", "mtp_bits", "codebook")
_DTYPES = {"trellis": ("I16", "U16"), "suh": ("F16",), "svh": ("F16",), "mcg": ("I32",), "mul1": ("I32",)}
_EXPERT = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:ffn|mlp)\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)")
_LARGEST_HEADER = 1 << 29


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix of `inputs` x `outputs`, by the checkpoint's name for it."""

    name: str
    inputs: int
    outputs: int
    bits: float
    codebook: str

    @property
    def words(self) -> int:
        """16-bit words of a tile: the last dimension of the trellis."""
        return int(16 * self.bits)


def headers(folder: Path) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """File name and tensors (dtype, shape) of each safetensors file that counts. Raises OverlayError."""
    index = folder / INDEX
    listed = (
        json.loads(index.read_text())["weight_map"].values() if index.is_file() else (path.name for path in folder.glob("*.safetensors"))
    )
    files = sorted(set(listed))
    if not files:
        raise OverlayError(f"{folder} has no safetensors files: an EXL3 checkpoint is served from a folder that holds it")
    for name in files:
        try:
            with (folder / name).open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= _LARGEST_HEADER else None
        except (OSError, ValueError) as error:
            raise OverlayError(f"{folder / name} cannot be read ({error}): fetch it again") from None
        if not isinstance(header, dict):
            raise OverlayError(f"{folder / name} is no safetensors file: fetch it again")
        header.pop("__metadata__", None)
        yield name, header


def matrix_of(name: str, parts: Mapping[str, Mapping[str, Any]]) -> Matrix:
    """The matrix of a module's tensors, by the last part of their names. Raises OverlayError that names the tensor."""
    for part in ("suh", "svh"):
        if part not in parts:
            legacy = f" (it has {part[:2]}, of exllamav3 before 0.0.2)" if part[:2] in parts else ""
            raise OverlayError(f"{name} has a trellis and no {part}{legacy}: convert the checkpoint again")
    for part, dtypes in _DTYPES.items():
        if part in parts and parts[part]["dtype"] not in dtypes:
            raise OverlayError(f"{name}.{part} is {parts[part]['dtype']}, expected {dtypes[0]}: convert the checkpoint again")
    shape = parts["trellis"]["shape"]
    try:
        codebook = codebook_of(name, list(parts))
        if len(shape) != 3:
            raise FormatError(f"{name}.trellis has {len(shape)} dimensions; expected 3")
        bits = rate_of(f"{name}.trellis", shape[2], codebook)
    except FormatError as error:
        raise OverlayError(f"{error}: convert the checkpoint again") from None
    matrix = Matrix(name, 16 * shape[0], 16 * shape[1], bits, codebook)
    for part, size in (("suh", matrix.inputs), ("svh", matrix.outputs)):
        if size % BLOCK or parts[part]["shape"] != [size]:
            raise OverlayError(
                f"{name}.{part} is {parts[part]['shape']} beside a trellis {shape}, expected [{size}] in multiples of {BLOCK}: "
                "the two are of different checkpoints"
            )
    return matrix


def settings(config: Mapping[str, Any], separate: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json's `quantization_config` and of the file beside it, as one. Raises OverlayError where they contradict."""
    for key in _SHARED:
        if key in config and key in separate and config[key] != separate[key]:
            raise OverlayError(f"{SEPARATE} says {key} {separate[key]}, {CONFIG} says {config[key]}: the two are of different checkpoints")
    return {**separate, **config}


def bits_of(number: Any, what: str) -> float:
    """Bits per weight as a setting has them. Raises OverlayError."""
    try:
        return float(number)
    except (TypeError, ValueError):
        raise OverlayError(f"the checkpoint's settings have {what} {number!r}, which is no number of bits: fetch them again") from None


def check(matrices: Mapping[str, Matrix], names: set[str], said: Mapping[str, Any]) -> None:
    """Raises OverlayError for settings that are not of these tensors: codebook, bits of each tensor, bits of experts by layer, head."""
    codebook = str(said.get("codebook") or "")
    for module, entry in (said.get("tensor_storage") or {}).items():
        if "bits_per_weight" not in entry or module not in matrices:
            continue
        if bits_of(entry["bits_per_weight"], f"for {module}") != matrices[module].bits:
            raise OverlayError(
                f"{module}.trellis has {matrices[module].bits:g} bits, the settings say {entry['bits_per_weight']}: "
                "the two are of different checkpoints"
            )
    experts = said.get("expert_bits") or {}
    for name, matrix in matrices.items():
        if codebook and matrix.codebook != codebook:
            raise OverlayError(f"{name} is coded with {matrix.codebook}, the settings say {codebook}: the two are of different checkpoints")
        found = _EXPERT.fullmatch(name)
        if not found or not experts or name.startswith("mtp."):
            continue
        side = "down" if found[2] in ("w2", "down_proj") else "gu"
        wanted = bits_of(experts.get(found[1], {}).get(side, said.get("bits")), f"of layer {found[1]}'s experts")
        if wanted != matrix.bits:
            raise OverlayError(
                f"{name}.trellis has {matrix.bits:g} bits, the settings say {wanted:g} for its layer: the two are of different checkpoints"
            )
    if bits_of(said.get("head_bits", 6), "for the head") < NOT_QUANTIZED:  # 6: the converter's default
        for head in HEADS:
            if f"{head}.weight" in names and f"{head}.trellis" not in names:
                raise OverlayError(f"the settings say head_bits {said.get('head_bits', 6)}, but {head} is not quantized: see to its origin")


def slices(matrices: Mapping[str, Matrix], name: str) -> list[Matrix]:
    """The matrices of a projection that is stored as one for each output group (`wo_a.slice.N`); empty for another."""
    found: list[Matrix] = []
    while (one := matrices.get(f"{name}.slice.{len(found)}")) is not None:
        found.append(one)
    return found


def read(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Matrix], set[str], dict[str, Any]]:
    """The matrices of a checkpoint by name, the names of all tensors, and all settings. Raises OverlayError for one that is not whole."""
    beside = folder / SEPARATE
    said = settings(config, json.loads(beside.read_text()) if beside.is_file() else {})
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    names: set[str] = set()
    for _file, header in headers(folder):
        for name, entry in header.items():
            names.add(name)
            module, _dot, part = name.rpartition(".")
            if part in PARTS or part in ("su", "sv"):
                parts.setdefault(module, {})[part] = entry
    matrices = {name: matrix_of(name, own) for name, own in parts.items() if "trellis" in own}
    if not matrices:
        raise OverlayError(f"{folder} says that it is {METHOD}, but no file has a trellis: fetch the quantized checkpoint")
    check(matrices, names, said)
    return matrices, names, said
