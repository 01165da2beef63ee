# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image archive: the same files give the same bytes, and what is inside is what podman and docker look for."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tarfile
from pathlib import Path

import pytest

from tests.lab.engine import oci

REFERENCE = "localhost/test:1"
SETTINGS = {"Env": ["A=1"]}


@pytest.fixture
def layers(tmp_path: Path) -> list[tuple[str, Path]]:
    base, top = tmp_path / "base", tmp_path / "top"
    (base / "bin").mkdir(parents=True)
    (base / "bin/tool").write_text("tool")
    (base / "bin/tool").chmod(0o755)
    (base / "bin/link").symlink_to("tool")
    os.link(base / "bin/tool", base / "bin/twin")
    (base / "empty").mkdir(mode=0o700)
    long = top / ("d" * 120) / ("f" * 120)
    long.parent.mkdir(parents=True)
    long.write_bytes(b"x" * 1000)
    # As bytes `a.b` comes before `a/x`, in a tree it does not: a parent and its children stay together.
    (top / "a").mkdir()
    (top / "a/x").touch()
    (top / "a.b").touch()
    return [("base", base), ("top", top)]


def test_times_and_the_order_of_creation_do_not_change_the_archive(layers: list[tuple[str, Path]], tmp_path: Path) -> None:
    first, second = tmp_path / "1.tar", tmp_path / "2.tar"
    identifier = oci.write_image(first, REFERENCE, layers, SETTINGS)
    for _layer, root in layers:
        for path in root.rglob("*"):
            os.utime(path, (1, 1), follow_symlinks=False)
    assert oci.write_image(second, REFERENCE, layers, SETTINGS) == identifier
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("change", ["content", "mode", "settings", "order"])
def test_anything_else_changes_the_identifier(layers: list[tuple[str, Path]], tmp_path: Path, change: str) -> None:
    before = oci.write_image(tmp_path / "1.tar", REFERENCE, layers, SETTINGS)
    settings = {"Env": ["A=2"]} if change == "settings" else SETTINGS
    if change == "content":
        (layers[0][1] / "bin/tool").write_text("TOOL")
    if change == "mode":
        (layers[0][1] / "bin/tool").chmod(0o700)
    after = oci.write_image(tmp_path / "2.tar", REFERENCE, layers[::-1] if change == "order" else layers, settings)
    assert after != before


def test_the_configuration_names_the_layers_and_the_identifier_names_the_configuration(
    layers: list[tuple[str, Path]], tmp_path: Path
) -> None:
    archive = tmp_path / "image.tar"
    identifier = oci.write_image(archive, REFERENCE, layers, SETTINGS)
    with tarfile.open(archive) as image:
        content = {member.name: image.extractfile(member).read() for member in image}  # type: ignore[union-attr]
    [entry] = json.loads(content["manifest.json"])
    assert entry == {"Config": f"{identifier}.json", "RepoTags": [REFERENCE], "Layers": ["base.tar", "top.tar"]}
    body = content[entry["Config"]]
    assert hashlib.sha256(body).hexdigest() == identifier
    configuration = json.loads(body)
    assert configuration["config"] == SETTINGS
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(content[name]).hexdigest()}" for name in entry["Layers"]]
    assert set(content) == {"base.tar", "top.tar", "manifest.json", entry["Config"]}


def test_a_layer_unpacks_to_the_tree_that_it_was_made_from(layers: list[tuple[str, Path]], tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    oci.write_image(archive, REFERENCE, layers, SETTINGS)
    found: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(archive) as image:
        for name in ("base.tar", "top.tar"):
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                found |= {member.name: member for member in layer}
    assert found["bin/tool"].mode == 0o755
    assert found["empty"].isdir() and found["empty"].mode == 0o700
    assert found["bin/link"].linkname == "tool"
    assert found["bin/twin"].islnk() and found["bin/twin"].linkname == "bin/tool"
    assert found[f"{'d' * 120}/{'f' * 120}"].size == 1000
    names = list(found)
    assert names.index("a") + 1 == names.index("a/x") < names.index("a.b")
    assert {member.mtime for member in found.values()} == {0}


def test_a_socket_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))
        with pytest.raises(ValueError, match="socket"):
            oci.write_image(tmp_path / "image.tar", REFERENCE, [("base", root)], SETTINGS)
