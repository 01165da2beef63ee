# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Container images by their id, as podman and docker tell it and as an archive holds it."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._host import Result

_ABSENT = ("no such image", "image not known")
_ROOT_FORMAT = {"podman": "{{.Store.GraphRoot}}", "docker": "{{.DockerRootDir}}"}


class ImageError(ValueError):
    """An engine or an archive that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Image:
    """An image that an engine has. The id is the SHA-256 of its configuration in hex, without a prefix."""

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int = 0


def plain_id(image_id: str) -> str:
    """An id without docker's prefix."""
    return image_id.removeprefix("sha256:")


def inspect_argv(engine: str, name: str) -> list[str]:
    """Asks for an image by reference or id."""
    return [engine, "image", "inspect", name]


def inspected(engine: str, result: Result) -> Image | None:
    """The image that `inspect_argv` found; None where the engine does not have it. Raises ImageError where it does not answer."""
    if result.status == 0:
        data: Mapping[str, Any] = json.loads(result.out)[0]
        return Image(plain_id(data["Id"]), (data.get("Config") or {}).get("Labels") or {}, data.get("Size") or 0)
    if any(words in result.err.lower() for words in _ABSENT):
        return None
    raise ImageError(f"{engine} does not answer ({result.message}): install and start it on this member, or set cluster_engine")


def verdict(reference: str, image: Image | None, wanted: str | None) -> str:
    """One sentence about a reference that does not lead to the wanted id, or without one to no image; empty when it does."""
    if image is None:
        return f"there is no image {reference}: run site.yml --tags runtime"
    if wanted and image.id != plain_id(wanted):
        return f"{reference} is image {image.id}, expected {plain_id(wanted)}: run site.yml --tags runtime"
    return ""


def root_argv(engine: str) -> list[str]:
    """Asks where the engine keeps its images."""
    return [engine, "info", "--format", _ROOT_FORMAT[engine]]


def archive_id(path: str) -> str:
    """The id of the only image of an archive made by `podman save` or `docker save`. Raises ImageError."""
    try:
        with tarfile.open(path) as archive:
            manifest = json.loads(_member(archive, "manifest.json"))
            if len(manifest) != 1:
                raise ImageError(f"{path} holds {len(manifest)} images: save just the one")
            return hashlib.sha256(_member(archive, manifest[0]["Config"])).hexdigest()
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{path} is no image archive ({error}): make it again") from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    with file:
        return file.read()
