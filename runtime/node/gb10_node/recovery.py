# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""When a group that failed may start again: a longer wait each time, and then not at all until a person has looked.

Counted is what another start may not cure: a rank that exited, a group that did not become healthy or no longer computes. A member that was
switched off, rebooted or stopped is none of that: its return starts the group at once. Only the head keeps count, since nothing starts without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW_S = 6 * 3600
"""Failures that lie further back say nothing about the next start."""


@dataclass(frozen=True)
class Failure:
    """One end of the group that counts: when (seconds since 1970) and why."""

    at: float
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Seconds to wait before the next start, or that the breaker is open; how many failures count, and the last one's reason."""

    wait_s: float
    is_open: bool
    failures: int
    reason: str


def judge(failures: Sequence[Failure], backoff_s: Sequence[float], now: float) -> Verdict:
    """After the n-th failure within the window the next start waits `backoff_s[n - 1]` from it; one more than there are waits opens the breaker.

    A clock that was set back makes a failure lie in the future; it then counts as one of now.
    """
    recent = [failure for failure in failures if now - failure.at < WINDOW_S]
    if not recent:
        return Verdict(0.0, False, 0, "")
    last = recent[-1]
    if len(recent) > len(backoff_s):
        return Verdict(0.0, True, len(recent), last.reason)
    wait = backoff_s[len(recent) - 1]
    return Verdict(min(wait, max(0.0, last.at + wait - now)), False, len(recent), last.reason)


class Book:
    """The failures of one group, kept over reboots until a person starts the group."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Failure]:
        """The failures, oldest first; a file that is none counts as empty: what it would hold is a wait."""
        try:
            entries: list[dict[str, Any]] = json.loads(self.path.read_text(encoding="utf-8"))["failures"]
            return [Failure(float(entry["at"]), str(entry["reason"])) for entry in entries]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def add(self, failure: Failure) -> None:
        """Note one more, forget those beyond the window."""
        kept = [known for known in self.read() if failure.at - known.at < WINDOW_S]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps({"failures": [vars(known) for known in (*kept, failure)]}), encoding="utf-8")
        temporary.replace(self.path)
