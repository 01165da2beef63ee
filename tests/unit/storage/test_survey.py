# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hashing real files, and when a file is read again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils._checkpoint import Found
from ansible_collections.gb10.cluster.plugins.module_utils._survey import BLOCK, Survey, survey

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(BLOCK + 1),  # more than one read
    "sub/empty": b"",
}
SIZES = {path: len(content) for path, content in FILES.items()}


class Checkpoint:
    """A directory with FILES, and where its stamps go."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "checkpoint"
        self.stamps = root / "stamps"
        for path, content in FILES.items():
            self.write(path, content)

    def write(self, path: str, content: bytes) -> None:
        (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / path).write_bytes(content)

    def look(self, deep: bool = False) -> Survey:
        return survey(self.directory, SIZES, deep, 2, self.stamps)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def hashes(files: dict[str, bytes]) -> dict[str, Found]:
    return {path: Found(len(content), hashlib.sha256(content).hexdigest()) for path, content in files.items()}


def test_files_are_hashed_once(checkpoint: Checkpoint) -> None:
    first, second = checkpoint.look(), checkpoint.look()
    assert first.found == second.found == hashes(FILES)
    assert (first.hashed, second.hashed) == (len(FILES), 0)


def test_a_written_file_is_read_again_though_its_times_were_set_back(checkpoint: Checkpoint) -> None:
    checkpoint.look()
    path = checkpoint.directory / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(BLOCK)
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen = checkpoint.look()
    assert seen.hashed == 1
    assert seen.found["model.safetensors"] == hashes({"": FILES["model.safetensors"][:-1] + b"x"})[""]


def test_only_deep_reading_finds_a_byte_that_turned_without_a_write(checkpoint: Checkpoint) -> None:
    """The rot is made by a stamp with another hash that fits the file's times: to the survey it is the same."""
    checkpoint.look()
    (stamp_file,) = checkpoint.stamps.iterdir()
    stamps = json.loads(stamp_file.read_text())
    stamps["files"]["config.json"]["sha256"] = "f" * 64
    stamp_file.write_text(json.dumps(stamps))
    assert checkpoint.look().found["config.json"].sha256 == "f" * 64
    assert checkpoint.look(deep=True).found == hashes(FILES)
    assert checkpoint.look().found == hashes(FILES)


def test_what_the_size_tells_is_not_read(checkpoint: Checkpoint) -> None:
    checkpoint.write("model.safetensors", b"cut")
    checkpoint.write("other", b"extra")
    seen = checkpoint.look()
    assert seen.hashed == 2
    assert seen.found["model.safetensors"] == Found(3)
    assert seen.found["other"] == Found(5)


def test_without_sizes_all_but_hidden_files_are_read(checkpoint: Checkpoint) -> None:
    checkpoint.write(".cache/huggingface/lock", b"")
    seen = survey(checkpoint.directory, None, False, 2, checkpoint.stamps)
    assert seen.found == {**hashes(FILES), ".cache/huggingface/lock": Found(0)}


def test_a_check_leaves_no_stamps(checkpoint: Checkpoint) -> None:
    survey(checkpoint.directory, SIZES, False, 2, None)
    assert not checkpoint.stamps.exists()


def test_links_are_faults_and_are_not_followed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.write("../elsewhere/config.json", b"{}")
    (checkpoint.directory / "config.json").unlink()
    (checkpoint.directory / "config.json").symlink_to(tmp_path / "elsewhere/config.json")
    (checkpoint.directory / "folder").symlink_to(tmp_path / "elsewhere")
    seen = checkpoint.look()
    assert "link" in seen.found["config.json"].fault
    assert "link" in seen.found["folder"].fault
    assert "folder/config.json" not in seen.found


@pytest.mark.parametrize("content", ["", "{", "[]", '{"directory": "%s"}', '{"directory": "%s", "files": 3}'])
def test_damaged_stamps_are_no_stamps(checkpoint: Checkpoint, content: str) -> None:
    checkpoint.look()
    (stamp_file,) = checkpoint.stamps.iterdir()
    stamp_file.write_text(content.replace("%s", str(checkpoint.directory)))
    assert checkpoint.look().hashed == len(FILES)
    assert checkpoint.look().hashed == 0


def test_stamps_of_another_directory_of_that_name_do_not_count(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.look()
    other = tmp_path / "other/checkpoint"
    other.mkdir(parents=True)
    (other / "config.json").hardlink_to(checkpoint.directory / "config.json")
    assert survey(other, SIZES, False, 2, checkpoint.stamps).hashed == 1


def test_a_directory_that_does_not_exist_is_empty_and_on_a_disk(tmp_path: Path) -> None:
    seen = survey(tmp_path / "not/there", SIZES, False, None, tmp_path / "stamps")
    assert (seen.found, seen.hashed) == ({}, 0)
    assert seen.free > 0
    assert not (tmp_path / "stamps").exists()


def test_the_kept_original_of_an_edited_file_is_read(checkpoint: Checkpoint) -> None:
    checkpoint.write("config.json.orig-hf", FILES["config.json"])
    checkpoint.write("config.json", b"{ edited }")
    assert checkpoint.look().found["config.json.orig-hf"] == hashes(FILES)["config.json"]
