# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""An image as files between members: from an engine's archive, less what nobody lacks, and in the form that each engine loads."""

from __future__ import annotations

import io
import json
import random
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _engine, _image

LAYERS = [random.Random(1).randbytes(1_600_000), b"middle", b"top"]
IDS = [sha256(layer).hexdigest() for layer in LAYERS]
CONFIG = json.dumps(
    {"architecture": "arm64", "os": "linux", "config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": [f"sha256:{each}" for each in IDS]}}
).encode()
ID = sha256(CONFIG).hexdigest()


def saved(names: list[str], config: str, links: dict[str, str] | None = None) -> io.BytesIO:
    """What `save` writes, synthetic: layers under these names, links, configuration and manifest."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))

        for name, layer in zip(names, LAYERS, strict=True):
            if name not in (links or {}):
                add(name, layer)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        add(config, CONFIG)
        add("manifest.json", json.dumps([{"Config": config, "RepoTags": ["x:1"], "Layers": names}]).encode())
    buffer.seek(0)
    return buffer


FORMS = {
    "podman": ([f"{each}.tar" for each in IDS], f"{ID}.json"),
    "docker": ([f"{number}{'0' * 63}/layer.tar" for number in range(3)], f"{ID}.json"),
    "docker since 25": ([f"blobs/sha256/{each}" for each in IDS], f"blobs/sha256/{ID}"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needed", [[], [2], [1, 2], [0, 1, 2]])
def test_only_the_needed_layers_are_laid_out(tmp_path: Path, form: str, needed: list[int]) -> None:
    unneeded = {layer for number, layer in enumerate(IDS) if number not in needed}
    _engine.unpack(saved(*FORMS[form]), tmp_path, unneeded)
    index = _engine.index_of(tmp_path)
    assert [entry["id"] for entry in index["layers"]] == IDS
    contents = [(tmp_path / entry["file"]).read_bytes() if entry["file"] else None for entry in index["layers"]]
    assert contents == [layer if number in needed else None for number, layer in enumerate(LAYERS)]
    assert len(list(tmp_path.iterdir())) == len(needed) + 2
    held = _engine.held_by(tmp_path)
    assert (held.id, held.layers) == (ID, tuple(IDS))


def test_a_layer_that_the_archive_has_as_a_link_is_followed(tmp_path: Path) -> None:
    names = ["a/layer.tar", "b/layer.tar", "c/layer.tar"]
    stream = saved(names, f"{ID}.json", links={"b/layer.tar": "../a/layer.tar"})
    _engine.unpack(stream, tmp_path, set())
    assert [entry["file"] for entry in _engine.index_of(tmp_path)["layers"]] == ["a+layer.tar", "a+layer.tar", "c+layer.tar"]


@pytest.mark.parametrize("content", [b"", b"no archive" * 100, saved(*FORMS["podman"]).getvalue()[:1_000_000]])
def test_a_stream_that_ends_early_is_no_archive(tmp_path: Path, content: bytes) -> None:
    with pytest.raises((tarfile.TarError, LookupError, ValueError, OSError)):
        _engine.unpack(io.BytesIO(content), tmp_path, set())
    with pytest.raises(_image.ImageError, match="holds no exported image"):
        _engine.index_of(tmp_path)


def test_podman_gets_names_that_are_hashes_and_sizes_of_what_is_there(tmp_path: Path) -> None:
    _engine.unpack(saved(*FORMS["docker"]), tmp_path, set(IDS[:1]))
    folder = _engine.as_dir_transport(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [layer["digest"] for layer in manifest["layers"]] == [f"sha256:{each}" for each in IDS]
    assert manifest["config"]["digest"] == f"sha256:{ID}"
    assert not (folder / IDS[0]).exists()
    for name in (ID, *IDS[1:]):
        assert sha256((folder / name).read_bytes()).hexdigest() == name
    _engine.as_dir_transport(tmp_path)  # again, after a load that failed


def test_docker_gets_an_archive_that_names_every_layer(tmp_path: Path) -> None:
    _engine.unpack(saved(*FORMS["podman"]), tmp_path, set(IDS[:2]))
    buffer = io.BytesIO()
    _engine.pack(tmp_path, buffer, "localhost/x:1")
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        assert sorted(archive.getnames()) == sorted([f"{IDS[2]}.tar", f"{ID}.json", "manifest.json"])
        file = archive.extractfile("manifest.json")
        assert file is not None
        (manifest,) = json.load(file)
    assert manifest["Layers"] == [f"{each}.tar" for each in IDS] and manifest["RepoTags"] == ["localhost/x:1"]
