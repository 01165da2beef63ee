# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One operator at a time: a lock on the head with its owner and its age. Who may take it is decided here, by the head's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

STALE_S = 3600
"""An owner who has not been heard of for so long is taken for gone: longer than any part of a run but a first download."""
FREE, OURS, STALE, HELD = "free", "ours", "stale", "held"


@dataclass(frozen=True)
class Owner:
    """A run of a playbook: who started it where, the controller's boot and the run's process there, and what it does."""

    who: str
    boot: str
    pid: int
    what: str

    def is_same_run(self, other: Owner) -> bool:
        """Whether both are one process, whichever of its playbooks asks."""
        return (self.who, self.boot, self.pid) == (other.who, other.boot, other.pid)


@dataclass(frozen=True)
class Lock:
    """A held lock: since when, and when its owner was last heard of (seconds since 1970 by the head's clock)."""

    owner: Owner
    since: float
    seen: float

    def record(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)


def parse(record: Mapping[str, Any] | None) -> Lock | None:
    """What was kept; None where that is no lock."""
    try:
        return Lock(Owner(**(record or {})["owner"]), float((record or {})["since"]), float((record or {})["seen"]))
    except (KeyError, TypeError, ValueError):
        return None


def judge(held: Lock | None, asking: Owner, now: float) -> str:
    """Whether a run may take the lock: it is free, its own, its owner has gone silent, or another's."""
    if held is None:
        return FREE
    if held.owner.is_same_run(asking):
        return OURS
    return STALE if now - held.seen > STALE_S else HELD


def taken(held: Lock | None, asking: Owner, now: float) -> Lock:
    """The lock after it was taken. A run that has it keeps its first purpose: a restart stops and starts."""
    return Lock(held.owner, held.since, now) if held and held.owner.is_same_run(asking) else Lock(asking, now, now)


def frees(held: Lock | None, asking: Owner) -> bool:
    """Whether a run that has done `what` gives the lock back: only what took it does."""
    return held is not None and held.owner == asking


def age_text(seconds: float) -> str:
    """An age for a sentence."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def held_sentence(held: Lock, now: float) -> str:
    """Who has the lock, for how long, and what to do."""
    return (
        f"{held.owner.who} has been running {held.owner.what} on this cluster for {age_text(now - held.since)} (pid {held.owner.pid}): wait for its "
        "end, or take over with -e lock_takeover=true when you know that it is gone"
    )


def takeover_sentence(held: Lock, now: float, why: str) -> str:
    """What a take-over says."""
    return f"took over from {held.owner.who}, whose {held.owner.what} began {age_text(now - held.since)} ago: {why}"
