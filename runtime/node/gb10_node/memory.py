# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""A member's memory as the kernel tells it, and giving the page cache back.

On a GB10 the GPU takes its memory from MemFree and the driver does not reclaim page cache: an allocation fails at 1 GiB of MemFree with 9 GiB
of MemAvailable (MiaAI-Lab's two-Spark kit). So free memory is what counts before a start, and the cache is what stands in its way.
"""

from __future__ import annotations

import os
import re

MEMINFO = re.compile(rb"^(MemFree|MemAvailable|Cached):\s+(\d+) kB$", re.MULTILINE)
PRESSURE = re.compile(rb"^full avg10=(\d+\.\d+)", re.MULTILINE)


class Memory:
    """One look: MiB that are free, available (free or reclaimable) and cached; percent of the last 10 s in which everything waited for memory."""

    __slots__ = ("available", "cached", "free", "pressure")

    def __init__(self, free: int, available: int, cached: int, pressure: float = 0.0) -> None:
        self.free, self.available, self.cached, self.pressure = free, available, cached, pressure

    def __str__(self) -> str:
        return f"MemFree {self.free} MiB, MemAvailable {self.available} MiB, Cached {self.cached} MiB, memory pressure {self.pressure:g} %"


class MemoryReader:
    """Looks again and again without opening a file: what watches for a shortage must work in one."""

    def __init__(self, procfs: str = "/proc") -> None:
        self._procfs = procfs
        self._meminfo = os.open(f"{procfs}/meminfo", os.O_RDONLY)
        try:
            self._pressure = os.open(f"{procfs}/pressure/memory", os.O_RDONLY)
        except OSError:  # a kernel without pressure stall information
            self._pressure = -1

    def read(self) -> Memory:
        """The state now; raises OSError where procfs has gone, ValueError where it says something else than expected."""
        fields = {name: int(kib) >> 10 for name, kib in MEMINFO.findall(os.pread(self._meminfo, 8192, 0))}
        stalled = PRESSURE.search(os.pread(self._pressure, 512, 0)) if self._pressure >= 0 else None
        try:
            return Memory(fields[b"MemFree"], fields[b"MemAvailable"], fields[b"Cached"], float(stalled[1]) if stalled else 0.0)
        except KeyError as error:
            raise ValueError(f"{self._procfs}/meminfo has no {error.args[0].decode()}: is this procfs?") from error

    def drop_page_cache(self) -> None:
        """Free the clean page cache and the reclaimable slabs of this member; raises OSError.

        Dirty pages are written out first, since they cannot be dropped.
        """
        os.sync()
        descriptor = os.open(f"{self._procfs}/sys/vm/drop_caches", os.O_WRONLY)
        try:
            os.write(descriptor, b"3")
        finally:
            os.close(descriptor)
