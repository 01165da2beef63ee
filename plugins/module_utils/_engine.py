# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container engine of this member: the commands that docker and podman share, and what an image is unpacked into between members.

Between members an image is a folder: the files of its archive (`save`), each under a flat name, less the layers that nobody lacks.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, cast

from . import _host, _image
from ._image import Image, ImageError

LOAD_TIMEOUT_S = 3600
"""22 GB of layers to a disk that writes 10 MB/s."""
INDEX = "image.json"
"""What the folder's files are: the configuration's name, and per layer its SHA-256, unpacked, and its file's name (none where it was left out)."""

_BLOCK = 4 * 2**20


class Engine:
    """An engine by its program's name. Raises ImageError, one sentence, where it does not do what it is told."""

    def __init__(self, program: str, environment: Mapping[str, str] | None = None) -> None:
        self.program = program
        self._environment = environment

    def image(self, name: str) -> Image | None:
        """The image of this reference or id."""
        return _image.inspected(self.program, self.run("image", "inspect", name))

    def run(self, *arguments: str, timeout: float = 60) -> _host.Result:
        """What a command left."""
        return _host.run([self.program, *arguments], timeout=timeout, environment=self._environment)

    def do(self, *arguments: str, timeout: float = LOAD_TIMEOUT_S) -> _host.Result:
        """Run a command that must succeed."""
        done = self.run(*arguments, timeout=timeout)
        if done.status:
            command = f"{self.program} {' '.join(arguments)}"
            raise ImageError(f"{command} failed ({done.message}): run it on this member to see more")
        return done

    def export(self, image_id: str, folder: Path, needed: Collection[str]) -> None:
        """Lay an image out in a folder, with these of its layers."""
        image = self.image(image_id)
        if image is None:
            raise ImageError(f"there is no image {image_id} to export: run site.yml --tags runtime")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unneeded = set(image.layers) - set(needed)
        command = [self.program, "save", image_id]
        # Not AnsibleModule.run_command: gigabytes go through a pipe.
        # pylint: disable-next=ansible-bad-function
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            stdout, stderr = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
            try:
                unpack(stdout, folder, unneeded)
                while stdout.read(_BLOCK):
                    pass  # a tar ends before its stream does
            except (tarfile.TarError, ValueError, LookupError, OSError) as error:
                process.kill()
                raise ImageError(f"{' '.join(command)} gave no whole archive ({error}): see that this member's disk has room") from error
            said = stderr.read().decode(errors="replace").strip()
        if process.returncode:
            raise ImageError(f"{' '.join(command)} failed ({said or process.returncode}): run it on this member to see more")

    def load(self, source: Path, reference: str) -> None:
        """Load an archive, or a folder as `export` made one on another member. Where the id is not enough to find it, it has the name."""
        if not source.is_dir():
            self.do("load", "--input", str(source))
        elif self.program == "podman":
            self.do("load", "--input", str(as_dir_transport(source)))
        else:
            self._load_stream(source, reference)

    def _load_stream(self, folder: Path, reference: str) -> None:
        """Docker takes the files as a tar, and asks for a layer only where it has none of that name on top of the ones below."""
        command = [self.program, "load"]
        # pylint: disable-next=ansible-bad-function
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            stdin, stderr = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stderr)
            try:
                pack(folder, stdin, reference)
                stdin.close()
            except BrokenPipeError:
                pass  # it has said why
            said = stderr.read().decode(errors="replace").strip()
        if process.returncode:
            raise ImageError(f"{' '.join(command)} of {folder} failed ({said or process.returncode}): see that this member's disk has room")


def unpack(stream: IO[bytes], folder: Path, unneeded: Collection[str]) -> None:
    """Lay the files of an archive out in a folder, less the layers that are not needed (SHA-256 of their unpacked content).

    Raises ValueError, LookupError or TarError for a stream that is no archive of one image, and OSError for a full disk.
    """
    links: dict[str, str] = {}
    small: dict[str, bytes] = {}
    names: dict[str, str] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.issym() or member.islnk():
                base = posixpath.dirname(member.name) if member.issym() else ""
                links[member.name] = posixpath.normpath(posixpath.join(base, member.linkname))
            elif not any(digest in member.name for digest in unneeded) and (content := archive.extractfile(member)):
                flat = member.name.replace("/", "+")
                with content, (folder / flat).open("xb") as file:
                    shutil.copyfileobj(content, file, _BLOCK)
                names[member.name] = flat
                if member.size < 2**20:
                    small[member.name] = (folder / flat).read_bytes()
    (manifest,) = json.loads(small["manifest.json"])
    config = json.loads(small[manifest["Config"]])
    layers = list(map(_image.plain_id, config["rootfs"]["diff_ids"]))
    files = [links.get(name, name) for name in manifest["Layers"]]
    if len(files) != len(layers):
        raise ValueError(f"{len(files)} files for {len(layers)} layers")
    index = {
        "config": names[manifest["Config"]],
        "layers": [{"id": layer, "file": None if layer in unneeded else names[file]} for layer, file in zip(layers, files, strict=True)],
    }
    # Also a layer that is not needed, of an engine that does not name its files by their content.
    kept = {index["config"], *(entry["file"] for entry in index["layers"])}
    for file in folder.iterdir():
        if file.name not in kept:
            file.unlink()
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def index_of(folder: Path) -> dict[str, Any]:
    """The index of such a folder. Raises ImageError."""
    try:
        content: dict[str, Any] = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ImageError(f"{folder} holds no exported image ({error}): run site.yml --tags runtime again") from error
    return content


def held_by(source: Path) -> _image.Archive:
    """The image of an archive or a folder. Raises ImageError."""
    if not source.is_dir():
        return _image.archive_of(str(source))
    return _image.configured((source / index_of(source)["config"]).read_bytes())


def pack(folder: Path, stream: IO[bytes], reference: str) -> None:
    """A folder as an archive for `docker load`."""
    index = index_of(folder)
    manifest = {
        "Config": index["config"],
        "RepoTags": [reference],
        "Layers": [entry["file"] or f"{entry['id']}.tar" for entry in index["layers"]],
    }
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name in dict.fromkeys([index["config"], *(entry["file"] for entry in index["layers"] if entry["file"])]):
            archive.add(folder / name, arcname=name)
        path = folder / "manifest.json"
        path.write_text(json.dumps([manifest]))
        archive.add(path, arcname="manifest.json")


def as_dir_transport(folder: Path) -> Path:
    """A folder in the form `dir:` of podman, of the same files: it names each by its SHA-256, and lets out what podman has."""
    index = index_of(folder)
    target = folder / "dir"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    config = (folder / index["config"]).read_bytes()
    identifier = hashlib.sha256(config).hexdigest()
    (target / identifier).write_bytes(config)
    layers = []
    for entry in index["layers"]:
        path = folder / entry["file"] if entry["file"] else None
        # podman does not ask for the size of a layer that it does not take from here.
        layers.append({"mediaType": _LAYER, "size": path.stat().st_size if path else 0, "digest": f"sha256:{entry['id']}"})
        if path and not (target / entry["id"]).exists():
            os.link(path, target / entry["id"])
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": len(config), "digest": f"sha256:{identifier}"},
        "layers": layers,
    }
    (target / "manifest.json").write_text(json.dumps(manifest))
    (target / "version").write_text("Directory Transport Version: 1.1\n")
    return target


_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
"""An unpacked layer, as podman saves them."""
