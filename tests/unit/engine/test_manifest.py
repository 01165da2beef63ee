# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The manifest of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.lab.engine import manifest


def test_every_file_with_size_and_hash_in_order_of_paths(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for name, body in (("sub/b", b"2"), ("sub.json", b"33"), ("a", b"")):
        (directory / name).write_bytes(body)
    path = manifest.write(directory)
    assert path == tmp_path / "model.manifest.json"
    assert json.loads(path.read_text()) == {
        "version": 1,
        "files": [
            {"path": name, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
            for name, body in (("a", b""), ("sub.json", b"33"), ("sub/b", b"2"))
        ],
    }


def test_the_manifest_is_no_part_of_what_it_describes(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a").touch()
    first = manifest.write(directory).read_bytes()
    assert manifest.write(directory).read_bytes() == first
