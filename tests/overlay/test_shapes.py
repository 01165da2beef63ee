# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The full-size model and its drafter, built on meta tensors for a GB10: every parameter of a rank with its shape, kept in shapes.json.

GB10_WRITE_SHAPES=1 tools/overlay tests/overlay/test_shapes.py     # writes the file; look at its diff
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.overlay import engine, models

pytestmark = pytest.mark.usefixtures("plugin")
RECORD = Path(__file__).with_name("shapes.json")
TEXT = models.FULL_TEXT


def _shapes(rank: int, count: int, port: int, config: Any, kind: str) -> dict[str, dict[str, Any]]:
    with engine.Rank(rank, count, port, config) as one:
        if kind != "native":
            one.config.quant_config = engine.quantized(kind, one.config.quant_config)
        models_of = {"model": one.build(False, "meta"), "drafter": one.build(True, "meta")}
        result = {}
        for name, model in models_of.items():
            parameters = {key: value for key, value in model.named_parameters() if not key.startswith(("vision.", "aligner."))}
            size = sum(value.numel() * value.element_size() for value in parameters.values())
            result[name] = {
                "gib": round(size / 2**30, 2),
                "parameters": collapsed({key: shape(value) for key, value in parameters.items()}),
            }
            result[name]["vision"] = sum(key.startswith(("vision.", "aligner.")) for key, _value in model.named_parameters())
        return result


def shape(tensor: Any) -> str:
    """Type and sizes."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def collapsed(shapes: dict[str, str]) -> dict[str, str]:
    """Layers that are alike in one line: layers.{0-17,23-39}.name."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name, text in shapes.items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        key = re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)
        layers.setdefault((key, text), []).extend([int(found[1])] if found else [])
    return {key.replace("{}", spans(numbers)): text for (key, text), numbers in sorted(layers.items())}


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> {0-2,5}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "{" + ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts) + "}"


@pytest.mark.parametrize(("kind", "count"), [("native", 2), ("native", 3), ("experts", 3), ("experts", 4), ("all", 2), ("all", 3)])
def test_every_shape(tmp_path: Path, tokenizer: Path, kind: str, count: int) -> None:
    models.write_config(tmp_path, TEXT, models.FULL_VISION, models.NATIVE, tokenizer)
    environment = {"GB10_VIRTUAL_TP": str(count)} if TEXT["o_groups"] % count else {}
    first, *others = engine.run(count, _shapes, tmp_path, kind, **environment)
    # A rank's rows of Engram tables are its own; all else is the same for all.
    tables = re.compile(r"engram\.embed_tokens")
    for other in others:
        for name in first:
            one, two = ({key: text for key, text in each[name]["parameters"].items() if not tables.search(key)} for each in (first, other))
            assert one == two
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key = f"{kind}, {count} ranks"
    if os.environ.get("GB10_WRITE_SHAPES"):
        record[key] = first
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    assert json.loads(json.dumps(first)) == record.get(key)
