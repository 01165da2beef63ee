# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which old checkpoints go, and that none goes that somebody uses."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _generation, _reclaim
from ansible_collections.gb10.cluster.plugins.module_utils._reclaim import Candidate, Mount
from ansible_collections.gb10.cluster.plugins.modules import checkpoint_reclaim
from hypothesis import given
from hypothesis import strategies as st

NAMES = ("oldest", "old", "new")


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8), st.one_of(st.none(), st.integers(0, 9)))
def test_what_is_used_and_the_newest_stay(facts: list[tuple[int, bool]], keep: int | None) -> None:
    candidates = [Candidate(f"c{number}", 1, newest, "used" * used) for number, (newest, used) in enumerate(facts)]
    going = _reclaim.choose(candidates, keep)
    unused = [candidate for candidate in candidates if not candidate.use]
    assert len(going) == (0 if keep is None else max(0, len(unused) - keep))
    assert all(candidate in unused for candidate in going)
    staying = [candidate for candidate in unused if candidate not in going]
    assert all(gone.newest <= stays.newest for gone in going for stays in staying)


def test_a_containers_mount_is_found_by_its_place_in_the_filesystem() -> None:
    own = _reclaim.parse_mountinfo(
        "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n30 22 254:1 /sub /var/lib/my\\040models rw - ext4 /dev/vdb rw\n"
    )
    assert own == [Mount("254:0", "/", "/"), Mount("254:1", "/sub", "/var/lib/my models")]
    device, inside = _reclaim.place("/var/lib/my models/a", own)
    assert (device, inside) == ("254:1", "/sub/a")
    for root, used in (("/sub/a", True), ("/sub/a/b", True), ("/sub/ab", False), ("/sub", False), ("/", False)):
        assert _reclaim.is_mounted(device, inside, [Mount("254:1", root, "/models/x")]) is used
    assert not _reclaim.is_mounted(device, inside, [Mount("254:0", "/sub/a", "/models/x")])


class Root:
    """A storage root with three verified checkpoints, the last one the newest."""

    def __init__(self, root: Path, run: Callable[..., dict[str, Any]]) -> None:
        self.root, self._run = root / "models", run
        self.stamps, self.groups, self.exports, self.generations = root / "stamps", root / "etc", root / "etab", root / "generations"
        for age, name in enumerate(NAMES):
            path = self.root / name / "model.safetensors"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes(8192))
            self.stamps.mkdir(exist_ok=True)
            (self.stamps / f"{name}.json").write_text(json.dumps({"directory": str(path.parent), "files": {}}))
            for item in (path, path.parent):
                os.utime(item, (age, age))

    def run(self, **options: Any) -> dict[str, Any]:
        return self._run("checkpoint_reclaim", root=self.root, **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())

    def use(self, name: str) -> str:
        return next(entry["use"] for entry in self.run()["checkpoints"] if entry["name"] == name)


