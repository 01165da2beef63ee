# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Container images: which one an engine has, which one an archive holds, and whether two are the same.

An image's id is no identity across members: docker's overlay2 store names it by its configuration, the containerd store by a manifest, and a
save and a load lose the registry's digest (MiaAI-Lab GLM EXL3#8 shipped 34 GB at every start for it). What every engine tells alike is what
the image is made of: its layers, unpacked, and what a container gets from its configuration. That is `Image.content`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._host import Result

STAMP_LABEL = "gb10.cluster.stamp"
"""Of the recipe that an image was built from, see `_recipe`."""
REQUIRES_LABEL = "gb10.cluster.requires"
"""Checks of runtime/image/check.py whose part the image must hold."""

LOCAL_NAMES = "localhost/gb10"
"""Where an image that a registry knows by its digest is called by a name that an engine keeps through save and load."""

_ABSENT = ("no such image", "image not known")
_ROOT_FORMAT = {"podman": "{{.Store.GraphRoot}}", "docker": "{{.DockerRootDir}}"}
_SETTINGS = ("Entrypoint", "Cmd", "Env", "Labels", "User", "WorkingDir")
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
"""uname's word to the image format's."""


class ImageError(ValueError):
    """An engine or an archive that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Image:
    """An image that an engine has.

    `id` is the engine's own name for it, in hex without a prefix; `layers` are the SHA-256 of the unpacked layers in hex, lowest first;
    `digests` are the names with a digest under which registries had it; `platform` is like `linux/arm64`.
    """

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    layers: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    platform: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """SHA-256 in hex of what it is made of: the same on every engine and store."""
        return content_of(self.platform, self.layers, self.settings)

    @property
    def stamp(self) -> str:
        """The stamp of its recipe; empty for an image of others."""
        return self.labels.get(STAMP_LABEL, "")


def content_of(machine: str, layers: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The identity of platform, layers and configuration. What is not set is left out: engines write it as null, empty, or not at all."""
    kept = {key: settings[key] for key in _SETTINGS if settings.get(key)}
    return hashlib.sha256(json.dumps([machine, list(layers), kept], sort_keys=True).encode()).hexdigest()


def plain_id(image_id: str) -> str:
    """An id without docker's prefix."""
    return image_id.removeprefix("sha256:")


def own_platform() -> str:
    """The platform of this machine's containers."""
    machine = platform.machine()
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def local_name(reference: str) -> str:
    """The name under which members keep an image: its own, unless that holds a digest, which no engine keeps when it loads an archive.

    >>> local_name("ghcr.io/a/b:1@sha256:0123456789abcdef")
    'localhost/gb10/b:0123456789ab'
    """
    name, _separator, digest = reference.partition("@")
    if not digest:
        return reference
    return f"{LOCAL_NAMES}/{name.rpartition('/')[2].partition(':')[0]}:{plain_id(digest)[:12]}"


def inspect_argv(engine: str, name: str) -> list[str]:
    """Asks for an image by reference or id."""
    return [engine, "image", "inspect", name]


def list_argv(engine: str) -> list[str]:
    """Asks for the ids of all images."""
    return [engine, "image", "ls", "--quiet", "--no-trunc"]


def inspected(engine: str, result: Result) -> Image | None:
    """The image that `inspect_argv` found; None where the engine does not have it. Raises ImageError where it does not answer."""
    if result.status == 0:
        return described(json.loads(result.out)[0])
    if any(words in result.err.lower() for words in _ABSENT):
        return None
    raise ImageError(f"{engine} does not answer ({result.message}): install and start it on this member, or set cluster_engine")


def described(data: Mapping[str, Any]) -> Image:
    """An image as both engines describe one."""
    settings: Mapping[str, Any] = data.get("Config") or {}
    return Image(
        id=plain_id(data["Id"]),
        labels=settings.get("Labels") or {},
        size=data.get("Size") or 0,
        layers=tuple(map(plain_id, (data.get("RootFS") or {}).get("Layers") or [])),
        digests=tuple(data.get("RepoDigests") or []),
        platform=f"{data.get('Os') or 'linux'}/{data.get('Architecture') or ''}",
        settings=settings,
    )


def is_wanted(image: Image, wanted: str | None) -> bool:
    """Whether an image is the one with this id or content; without one every image is."""
    return not wanted or plain_id(wanted) in (image.id, image.content)


def diff(name: str, before: Image | None, after: str) -> dict[str, str]:
    """What `--diff` shows of a name that leads to another image."""
    return {"before": f"{name} {before.id if before else ''}\n", "after": f"{name} {after}\n"}


def verdict(reference: str, image: Image | None, wanted: str | None, machine: str = "") -> str:
    """One sentence about a reference that does not lead to the wanted id or content, or not to an image for `machine`; empty when it does."""
    if image is None:
        return f"there is no image {reference}: run site.yml --tags runtime"
    if machine and image.platform != machine:
        return f"{reference} is an image for {image.platform}, and this member runs {machine}: name one for {machine} in the profile"
    if not is_wanted(image, wanted):
        return f"{reference} is image {image.id} (content {image.content}), expected {plain_id(wanted or '')}: run site.yml --tags runtime"
    return ""


def lacking(layers: Sequence[str], present: Iterable[Sequence[str]]) -> list[str]:
    """Which of an image's layers are to be brought to a member that has images with these layers.

    A layer is used again only on top of the same ones below it, so the beginning that one of them shares is what need not travel.
    """
    shared = 0
    for other in present:
        same = next(
            (place for place, (own, its) in enumerate(zip(layers, other, strict=False)) if own != its), min(len(layers), len(other))
        )
        shared = max(shared, same)
    return list(layers[shared:])


def root_argv(engine: str) -> list[str]:
    """Asks where the engine keeps its images."""
    return [engine, "info", "--format", _ROOT_FORMAT[engine]]


def store_argv(engine: str) -> list[str]:
    """Asks how the engine keeps them."""
    return [engine, "info", "--format", "{{.Store.GraphDriverName}}" if engine == "podman" else "{{json .DriverStatus}}"]


def takes_parts(store: str) -> bool:
    """Whether a store takes an archive without the layers that it has already.

    podman (5.4.2) and docker's own stores (20.10.24) do, which was run. Docker's containerd store keeps the packed layers of a registry, whose
    names an archive of unpacked ones does not have: it gets archives whole.
    """
    return "containerd.snapshotter" not in store


@dataclass(frozen=True)
class Archive:
    """What an archive says of the image that it holds: `id` is the SHA-256 of the configuration, `layers` as in Image."""

    id: str
    content: str
    layers: tuple[str, ...]


def archive_of(path: str) -> Archive:
    """The only image of an archive made by `podman save` or `docker save`. Raises ImageError."""
    try:
        with tarfile.open(path) as archive:
            manifest = json.loads(_member(archive, "manifest.json"))
            if len(manifest) != 1:
                raise ImageError(f"{path} holds {len(manifest)} images: save just the one")
            return configured(_member(archive, manifest[0]["Config"]))
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{path} is no image archive ({error}): make it again") from error


def configured(config: bytes) -> Archive:
    """The image of a configuration. Raises ValueError, LookupError, TypeError or AttributeError for what is none."""
    data = json.loads(config)
    layers = tuple(map(plain_id, (data.get("rootfs") or {}).get("diff_ids") or []))
    machine = f"{data.get('os') or 'linux'}/{data.get('architecture') or ''}"
    return Archive(hashlib.sha256(config).hexdigest(), content_of(machine, layers, data.get("config") or {}), layers)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    with file:
        return file.read()
