# SPDX-License-Identifier: Apache-2.0
"""Memory of a member whose GPU has none of its own: what is free in each phase, and what is given back.

GB10's driver takes memory from MemFree and does not reclaim page cache, so the pages of 80 GiB of shards have to go once they are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gb10_vllm.levers import DROP_CACHE, MEMORY_LOG, PREFILL_RELEASE
from gb10_vllm.log import say

PREFILL_TOKENS = 64
"""A step of more tokens for one request is a prefill's chunk."""


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """MiB of MemAvailable, MemFree and the rest."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) // 1024 for words in lines}


def _line() -> str:
    free = meminfo()
    text = f"MemAvailable {free['MemAvailable']} MiB, MemFree {free['MemFree']} MiB"
    if torch.cuda.is_available():
        text += f", allocated {torch.cuda.memory_allocated() >> 20} MiB, reserved {torch.cuda.memory_reserved() >> 20} MiB"
    return text


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs memory before and after."""
    if not MEMORY_LOG.amount():
        yield
        return
    started = time.monotonic()
    say(f"memory before {name}: {_line()}")
    yield
    say(f"memory after {name}: {_line()} ({time.monotonic() - started:.0f} s)")


def drop_page_cache(folder: Path) -> int:
    """Tells the kernel that the shards of a folder are not needed again. Returns how many."""
    if not DROP_CACHE.amount():
        return 0
    shards = sorted(folder.glob("*.safetensors"))
    for path in shards:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    say(f"page cache of {len(shards)} shards dropped")
    return len(shards)


class PrefillRelease:
    """Between chunks of a prefill, below a margin, lets the allocator return blocks that are just too small for the next, larger chunk."""

    def __init__(self) -> None:
        self.margin = PREFILL_RELEASE.amount()
        if self.margin:
            say(f"allocator release below {self.margin} MiB between prefill chunks")

    def before_step(self, tokens: int, requests: int) -> bool:
        """Whether it was done."""
        if not self.margin or tokens <= PREFILL_TOKENS * max(requests, 1) or meminfo()["MemAvailable"] >= self.margin:
            return False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True
