# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a container image as one archive that `podman load` and `docker load` both take.

The machine that builds the lab has no container engine (the lab's hosts have), and the format is small: a tar of one tar per layer, the
image's configuration and a list of the two (docker-archive). Everything in it is a function of the files alone: order, owners, modes
and links are theirs, times are zero. The identifier of the image is the SHA-256 of its configuration, which names the layers by theirs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

EPOCH = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # uname's word: the image format's word


class _Hashed(io.RawIOBase):
    """A write-only stream that hashes and counts what passes through to another."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self.digest = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.digest.update(data)
        self.size += len(data)
        self._target.write(data)
        return len(data)


def write_image(archive: Path, reference: str, layers: Sequence[tuple[str, Path]], settings: Mapping[str, object]) -> str:
    """Write `archive` with one layer per (name, directory), lowest first; return the identifier (64 hexadecimal digits).

    `settings` is the `config` object of the image format: Env, Cmd, WorkingDir and so on.
    """
    with archive.open("wb") as out:
        digests = [_append_layer(out, f"{name}.tar", root) for name, root in layers]
        configuration = {
            "architecture": _ARCHITECTURES[os.uname().machine],
            "os": "linux",
            "created": EPOCH,
            "config": dict(settings),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
            "history": [{"created": EPOCH, "created_by": name} for name, _tree in layers],
        }
        body = _json(configuration)
        identifier = hashlib.sha256(body).hexdigest()
        index = [{"Config": f"{identifier}.json", "RepoTags": [reference], "Layers": [f"{name}.tar" for name, _tree in layers]}]
        _append(out, f"{identifier}.json", body)
        _append(out, "manifest.json", _json(index))
        out.write(bytes(2 * tarfile.BLOCKSIZE))  # the end of a tar
    return identifier


def _append_layer(out: IO[bytes], name: str, root: Path) -> str:
    """Append the tree `root` as one member; its header, which needs the size, is written last. Returns the layer's SHA-256."""
    start = out.tell()
    out.write(bytes(tarfile.BLOCKSIZE))
    stream = _Hashed(out)
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as layer:
        for path in _walk(root):
            _add(layer, path, str(path.relative_to(root)))
    out.write(bytes(-stream.size % tarfile.BLOCKSIZE))
    end = out.tell()
    out.seek(start)
    out.write(_header(name, stream.size))
    out.seek(end)
    return stream.digest.hexdigest()


def _walk(root: Path) -> list[Path]:
    """Everything below `root`, parents first, in the order of the names' bytes."""
    found = [Path(parent) / name for parent, directories, files in os.walk(root) for name in directories + files]
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(root)).split(b"/"))


def _add(layer: tarfile.TarFile, path: Path, name: str) -> None:
    entry = layer.gettarinfo(path, arcname=name)
    if entry is None:
        raise ValueError(f"{path} is a socket, which no image can hold; remove it")
    entry.mtime = 0
    entry.uname = entry.gname = ""
    if entry.isreg():
        with path.open("rb") as content:
            layer.addfile(entry, content)
    else:
        layer.addfile(entry)


def _append(out: IO[bytes], name: str, body: bytes) -> None:
    out.write(_header(name, len(body)) + body + bytes(-len(body) % tarfile.BLOCKSIZE))


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
