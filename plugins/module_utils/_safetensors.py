# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""safetensors files by their headers, and an index against them: what a loader would meet, without reading the data.

A file is a little-endian u64 N, N bytes of JSON `{name: {"dtype", "shape", "data_offsets": [begin, end]}}` and the data; the offsets
count from the end of the JSON, and the tensors cover the data without holes (the format's own specification).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ._checkpoint import Problem

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a longer header is no header."""
SUBSET_KEY = "gb10_subset"
"""In the metadata of an index that names, on purpose, only some tensors of its files."""

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits per element."""

_NOT_TENSORS = {
    b"<!DOCTYP": "an HTML page, not a tensor file",
    b"<html": "an HTML page, not a tensor file",
    b"version ": "a Git LFS pointer, not the file itself",
    b"PK\x03\x04": "a zip archive, such as an old PyTorch file",
}


class FormatError(ValueError):
    """A file or index that no loader could use; the message goes on from its name to a sentence."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: `begin` and `end` are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


def header_length(start: bytes, size: int) -> int:
    """Bytes of the JSON, from the file's first 8 bytes and its size. Raises FormatError for what is no such file."""
    for signature, what in _NOT_TENSORS.items():
        if start.startswith(signature):
            raise FormatError(f"is {what}")
    if len(start) < LENGTH_BYTES:
        raise FormatError(f"is cut before its header ({size} bytes)")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"is no tensor file (a header of {length} bytes)")
    if LENGTH_BYTES + length > size:
        raise FormatError(f"is cut in its header ({size} bytes, the header alone has {LENGTH_BYTES + length})")
    return length


def parse_header(header: bytes, size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes by name. Raises FormatError."""
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"has a damaged header ({error})") from None
    if not isinstance(entries, dict):
        raise FormatError("has a damaged header (no mapping)")
    entries.pop("__metadata__", None)
    data = LENGTH_BYTES + len(header)
    tensors = {name: _tensor(name, entry, data) for name, entry in entries.items()}
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != end:
            raise FormatError(f"has a damaged header ({name} does not begin where the tensor before it ends)")
        end = tensor.end
    if size < end:
        raise FormatError(f"is short ({size} bytes, its header says {end})")
    if size > end:
        raise FormatError(f"is too long ({size} bytes, its header says {end})")
    return tensors


def parse_index(text: str) -> tuple[dict[str, str], bool]:
    """File by tensor, and whether it names all tensors of its files. Raises FormatError, also for a path that leaves the directory."""
    try:
        index = json.loads(text)
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        valid = bool(weight_map) and all(isinstance(item, str) for pair in weight_map.items() for item in pair)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise FormatError('is no index ({"weight_map": {tensor: file}})')
    for file in set(weight_map.values()):
        if PurePosixPath(file).name != file or not file.endswith(SUFFIX):
            raise FormatError(f"names {file!r}, which is no tensor file beside it")
    return dict(weight_map), SUBSET_KEY not in metadata


def index_problems(
    index: Mapping[str, str], complete: bool, files: Mapping[str, Mapping[str, Tensor]], broken: Iterable[str]
) -> list[Problem]:
    """What keeps a loader that follows the index from finding every tensor once.

    `files`: the tensors of each readable tensor file of the directory; `broken`: files with a problem of their own, which are not told again.
    With `complete` every tensor of the named files must be named too.
    """
    named = sorted(set(index.values()))
    absent = [file for file in named if file not in files and file not in set(broken)]
    if absent:
        there = len(named) - len(absent)
        return [Problem("missing", file, f"is missing ({there} of the {len(named)} files that {INDEX} names are there)") for file in absent]
    problems = [
        Problem("corrupt", file, f"lacks the tensor {name}, which {INDEX} places there")
        for name, file in sorted(index.items())
        if file in files and name not in files[file]
    ]
    for file in named:
        for name in sorted(files.get(file, ())):
            if name not in index:
                if complete:
                    problems.append(Problem("corrupt", file, f"holds the tensor {name}, which {INDEX} does not name"))
            elif index[name] != file:
                problems.append(Problem("corrupt", file, f"holds the tensor {name} once more; {INDEX} places it in {index[name]}"))
    return problems


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping without repeated keys: of two tensors of one name a parser would silently drop the first."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name occurs twice")
    return mapping


def _tensor(name: str, entry: Any, data: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        sizes = [None]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in sizes):
        raise FormatError(f"has a damaged header ({name} has no dtype, shape and data_offsets)")
    if dtype not in BITS:
        raise FormatError(f"has a tensor {name} of the unknown type {dtype!r}")
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise FormatError(f"has a damaged header ({name} is {dtype} {shape} but takes {end - begin} bytes)")
    return Tensor(dtype, tuple(shape), data + begin, data + end)