@pytest.fixture
def root(tmp_path: Path, run_module: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Root:
    root = Root(tmp_path, run_module)
    for name, path in (("STAMPS", root.stamps), ("GROUPS", root.groups), ("EXPORTS", root.exports), ("GENERATIONS", root.generations)):
        monkeypatch.setattr(checkpoint_reclaim, name, path)
    return root


def test_without_a_number_all_are_listed_and_none_goes(root: Root) -> None:
    result = root.run()
    assert (result["changed"], result["removed"]) == (False, [])
    assert [(entry["name"], entry["size"], entry["use"]) for entry in result["checkpoints"]] == [(name, 8192, "") for name in sorted(NAMES)]


def test_the_oldest_go_and_the_second_run_does_nothing(root: Root) -> None:
    assert root.run(keep=1, check=True)["removed"] == ["oldest", "old"]
    assert root.names() == sorted(NAMES)
    result = root.run(keep=1)
    assert (result["removed"], result["freed"]) == (["oldest", "old"], 2 * 8192)
    assert root.names() == ["new"]
    assert [path.name for path in root.stamps.iterdir()] == ["new.json"]
    assert not root.run(keep=1)["changed"]


def test_what_the_plan_names_stays(root: Root) -> None:
    assert root.run(keep=0, in_use=["oldest"])["removed"] == ["old", "new"]


def test_what_a_configured_group_mounts_stays_though_it_is_stopped(root: Root) -> None:
    config = {"container": {"volumes": [{"source": str(root.root / "old"), "target": "/models/old", "read_only": True}]}}
    (root.groups / "lab").mkdir(parents=True)
    (root.groups / "lab/rank.json").write_text(json.dumps(config))
    (root.groups / "broken").mkdir()
    (root.groups / "broken/rank.json").write_text("{")
    assert root.use("old") == "group lab is configured with it"
    assert root.run(keep=0)["removed"] == ["oldest", "new"]


def test_what_a_group_can_be_rolled_back_to_stays(root: Root) -> None:
    container = {"volumes": [{"source": str(root.root / "old"), "target": "/models/old", "read_only": True}]}
    plan = {"cluster": {"digest": "d"}, "members": {"t1": {"rank_config": {"container": container}}}}
    root.generations.mkdir()
    before = _generation.Generation(1, 0.0, plan, "image", "content", "hash")
    (root.generations / "lab.json").write_text(_generation.text_of([before]))
    (root.generations / "broken.json").write_text("{")
    assert root.use("old") == "group lab can be rolled back to it"
    assert root.run(keep=0)["removed"] == ["oldest", "new"]


def test_the_owners_directories_links_and_exports_stay(root: Root, tmp_path: Path) -> None:
    (root.root / "datasets").mkdir()
    (root.stamps / "old.json").write_text(json.dumps({"directory": "/elsewhere/old"}))
    (root.root / "link").symlink_to(tmp_path)
    root.exports.write_text(f"{root.root / 'new'}\t10.0.0.2(ro,root_squash)\n")
    assert root.run(keep=0)["removed"] == ["oldest"]
    assert {name: root.use(name) for name in ("datasets", "old", "link", "new")} == {
        "datasets": "this collection never verified it",
        "old": "this collection never verified it",
        "link": "it is a link",
        "new": "NFS exports it",
    }


@pytest.fixture
def container(root: Root, tmp_path: Path) -> Iterator[None]:
    """A process with a mount namespace of its own, in which the directory `old` is mounted elsewhere, as an engine's container has it."""
    target = tmp_path / "inside"
    target.mkdir()
    script = 'mount --bind "$1" "$2" && echo mounted && exec sleep 60'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(root.root / "old"), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    mounted = process.stdout.readline()
    if not mounted:
        process.wait()
        pytest.skip("needs the right to make mount namespaces")
    yield
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("container")
def test_what_a_container_has_mounted_stays(root: Root) -> None:
    assert root.use("old") == "a process has it mounted"
    assert root.run(keep=0)["removed"] == ["oldest", "new"]
    assert root.names() == ["old"]


def test_a_cut_run_is_finished(root: Root) -> None:
    (root.root / "oldest").rename(root.root / ".reclaimed-oldest")
    assert root.run()["changed"] is False
    assert root.run(keep=2)["removed"] == [".reclaimed-oldest"]
    assert root.names() == ["new", "old"]


def test_linked_files_give_no_room(root: Root, tmp_path: Path) -> None:
    (tmp_path / "other").hardlink_to(root.root / "old/model.safetensors")
    assert {entry["name"]: entry["size"] for entry in root.run()["checkpoints"]} == {"new": 8192, "old": 0, "oldest": 8192}


def test_a_negative_number_and_a_missing_root_are_no_accident(root: Root, tmp_path: Path) -> None:
    assert "keep is -1" in root.run(keep=-1)["msg"]
    root.root = tmp_path / "nothing"
    assert root.run(keep=0)["checkpoints"] == []
