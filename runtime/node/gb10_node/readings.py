# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What a file of the kernel's or of another service says; nothing where it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gb10_core import _host


def number(path: Path) -> float | None:
    """The number that a file begins with, as in `200 Gb/sec (4X HDR)`."""
    try:
        return float((_host.read(path) or "none").split()[0])
    except (ValueError, IndexError):
        return None


def mapping(path: Path) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        content = json.loads(_host.read(path) or "null")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
