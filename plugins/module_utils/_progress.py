# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a transfer is: what the transferring job reports, and the line that a person reads of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ._checkpoint import size_text

WINDOW_S = 30.0
"""Seconds over which the rate is taken: long enough to be steady, short enough to show that a link got slow."""
SHOWN = 3
"""Files in transfer that a line names."""


class Meter:
    """A rate from the newest samples of how many bytes there are."""

    def __init__(self, window: float = WINDOW_S) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def rate(self, now: float, done: int) -> float:
        """Bytes per second over the window that ends now; 0 before there are two samples."""
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > self._window:
            self._samples.popleft()
        (begin, first), elapsed = self._samples[0], now - self._samples[0][0]
        return max(0.0, (done - first) / elapsed) if elapsed > 0 and begin < now else 0.0


def report(sizes: Mapping[str, int], there: Mapping[str, int], finished: Sequence[str], rate: float) -> dict[str, Any]:
    """Progress as a job reports it, of wanted sizes and present bytes per path; all sizes in bytes, the rate in bytes per second."""
    ended = set(finished)
    done = sum(size if path in ended else min(there.get(path, 0), size) for path, size in sizes.items())
    total = sum(sizes.values())
    return {
        "files": len(sizes),
        "files_done": len(ended),
        "bytes": total,
        "bytes_done": done,
        "rate": rate,
        "seconds_left": (total - done) / rate if rate else None,
        "current": [[path, there[path], sizes[path]] for path in sorted(sizes) if path not in ended and there.get(path)],
    }


def line(progress: Mapping[str, Any]) -> str:
    """One line: files, bytes, rate and time left, and how far the files in transfer are. Nothing is said of what is not known."""
    if not progress:
        return "starting"
    if "step" in progress:  # work that cannot be measured in bytes
        return str(progress["step"])
    total, done = progress["bytes"], progress["bytes_done"]
    parts = [
        f"{progress['files_done']} of {progress['files']} files",
        f"{size_text(done)} of {size_text(total)} ({100 * done // total if total else 100} %)",
    ]
    if progress["rate"]:
        parts.append(f"{size_text(int(progress['rate']))}/s")
    if progress["seconds_left"] and done < total:
        parts.append(f"{time_text(progress['seconds_left'])} left")
    text = ", ".join(parts)
    current = [f"{path} {100 * there // size if size else 100} %" for path, there, size in progress["current"][:SHOWN]]
    return f"{text} | {', '.join(current)}" if current else text


def time_text(seconds: float) -> str:
    """A duration for people, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
