# SPDX-License-Identifier: Apache-2.0
"""Where a rank's Engram rows lie: its packed file, or the release's shard. Standard library only.

A table is `layers.N.engram.embed.weight` (float8 e4m3, 256 columns) and `.scale` (one e8m0 byte for 32 columns). The packed format is that of the
collection's `_engram`, which writes it: a page with six u64 (magic, layer, first row, row after the last, rows of the table, bytes of a row), then
the rows, weights and scales together. A test holds the two together.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from gb10_vllm.errors import OverlayError

MAGIC, PAGE, WIDTH, SCALES = 0x31344E4531565344, 4096, 256, 8
ROW = WIDTH + SCALES
INDEX = "model.safetensors.index.json"
_HEADER = struct.Struct("<6Q")


@dataclass(frozen=True)
class Rows:
    """`first` to `last` - 1 of a table, and where in a file: row r at `weights` + r * `weight_stride`, its scales likewise."""

    path: Path
    packed: bool
    first: int
    last: int
    weights: int
    weight_stride: int
    scales: int
    scale_stride: int


def packed_name(layer: int, rank: int, ranks: int) -> str:
    """The file of a layer's rows of one rank."""
    return f"engram-l{layer}-r{rank}of{ranks}.bin"


def find(folder: Path, layer: int, rank: int, ranks: int, first: int, last: int, rows: int) -> Rows:
    """A rank's rows in a folder, packed or else in a shard. Raises OverlayError for a file that is of something else, or cut."""
    path = folder / packed_name(layer, rank, ranks)
    if path.exists():
        return _packed(path, layer, first, last, rows)
    others = sorted(folder.glob(f"engram-l{layer}-r*of*.bin"))
    if others:
        raise OverlayError(f"{folder} has {others[0].name} and no {path.name}: run site.yml --tags storage for these ranks")
    return _shard(folder, layer, first, last, rows)


def _packed(path: Path, layer: int, first: int, last: int, rows: int) -> Rows:
    with path.open("rb") as file:
        page = file.read(PAGE)
        size = file.seek(0, 2)
    header = _HEADER.pack(MAGIC, layer, first, last, rows, ROW).ljust(PAGE, b"\0")
    if page != header:
        raise OverlayError(f"{path} is of another layer, rank or table (its header differs): run site.yml --tags storage")
    wanted = PAGE + (last - first) * ROW
    if size != wanted:
        raise OverlayError(f"{path} has {size} bytes instead of {wanted}: run site.yml --tags storage")
    begin = PAGE - first * ROW
    return Rows(path, True, first, last, begin, ROW, begin + WIDTH, ROW)


def _shard(folder: Path, layer: int, first: int, last: int, rows: int) -> Rows:
    names = [f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale")]
    try:
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {places[name] for name in names}
    except (OSError, ValueError, KeyError) as error:
        raise OverlayError(
            f"{folder} has neither packed rows of layer {layer} nor its table ({type(error).__name__}: {error}): run site.yml --tags storage"
        ) from None
    if len(files) != 1:
        raise OverlayError(f"{names[0]} and its scale lie in two files of {folder}: fetch the release's shards")
    path = folder / files.pop()
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            size = file.seek(0, 2)
    except (OSError, ValueError) as error:
        raise OverlayError(f"{path} cannot be read ({error}): fetch it again") from None
    begins = []
    for name, width, dtypes in ((names[0], WIDTH, ("F8_E4M3",)), (names[1], SCALES, ("F8_E8M0", "U8"))):
        entry = header.get(name, {})
        if entry.get("dtype") not in dtypes or entry.get("shape") != [rows, width]:
            raise OverlayError(
                f"{path}: {name} is {entry.get('dtype')} {entry.get('shape')}, expected {dtypes[0]} {[rows, width]}: fetch the release's"
            )
        begins.append(8 + length + entry["data_offsets"][0])
        if size < 8 + length + entry["data_offsets"][1]:
            raise OverlayError(f"{path} has {size} bytes and ends within {name}: fetch it again")
    return Rows(path, False, first, last, begins[0], WIDTH, begins[1], SCALES)
