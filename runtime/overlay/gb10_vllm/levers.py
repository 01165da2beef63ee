# SPDX-License-Identifier: Apache-2.0
"""What can be switched. Name, variable, values and the line that a rank logs when it is on are data, levers.json: a plan reads them as well, so
that a boot is held against them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from gb10_vllm.errors import OverlayError

PREFIX = "gb10_vllm: "
"""How each line of this package begins, after vLLM's own."""


@dataclass(frozen=True)
class Lever:
    """`variable` at `off` is off, or as small as it gets; it does nothing where the lever of the variable `needs` is off.

    `proof` is a regular expression for the line that says that it is on.
    """

    name: str
    variable: str
    default: str
    off: str
    what: str
    proof: str
    number: bool = True
    needs: str = ""

    def value(self) -> str:
        """The variable's value, or the default. Raises OverlayError for one that is no number where it must be."""
        text = os.environ.get(self.variable, "").strip() or self.default
        if self.number and not text.isdecimal():
            raise OverlayError(f"{self.variable} is {text!r}: it must be a whole number, 0 or more")
        return text

    def amount(self) -> int:
        """The value of a number."""
        return int(self.value())


LEVERS = tuple(Lever(**entry) for entry in json.loads(Path(__file__).with_name("levers.json").read_text(encoding="utf-8")))
_OF = {lever.variable: lever for lever in LEVERS}
VIRTUAL_HEADS = _OF["GB10_VIRTUAL_TP"]
ENGRAM_DISK = _OF["GB10_ENGRAM_DIR"]
ENGRAM_THREADS = _OF["GB10_ENGRAM_THREADS"]
ENGRAM_CACHE = _OF["GB10_ENGRAM_CACHE_MIB"]
MEMORY_LOG = _OF["GB10_MEMORY_LOG"]
DROP_CACHE = _OF["GB10_DROP_PAGE_CACHE"]
PREFILL_RELEASE = _OF["GB10_PREFILL_RELEASE_MIB"]
INDEXER_FACTOR = _OF["GB10_INDEXER_FACTOR"]
INDEXER_SPLIT = _OF["GB10_INDEXER_SPLIT"]
