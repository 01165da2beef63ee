# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Image archives, and what the engines say about images."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _image
from ansible_collections.gb10.cluster.plugins.module_utils._host import Result

CONFIG = b'{"architecture":"arm64","config":{"Labels":{"a":"b"}}}'
ID = hashlib.sha256(CONFIG).hexdigest()


def archive(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def manifest(*configs: str) -> bytes:
    return json.dumps([{"Config": config, "RepoTags": ["x:1"], "Layers": []} for config in configs]).encode()


@pytest.mark.parametrize("name", ["any.json", f"blobs/sha256/{ID}"], ids=["docker and podman", "docker since 25"])
def test_an_archives_id_is_its_configurations_hash_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert _image.archive_of(archive(tmp_path / "x.tar", {name: CONFIG, "manifest.json": manifest(name)})).id == ID


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"x": b""}, "manifest.json"),
        ({"manifest.json": b"{"}, "no image archive"),
        ({"manifest.json": b"[3]"}, "no image archive"),
        ({"manifest.json": manifest("gone.json")}, "gone.json"),
        ({"manifest.json": manifest("a", "b"), "a": CONFIG, "b": CONFIG}, "holds 2 images"),
    ],
)
def test_a_bad_archive_is_one_sentence(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    with pytest.raises(_image.ImageError, match=words) as caught:
        _image.archive_of(archive(tmp_path / "x.tar", files))
    assert "\n" not in str(caught.value)


def test_what_is_no_archive_at_all_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"<!DOCTYPE html>")
    for path in ("x.tar", "absent.tar"):
        with pytest.raises(_image.ImageError, match="no image archive"):
            _image.archive_of(str(tmp_path / path))


@pytest.mark.parametrize("shown", [ID, f"sha256:{ID}"], ids=["podman", "docker"])
@pytest.mark.parametrize("config", [{"Labels": {"a": "b"}}, {"Labels": None}, None])
def test_both_engines_tell_of_an_image(shown: str, config: Any) -> None:
    labels = {"a": "b"} if config and config["Labels"] else {}
    out = json.dumps([{"Id": shown, "Size": 7, "Config": config}])
    found = _image.inspected("podman", Result(0, out, ""))
    assert found and (found.id, found.labels, found.size) == (ID, labels, 7)


@pytest.mark.parametrize(
    "said", ["Error: x:1: image not known", "Error response from daemon: No such image: x:1", "Error: No such image: x:1"]
)
def test_an_absent_image_is_no_error(said: str) -> None:
    assert _image.inspected("docker", Result(1, "[]", said)) is None


@pytest.mark.parametrize("said", ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "podman is not installed"])
def test_an_engine_that_does_not_answer_is_one(said: str) -> None:
    with pytest.raises(_image.ImageError, match="does not answer"):
        _image.inspected("docker", Result(1, "", said))


def test_the_verdict_tells_absent_from_other() -> None:
    assert "there is no image x:1" in _image.verdict("x:1", None, ID)
    assert f"expected {ID}" in _image.verdict("x:1", _image.Image("f" * 64), f"sha256:{ID}")
    assert _image.verdict("x:1", _image.Image(ID), f"sha256:{ID}") == ""
    assert _image.verdict("x:1", _image.Image(ID), None) == ""
