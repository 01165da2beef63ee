# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lab serves: a container image with the real vLLM for CPUs, small models, and the tokens that one rank alone gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import cache
from . import base, image, model, reference, tree


@dataclass(frozen=True)
class Assets:
    """All that a lab needs in order to serve one model; every path is in the cache and complete."""

    archive: Path  # for `podman load` and `docker load`
    image_id: str  # 64 hexadecimal digits
    model_dir: Path
    manifest: Path
    reference: Path


def ensure(name: str) -> Assets:
    """Build what is missing for the model `name`, or just find it. Raises LabError with a cure when something cannot be built."""
    archive = image.engine_image()
    directory = model.checkpoint(name)
    manifest = directory.with_name(f"{directory.name}.manifest.json")
    assets = Assets(archive, image.image_id(archive), directory, manifest, reference.reference(directory))
    # What an older lock or recipe made goes: a gigabyte each.
    for artefact in (base.base_tree().parent, tree.engine_tree().parent, archive.parent, directory.parent):
        cache.prune(artefact.parent.name, keep={artefact})
    return assets
