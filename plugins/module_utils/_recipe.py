# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image's recipe: its lock, the files that go into a build, and the stamp that names just these.

A build sees the files of `context` and nothing else, and the stamp is over the same files: what does not go in (a document, a cache, the
machine's umask, the checkout's path) changes no stamp, and what does go in cannot change without one. Everything that a build fetches
is pinned by its hash in the lock, which is one of the files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._errors import PlanError

CONTAINERFILE = "runtime/image/Containerfile"
LOCK = "runtime/image/lock.json"
REQUIREMENTS = "requirements/{}.txt"
"""Made from the lock for pip, one file per group of wheels."""

FOLDERS = ("kernels/exl3", "runtime/image", "runtime/overlay")
"""What is looked through, from the collection's root."""

_IGNORED = re.compile(r"(^|/)(\.|__pycache__/|build/|[^/]+\.egg-info/)|\.(pyc|so|md)$")
"""Caches, what a build leaves, and documents: the image's build needs none of them."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """A file of a build: its bytes, and whether its owner may execute it. Other modes and times are the checkout's own affair."""

    content: bytes
    executable: bool = False


def belongs(path: str) -> bool:
    """Whether a file of FOLDERS, by its path from the collection's root, goes into a build."""
    return path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not _IGNORED.search(path)


def context(files: Mapping[str, File]) -> dict[str, File]:
    """All files of a build by path: those that belong, and what pip is to install. Raises PlanError where the recipe is not whole."""
    chosen = {path: file for path, file in files.items() if belongs(path)}
    for path in (CONTAINERFILE, LOCK):
        if path not in chosen:
            raise PlanError(f"the recipe lacks {path}: install the collection whole")
    wheels = lock(chosen)["wheels"]
    made = {REQUIREMENTS.format(group): File(requirements(entries).encode()) for group, entries in wheels.items()}
    return dict(sorted((chosen | made).items()))


def stamp(files: Mapping[str, File]) -> str:
    """SHA-256 in hex over path, mode and content of each file, whatever their order."""
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        # Lengths first: no two different sets of files give the same bytes.
        head = f"{len(path.encode())} {int(file.executable)} {len(file.content)}\n"
        digest.update(head.encode() + path.encode() + file.content)
    return digest.hexdigest()


def archive(files: Mapping[str, File]) -> bytes:
    """The files as a compressed tar; the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, file in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size = len(file.content)
            entry.mode = 0o755 if file.executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def lock(files: Mapping[str, File]) -> dict[str, Any]:
    """The lock, looked through. Raises PlanError for an entry without a version, a hash or its source; the base's digest is `base`'s affair."""
    try:
        content: dict[str, Any] = json.loads(files[LOCK].content)
    except ValueError as error:
        raise PlanError(f"{LOCK} is no JSON ({error}): correct it") from None
    entries = [
        ("base", content.get("base", {})),
        *((f"wheels.{group}", entry) for group, found in content["wheels"].items() for entry in found),
    ]
    for where, entry in entries:
        if not entry.get("source"):
            raise PlanError(f"{LOCK}: {where} does not say where its value comes from: add a source")
        if where != "base" and not (entry.get("name") and entry.get("version") and _HASH.fullmatch(entry.get("sha256", ""))):
            raise PlanError(f"{LOCK}: {where} needs a name, a version and a SHA-256 for each wheel: correct {entry.get('name') or 'it'}")
    return content


def requirements(entries: list[Mapping[str, str]]) -> str:
    """Wheels as pip's requirements, each with the only hash that it may have."""
    return "".join(f"{entry['name']}=={entry['version']} --hash=sha256:{entry['sha256']}\n" for entry in entries)


def base(content: Mapping[str, Any]) -> str:
    """The base image by its digest. Raises PlanError where the lock has none: a tag may mean another image tomorrow."""
    reference, digest, platform = content["base"]["reference"], content["base"]["digest"], content["platform"]
    if not digest or not _DIGEST.fullmatch(digest):
        operating_system, architecture = platform.split("/")
        raise PlanError(
            f"{LOCK}: base.digest of {reference} is not filled in, so what would be built is not known: put there what "
            f"`skopeo --override-os {operating_system} --override-arch {architecture} inspect --no-tags --format '{{{{.Digest}}}}' docker://{reference}` prints"
        )
    name, _separator, _tag = reference.rpartition(":")
    return f"{name}@{digest}"


def arguments(content: Mapping[str, Any], digest: str) -> dict[str, str]:
    """The build's arguments: the base, what the engine inside must be, and what the labels say of the sources."""
    return {
        "BASE": base(content),
        "ENGINE_VERSION": content["engine"]["version"],
        "NCCL_FEATURES": " ".join(feature["name"] for feature in content["nccl"]["features"]),
        "STAMP": digest,
        "SOURCES": sources(content),
    }


def sources(content: Mapping[str, Any]) -> str:
    """All that a build takes from elsewhere, for a label."""
    wheels = [f"{entry['name']}=={entry['version']}" for group in content["wheels"].values() for entry in group]
    return " ".join([base(content), *wheels])
