# SPDX-License-Identifier: Apache-2.0
"""What can be switched, as data: name, variable, default, and the line that a rank logs when it is on.

Standard library only: a plan lists these lines, so that a boot can be held against them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gb10_vllm.errors import OverlayError

PREFIX = "gb10_vllm: "
"""How each line of this package begins, after vLLM's own."""


@dataclass(frozen=True)
class Lever:
    """`variable` at `default` is off, or as small as it gets. `proof` is a regular expression for the line that says that it is on."""

    name: str
    variable: str
    default: str
    what: str
    proof: str
    number: bool = True

    def value(self) -> str:
        """The variable's value, or the default. Raises OverlayError for one that is no number where it must be."""
        text = os.environ.get(self.variable, "").strip() or self.default
        if self.number and not text.isdecimal():
            raise OverlayError(f"{self.variable} is {text!r}: it must be a whole number, 0 or more")
        return text

    def amount(self) -> int:
        """The value of a number."""
        return int(self.value())


VIRTUAL_HEADS = Lever(
    "virtual heads",
    "GB10_VIRTUAL_TP",
    "0",
    "the number of ranks for which heads and output groups that do not divide by it are padded; config.json stays as it is",
    r"virtual heads: \d+ heads in \d+ groups run as \d+ in \d+ for \d+ ranks",
)
ENGRAM_DISK = Lever(
    "Engram from disk",
    "GB10_ENGRAM_DIR",
    "",
    "the folder with the tables: this rank's packed files, or the release's shards; they are read row by row and never resident",
    r"Engram from disk: layer \d+ rows \d+ to \d+ from \S+ \((packed|shard), (O_DIRECT|buffered)",
    number=False,
)
ENGRAM_THREADS = Lever(
    "Engram readers",
    "GB10_ENGRAM_THREADS",
    "32",
    "threads that read rows at the same time",
    r"Engram from disk: .* \d+ threads",
)
ENGRAM_CACHE = Lever(
    "Engram row cache",
    "GB10_ENGRAM_CACHE_MIB",
    "0",
    "MiB of rows that each table keeps; n-grams hardly repeat, so none",
    r"Engram from disk: .* cache [1-9]\d* MiB",
)
MEMORY_LOG = Lever(
    "memory log",
    "GB10_MEMORY_LOG",
    "1",
    "a line with free memory before and after each phase of the start",
    r"memory (before|after) \w+: MemAvailable \d+ MiB",
)
DROP_CACHE = Lever(
    "page cache dropped",
    "GB10_DROP_PAGE_CACHE",
    "1",
    "the checkpoint's pages leave the page cache once the weights are loaded: GB10's driver does not reclaim them",
    r"page cache of \d+ shards dropped",
)
PREFILL_RELEASE = Lever(
    "allocator release",
    "GB10_PREFILL_RELEASE_MIB",
    "0",
    "below so many MiB of MemAvailable the allocator gives back what it keeps, between the chunks of a prefill",
    r"allocator release below \d+ MiB between prefill chunks",
)
INDEXER_FACTOR = Lever(
    "indexer buffer",
    "GB10_INDEXER_FACTOR",
    "0",
    "how many times the context the indexer's buffer for a prefill's keys holds, 1 for the smallest; vLLM takes 16 to 40",
    r"indexer buffer of [1-9]\d* times the context",
)

LEVERS = (VIRTUAL_HEADS, ENGRAM_DISK, ENGRAM_THREADS, ENGRAM_CACHE, MEMORY_LOG, DROP_CACHE, PREFILL_RELEASE, INDEXER_FACTOR)
