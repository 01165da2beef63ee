# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The memory guard of a member: keeps free memory above its floors while a group starts and serves.

The rules and times are those of LLMKube's gb10-memory-guard, which watched the three-Spark ring. It suspended at 1.5 GiB of MemFree; here
MemAvailable decides, because a healthy server was killed at 1.3 GiB free and 7 GiB available (MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark#54).
"""

from __future__ import annotations

from gb10_node.memory import Memory

FLUSH_WORTH_MIB = 512
"""So much page cache is worth dropping."""
PRESSURE_PERCENT = 25.0
"""With little MemFree, so long a share of time in which nothing ran for want of memory counts as below the floor."""
FLOOR_S = 10.0
"""How long it must last: a prefill's low water is shorter."""
DROP_EVERY_S = 5.0
"""Time between two drops, each of which costs reads again."""

LOADING = frozenset({"starting", "loading"})
SERVING = "serving"


class Guard:
    """Decides from one look after the other. No clock, no I/O: `step` is given both.

    Below `floor_mib` of MemAvailable the group is ended: the next allocation would hang the member. Once: it is armed again when the group
    serves the next time, which takes somebody to start it. Below `flush_floor_mib` of MemFree a serving group's page cache is dropped: a
    prefill step takes up to 3.7 GiB at once. Beyond `load_cached_mib` it is dropped while weights are read: they are read once.
    """

    def __init__(self, floor_mib: int, flush_floor_mib: int, load_cached_mib: int) -> None:
        self.floor_mib, self.flush_floor_mib, self.load_cached_mib = floor_mib, flush_floor_mib, load_cached_mib
        self.armed = True
        self._phase = ""
        self._dropped_at: float | None = None
        self._below_since: float | None = None
        self._last_resort = False

    def step(self, now: float, phase: str, memory: Memory) -> tuple[str, str]:
        """What to do now: ("", ""), ("drop", why) or ("end", why). `now` in seconds, of a clock that does not go back."""
        before, self._phase = self._phase, phase
        if phase != SERVING:
            self._below_since, self._last_resort = None, False
            if phase == "starting" and before != phase:
                return self._drop(now, "before the start")
            if phase in LOADING and memory.cached > self.load_cached_mib and self._may_drop(now):
                return self._drop(now, "while loading")
            return "", ""
        if before != SERVING:
            self.armed = True
        if self._is_below(memory):
            if self._below_since is None:
                self._below_since = now
            if self.armed and now - self._below_since >= FLOOR_S:
                return self._at_floor(now, memory)
        else:
            self._below_since, self._last_resort = None, False
        if memory.free < self.flush_floor_mib and memory.cached > FLUSH_WORTH_MIB and self._may_drop(now):
            return self._drop(now, "while serving")
        return "", ""

    def _is_below(self, memory: Memory) -> bool:
        return memory.available < self.floor_mib or (memory.free < self.flush_floor_mib and memory.pressure >= PRESSURE_PERCENT)

    def _at_floor(self, now: float, memory: Memory) -> tuple[str, str]:
        """A last drop, and when the next look is no better, the end."""
        if not self._last_resort:
            self._last_resort = True
            return self._drop(now, "at the floor")
        self.armed = self._last_resort = False
        if memory.available < self.floor_mib:
            limit = f"below the floor of {self.floor_mib} MiB available"
        else:
            limit = f"below {self.flush_floor_mib} MiB free, with at least {PRESSURE_PERCENT:g} % of the time lost for want of memory"
        return "end", f"{memory} for {FLOOR_S:.0f} s, {limit}"

    def _may_drop(self, now: float) -> bool:
        return self._dropped_at is None or now - self._dropped_at >= DROP_EVERY_S

    def _drop(self, now: float, why: str) -> tuple[str, str]:
        self._dropped_at = now
        return "drop", why
