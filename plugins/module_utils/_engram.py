# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""DeepSeek V4.1's Engram tables: which rows a rank owns, the packed file of a rank's rows, and what a row says.

A table is `layers.N.engram.embed.weight` (float8 e4m3, [rows, 256]) and `.scale` (e8m0 bytes, [rows, 8], one for 32 columns). Its rows are the
buckets of 24 hash columns (orders 2 to 4 times 8 heads) one after the other; bucket sizes are ascending primes from engram_vocab_size on, and no
prime serves twice, not even in the next layer. Ranks own whole columns, as vLLM's ParallelEngramEmbedding splits them (cdiv(24, ranks)).
The packed format is that of MiaAI-Lab's row_store (also written by ZackO2o): a page with six u64, then the rows, weight and scale together.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import PlanError
from ._safetensors import Tensor

PAGE = 4096
"""Bytes of the header; also what O_DIRECT wants reads and writes to be multiples of."""
MAGIC = 0x31344E4531565344
"""On the disk "DSV1EN41": the number counts, its sources' comments have the letters in another order."""
WIDTH, BLOCK = 256, 32
"""Columns of a row, and how many of them one scale byte is for."""
SCALES = WIDTH // BLOCK
ROW = WIDTH + SCALES
"""Bytes of a packed row: the weights and their scales."""
STEP = PAGE // math.gcd(PAGE, ROW)
"""The fewest rows that fill whole pages."""
NAME = re.compile(r"engram-l\d+-r\d+of\d+\.bin")

_TABLE = re.compile(r"(.*\.)?layers\.\d+\.engram\.embed\.(weight|scale)")
_HEADER = struct.Struct("<6Q")
_WEIGHT_TYPE, _SCALE_TYPES = "F8_E4M3", ("F8_E8M0", "U8")
_CONFIG_KEYS = (
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_max_ngram_size",
    "engram_head_dim",
)


class EngramError(PlanError):
    """Tables that are not as the model's config says, or a split that is impossible; one sentence."""


