# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that is told of packed Engram rows starts with right ones of every layer, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils._engram import Layout, Packed
from gb10_node import config, engram

from tests.unit.node.test_rank import Group

BUCKETS = tuple(range(500, 524))


class PackedGroup(Group):
    """The group of three, whose ranks are told of packed rows."""

    variable = engram.KIT

    def config(self, rank: int, digest: str = "d" * 64) -> dict[str, Any]:
        data = super().config(rank, digest)
        data["container"]["environment"][self.variable] = "/packed"
        data["container"]["volumes"] = [
            {"source": str(self.root / "tables"), "target": "/models/tables", "read_only": True},
            {"source": str(self.root / f"packed{rank}"), "target": "/packed", "read_only": True},
        ]
        return data

    def pack(self, rank: int) -> None:
        for layer in (1, 14):
            packed = Packed(Layout(layer, BUCKETS), rank, 3)
            path = self.root / f"packed{rank}" / packed.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(packed.header())
            os.truncate(path, packed.size)

    def problem(self, rank: int, change: Callable[[dict[str, Any]], object] = dict) -> str:
        folder = self.root / "etc" / "lab"
        folder.mkdir(parents=True, exist_ok=True)
        data = self.config(rank)
        change(data["container"])
        (folder / "rank.json").write_text(json.dumps(data))
        (folder / "api-key").write_text("sesame\n")
        return engram.problem(config.load("lab", folder.parent, self.root / "run", self.root / "var"))


@pytest.fixture(params=[engram.KIT, engram.OVERLAY])
def group(tmp_path: Path, request: pytest.FixtureRequest) -> PackedGroup:
    group = PackedGroup(tmp_path)
    group.variable = request.param
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/config.json").write_text(json.dumps({"text_config": {"engram_layer_ids": [1, 14]}}))
    for rank in range(3):
        group.pack(rank)
    return group


def test_what_the_collection_packs_is_right(group: PackedGroup) -> None:
    assert [group.problem(rank) for rank in range(3)] == ["", "", ""]
    assert group.problem(0, lambda container: container.update(environment={})) == ""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
        (lambda path: os.truncate(path, 100), "is cut (100 bytes)"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes instead of"),
        (lambda path: path.write_bytes(bytes(5000)), "has the header of another file"),
        (lambda path: path.write_bytes(path.with_name("engram-l1-r1of3.bin").read_bytes()), "has the header of another file"),
    ],
)
def test_a_wrong_file_of_the_second_layer_is_told(group: PackedGroup, damage: Callable[[Path], object], words: str) -> None:
    path = group.root / "packed1/engram-l14-r1of3.bin"
    damage(path)
    sentence = group.problem(1)
    assert sentence.startswith(str(path))
    assert words in sentence
    assert sentence.endswith("run site.yml --tags storage")


def test_a_profile_that_mounts_nothing_there_is_told(group: PackedGroup) -> None:
    # The overlay may be told of a folder within another mount, and says itself what it finds there.
    said = group.problem(0, lambda container: container["volumes"].pop())
    assert ("where nothing is mounted" in said) == (group.variable == engram.KIT)
    (group.root / "tables/config.json").write_text("{")
    assert "names Engram layers" in group.problem(0)


def test_a_folder_of_shards_is_the_overlays_own_business(group: PackedGroup) -> None:
    for path in (group.root / "packed0").iterdir():
        path.unlink()
    (group.root / "packed0" / engram.INDEX).write_text("{}")
    assert bool(group.problem(0)) == (group.variable == engram.KIT)


def test_no_container_starts_without_its_rows(group: PackedGroup) -> None:
    (group.root / "packed1/engram-l14-r1of3.bin").unlink()
    for rank in range(3):
        group.start(rank)
    assert group.statuses() == [75, 1, 75]
    assert group.state(0)["failure"]["reason"].startswith("rank 1 on t2 cannot start: ")
    assert not [call for call in group.calls("run") if "gb10-lab-1" in call]
