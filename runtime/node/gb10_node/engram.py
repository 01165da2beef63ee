# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""A rank's packed Engram rows, looked at before its container starts: an image that finds none reads the tables another way and says nothing.

The format is that of the collection's `_engram`: a page with six u64 (magic, layer, first row, row after the last, rows of the table, bytes of a
row), then the rows.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from gb10_node.config import RankConfig

KIT, OVERLAY = "DSV41_PACKED_DIR", "GB10_ENGRAM_DIR"
"""Tell an image where packed rows are: MiaAI-Lab's kit, and this collection's overlay, which also takes the release's shards, with their index."""
INDEX = "model.safetensors.index.json"
MAGIC, PAGE, ROW = 0x31344E4531565344, 4096, 264
_HEADER = struct.Struct("<6Q")


def problem(config: RankConfig) -> str:
    """What is wrong with the packed rows that this rank's image is told of, as a sentence; empty when nothing is, or it is told of none."""
    container = config.container
    variable = next((name for name in (KIT, OVERLAY) if container.environment.get(name)), "")
    if not variable:
        return ""
    sources = {volume["target"]: Path(volume["source"]) for volume in container.volumes}
    folder = sources.get(container.environment[variable])
    if variable == OVERLAY and (folder is None or (folder / INDEX).exists()):
        return ""
    if folder is None:
        return f"{variable} is {container.environment[variable]}, where nothing is mounted: correct the profile"
    layers = sorted({layer for source in sources.values() for layer in _layers(source / "config.json")})
    if not layers:
        return f"no config.json that is mounted names Engram layers, but {variable} is set: remove it from the profile"
    for layer in layers:
        path = folder / f"engram-l{layer}-r{config.rank}of{len(config.ranks)}.bin"
        wrong = _file_problem(path, layer)
        if wrong:
            return f"{path} {wrong}: run site.yml --tags storage"
    return ""


def _layers(path: Path) -> list[int]:
    """The Engram layers that a config.json names."""
    try:
        config = json.loads(path.read_text())
        return list(config.get("text_config", config).get("engram_layer_ids", []))
    except (OSError, ValueError, AttributeError):
        return []


def _file_problem(path: Path, layer: int) -> str:
    try:
        with path.open("rb") as file:
            page = file.read(PAGE)
            size = file.seek(0, 2)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(page) < PAGE:
        return f"is cut ({size} bytes)"
    magic, said, first, end, rows, row = _HEADER.unpack_from(page)
    if (magic, said, row) != (MAGIC, layer, ROW) or not first < end <= rows:
        return "has the header of another file"
    return "" if size == PAGE + (end - first) * ROW else f"has {size} bytes instead of {PAGE + (end - first) * ROW}"