@dataclass(frozen=True)
class Layout:
    """A layer's table: its bucket sizes in rows, hash column by hash column."""

    layer: int
    buckets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(self.buckets)

    def rows_of(self, rank: int, ranks: int) -> range:
        """The rows that a rank owns. Raises EngramError where some rank would own none."""
        share = -(-len(self.buckets) // ranks)
        if share * (ranks - 1) >= len(self.buckets):
            raise EngramError(
                f"{len(self.buckets)} hash columns leave ranks without any at {ranks} ranks: choose another tensor-parallel size"
            )
        return range(sum(self.buckets[: rank * share]), sum(self.buckets[: (rank + 1) * share]))


@dataclass(frozen=True)
class Table:
    """Where a layer's weights and scales lie: the file's name and the two tensors."""

    layout: Layout
    file: str
    weight: Tensor
    scale: Tensor


def layouts(config: Mapping[str, Any]) -> list[Layout]:
    """The tables that a config.json describes. Raises EngramError where its numbers contradict each other."""
    text = config.get("text_config", config)
    try:
        layers, rows, vocabulary, heads, order, width = (text[key] for key in _CONFIG_KEYS)
        columns = heads * (order - 1)
        sizes = _primes(vocabulary)
        tables = [Layout(layer, tuple(next(sizes) for _column in range(columns))) for layer in layers]
    except (KeyError, TypeError) as error:
        raise EngramError(f"config.json does not describe Engram tables ({error}): take the config.json of the release") from None
    if width != WIDTH:
        raise EngramError(
            f"config.json has Engram rows of {width} columns, and the packed format {WIDTH}: these tables are of another kind"
        )
    for table, expected in zip(tables, rows, strict=True):
        if table.rows != expected:
            raise EngramError(
                f"layer {table.layer} has {expected} Engram rows by config.json, and {table.rows} by the rule of the primes: "
                "these tables are of another kind"
            )
    return tables


def tables(headers: Mapping[str, Mapping[str, Tensor]], wanted: Sequence[Layout]) -> list[Table]:
    """The tables among the tensors of some files. Raises EngramError for one that lacks or has another type or shape.

    The type is what keeps the bytes from being read as numbers from 0 to 255: positive, thirty times too large, and fluent nonsense.
    """
    files = {name: file for file, tensors in headers.items() for name in tensors}
    result = []
    for layout in wanted:
        weight, scale = tensor_names(layout.layer)
        lacking = [name for name in (weight, scale) if name not in files]
        if lacking:
            raise EngramError(f"no file holds the tensor {lacking[0]}: fetch the release's shards with the Engram tables")
        if files[weight] != files[scale]:
            raise EngramError(f"{weight} and its scale lie in two files ({files[weight]}, {files[scale]}): the reader wants them in one")
        table = Table(layout, files[weight], headers[files[weight]][weight], headers[files[scale]][scale])
        for name, tensor, types, width in (
            (weight, table.weight, (_WEIGHT_TYPE,), WIDTH),
            (scale, table.scale, _SCALE_TYPES, SCALES),
        ):
            if tensor.dtype not in types or tensor.shape != (layout.rows, width):
                raise EngramError(
                    f"{table.file}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {types[0]} {[layout.rows, width]}: fetch the release's"
                )
        result.append(table)
    return result


def tensor_names(layer: int) -> tuple[str, str]:
    """A layer's table: weight and scale."""
    return f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"


def is_table(name: str) -> bool:
    """Whether a tensor is part of an Engram table."""
    return bool(_TABLE.fullmatch(name))


@dataclass(frozen=True)
class Packed:
    """A rank's packed file of one layer, as it should be."""

    layout: Layout
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"engram-l{self.layout.layer}-r{self.rank}of{self.ranks}.bin"

    @property
    def rows(self) -> range:
        """The rows in it."""
        return self.layout.rows_of(self.rank, self.ranks)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset(self.rows.stop)

    def offset(self, row: int) -> int:
        """Where a row begins."""
        return PAGE + (row - self.rows.start) * ROW

    def header(self) -> bytes:
        """The first page."""
        return _HEADER.pack(MAGIC, self.layout.layer, self.rows.start, self.rows.stop, self.layout.rows, ROW).ljust(PAGE, b"\0")

    def problem(self, page: bytes, size: int) -> str:
        """What is wrong with a file of this first page and size, as a sentence's end; empty when nothing is."""
        if page[:PAGE] != self.header():
            return "is of another layer, rank or table (its header differs)"
        if size != self.size:
            return f"has {size} bytes instead of {self.size}"
        return ""

    def samples(self, count: int) -> list[int]:
        """Rows to compare with the table: the first, the last, and some between them evenly."""
        span = len(self.rows)
        return sorted({self.rows[min(span - 1, span * index // count)] for index in range(count)} | {self.rows[-1]})


def decode(row: bytes) -> list[float]:
    """The numbers of a packed row: e4m3(byte) times 2^(scale - 127), the scale being an fp32 exponent (0 gives 0, 255 infinity)."""
    return [_E4M3[byte] * _scale(row[WIDTH + index // BLOCK]) for index, byte in enumerate(row[:WIDTH])]


def misreading(row: bytes, values: Sequence[float]) -> str:
    """How a reader of this row went wrong, from the numbers that it got, as a sentence; empty when they are right.

    Compared are whole rows: one number may be the same in both readings.
    """
    if all(_same(value, expected) for value, expected in zip(values, decode(row), strict=True)):
        return ""
    as_integers = [byte * _scale(row[WIDTH + index // BLOCK]) for index, byte in enumerate(row[:WIDTH])]
    if all(_same(value, wrong) for value, wrong in zip(values, as_integers, strict=True)):
        return "the bytes were read as whole numbers: the kernel must get a float8_e4m3fn view of them, not uint8"
    return "the numbers are not those of the row: compare row offset, scale and byte order"


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _scale(byte: int) -> float:
    return struct.unpack("<f", struct.pack("<I", byte << 23))[0]


def _e4m3(byte: int) -> float:
    """float8_e4m3fn: a sign, four exponent bits with bias 7, three of mantissa; no infinities, and 0x7F and 0xFF are not numbers."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if byte & 0x80 else magnitude


_E4M3 = [_e4m3(byte) for byte in range(256)]


def _primes(start: int) -> Iterator[int]:
    """Primes from `start` upwards; 48 of them above 16 million take a few hundredths of a second."""
    number = start
    while True:
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1
