# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a disk may take a copy. A disk that is nearly full serves badly and fails at the worst time, so some of it stays free."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ._checkpoint import size_text

MAX_USED_PERCENT = 85
"""How full a copy may make a disk: above it Kubernetes evicts images and pods, the rule of LLMKube's three-Spark page."""


@dataclass(frozen=True)
class Disk:
    """Bytes of the file system that a directory is on, or would be made on."""

    size: int
    free: int


def disk_of(directory: Path) -> Disk:
    """The disk of a directory that need not exist."""
    while not directory.exists():
        directory = directory.parent
    usage = shutil.disk_usage(directory)
    return Disk(usage.total, usage.free)


def room(disk: Disk, max_used_percent: int = MAX_USED_PERCENT) -> int:
    """Bytes that may still be written; less than 0 where the disk is fuller than it may get."""
    return disk.free - disk.size * (100 - max_used_percent) // 100


def shortage(directory: str, need: int, disk: Disk, max_used_percent: int = MAX_USED_PERCENT) -> str:
    """The sentence for a disk that may not take `need` more bytes; empty when it may, and always when nothing is to be written."""
    lack = need - room(disk, max_used_percent)
    if need <= 0 or lack <= 0:
        return ""
    return (
        f"{directory} has {size_text(disk.free)} of {size_text(disk.size)} left and needs {size_text(need)} more, "
        f"which would fill the disk above {max_used_percent} %: free {size_text(lack)} there"
    )
