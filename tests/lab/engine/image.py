# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine image as an archive: base and engine, two layers, with a note of its name, identifier and size beside it."""

from __future__ import annotations

import json
from pathlib import Path

from .. import cache
from . import base, oci, tree

REFERENCE = "localhost/gb10-lab-engine:0.32.0"
_ARCHIVE = "image.tar"


def engine_image() -> Path:
    """The archive in the cache. Beside it `image.tar.json`: {"reference", "id": the image's identifier, "size" in bytes}."""
    inputs = {
        "base": base.base_tree().parent.name, "tree": tree.engine_tree().parent.name, "reference": REFERENCE,
        "environment": tree.ENVIRONMENT, "writer": Path(oci.__file__),
    }  # fmt: skip
    return cache.build("engine-image", inputs, _build) / _ARCHIVE


def image_id(archive: Path) -> str:
    """The identifier that `podman image inspect` gives after a load."""
    return str(json.loads(archive.with_name(f"{archive.name}.json").read_text())["id"])


def _build(destination: Path) -> None:
    archive = destination / _ARCHIVE
    settings = {"Env": [f"{name}={value}" for name, value in tree.ENVIRONMENT.items()], "Cmd": ["vllm", "--help"], "WorkingDir": "/"}
    identifier = oci.write_image(archive, REFERENCE, [("base", base.base_tree()), ("engine", tree.engine_tree())], settings)
    note = {"reference": REFERENCE, "id": identifier, "size": archive.stat().st_size}
    archive.with_name(f"{archive.name}.json").write_text(json.dumps(note, indent=2) + "\n")
