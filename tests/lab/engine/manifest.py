# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The manifest of a checkpoint: the size and SHA-256 of every file, in the format that the collection verifies against."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

VERSION = 1


def describe(directory: Path) -> dict[str, object]:
    """`{"version": 1, "files": [{"path", "size" in bytes, "sha256"}, ...]}`, files in order of their paths."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = [{"path": path.relative_to(directory).as_posix(), "size": path.stat().st_size, "sha256": _sha256(path)} for path in files]
    return {"version": VERSION, "files": sorted(entries, key=lambda entry: str(entry["path"]))}


def write(directory: Path) -> Path:
    """Write `<directory>.manifest.json` beside the directory and return its path."""
    path = directory.with_name(f"{directory.name}.manifest.json")
    path.write_text(json.dumps(describe(directory), indent=2) + "\n")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
