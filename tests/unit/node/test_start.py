# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What must hold before a start: the rules over tables and generated figures, and real supervisors that refuse; the evidence that they keep."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.lookup.node_package import package
from ansible_collections.gb10.cluster.plugins.module_utils import _padding, _roce, _start
from gb10_node import config, evidence
from gb10_node.coordination import GroupEnd
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node.test_rank import Group, ended, wait_for

HEADS = {"num_attention_heads": 72, "o_groups": 9, "from": {"num_attention_heads": 64, "o_groups": 8}}
LEGS = [
    {"hca": "rocep1s0f0", "netdev": "enp1s0f0np0", "address": "10.10.0.1"},
    {"hca": "roceP2p1s0f0", "netdev": "enP2p1s0f0np0", "address": "10.10.1.1"},
]


def hcas(*indexes: int, state: str = _roce.STATE_ACTIVE) -> dict[str, _roce.Hca]:
    """The HCAs of LEGS with their address at these indexes."""
    return {
        leg["hca"]: _roce.Hca(
            leg["hca"], leg["netdev"], state, 200.0, 9000, (_roce.Gid(index, _roce.ROCE_V2, f"::ffff:{leg['address']}", leg["netdev"]),)
        )
        for leg, index in zip(LEGS, indexes, strict=True)
    }


def test_a_moved_index_is_told_and_one_for_all_is_used() -> None:
    gids = _start.resolve_gids(hcas(5, 5), LEGS)
    assert (gids.common, gids.problems) == (5, [])
    assert gids.changes({"rocep1s0f0": 3, "roceP2p1s0f0": 5}) == ["HCA rocep1s0f0 carries its address at GID index 5 instead of 3"]
    assert gids.changes({}) == [], "a first start has nothing to compare with"
    assert _start.resolve_gids(hcas(3, 5), LEGS).common is None, "one number cannot express two"


def test_a_leg_that_is_down_or_gone_is_refused_and_a_slow_one_is_not() -> None:
    assert "is 1: DOWN instead of 4: ACTIVE" in _start.resolve_gids(hcas(3, 3, state="1: DOWN"), LEGS).problems[0]
    one = {"rocep1s0f0": hcas(3, 3)["rocep1s0f0"]}
    assert _start.resolve_gids(one, LEGS).problems[0].startswith("HCA roceP2p1s0f0 does not exist")
    slow = {name: _roce.Hca(hca.name, hca.netdev, hca.state, 100.0, 9000, hca.gids) for name, hca in hcas(3, 3).items()}
    assert _start.resolve_gids(slow, LEGS).problems == []


def test_config_json_must_be_the_one_that_was_seen_and_padded() -> None:
    original = {"text_config": {"num_attention_heads": 64, "o_groups": 8}}
    padded = _padding.text_of(_padding.pad(original, _padding.shape_of(HEADS, 3)))
    kept = hashlib.sha256(padded.encode()).hexdigest()
    assert _start.checkpoint_problem("/m", padded, kept, HEADS, 3) == ""
    assert "is not padded for 3 ranks, as after a new staging" in _start.checkpoint_problem("/m", json.dumps(original), kept, HEADS, 3)
    assert "is not the one that was there" in _start.checkpoint_problem("/m", padded + " ", kept, HEADS, 3)
    assert "cannot be judged" in _start.checkpoint_problem("/m", "{", "", HEADS, 3)
    assert "is not there" in _start.checkpoint_problem("/m", None, "", {}, 3)
    assert _start.checkpoint_problem("/m", "{}", "", {}, 3) == "", "a plain checkpoint that the role did not see"


@given(st.integers(0, 1 << 18), st.integers(0, 1 << 18), st.integers(0, 1 << 18))
def test_only_memfree_decides(need: int, free: int, available: int) -> None:
    assert (_start.memory_problem(need, free, available, []) == "") == (free >= need)


def test_cache_that_cannot_be_dropped_is_three_numbers_and_a_name() -> None:
    """vllm#35313: MemFree 41.5 GiB beside MemAvailable 115.9."""
    said = _start.memory_problem(105_881, 42_516, 118_690, [("python3 (pid 7)", 61_440)])
    assert said.startswith("41.5 GiB are free and 115.9 available with the page cache dropped, but a start needs 103.4 free: ")
    assert said.endswith("(GiB: python3 (pid 7) 60.0)")


WORDS = st.lists(st.sampled_from(["serve", "--dtype", "float32", "--enforce-eager", "/models/x", "--max-model-len=7"]), max_size=6)


@given(WORDS, st.integers(0, 9), st.booleans())
def test_ranks_differ_by_what_is_their_own_and_nothing_else(words: list[str], rank: int, equals: bool) -> None:
    placed = [f"--node-rank={rank}"] if equals else ["--node-rank", str(rank)]
    own = [*placed, *(["--headless"] if rank else ["--host", "0.0.0.0", "--port", "8000"])]
    environment = {"VLLM_HOST_IP": f"198.51.100.{rank}", "NCCL_IB_HCA": f"=hca{rank}", "A": "secret value"}
    ours = _start.fingerprint(environment, [*words, *own])
    assert _start.difference(_start.fingerprint({"VLLM_HOST_IP": "other", "A": "secret value"}, words), ours) == ""
    assert "secret" not in json.dumps(ours)
    assert _start.difference(ours, _start.fingerprint({"A": "another"}, words)) == "A"
    assert _start.difference(ours, _start.fingerprint({"A": "secret value"}, [*words, "--more"])) == "the arguments"


def test_the_packed_file_holds_all_that_it_imports(tmp_path: Path) -> None:
    with zipfile.ZipFile(BytesIO(b64decode(package()))) as archive:
        modules = [
            name.removesuffix(".py").replace("/", ".") for name in archive.namelist() if name.startswith("gb10_") and "__" not in name
        ]
    assert "gb10_core._start" in modules and "gb10_node.start_checks" in modules
    code = f"import importlib, sys; sys.path.insert(0, sys.argv[1]); [importlib.import_module(name) for name in {modules!r}]"
    path = tmp_path / "gb10_node.pyz"
    path.write_bytes(b64decode(package()))
    subprocess.run([sys.executable, "-I", "-c", code, str(path)], check=True, timeout=60)


class CheckedGroup(Group):
    """Three ranks whose configuration a test changes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.change: Callable[[int, dict[str, Any]], object] = lambda rank, config: None

    def config(self, rank: int, digest: str = "d" * 64) -> dict[str, Any]:
        data = super().config(rank, digest)
        data["container"]["environment"]["HF_TOKEN"] = "hf_sesame"
        self.change(rank, data)
        return data

    def reasons(self) -> set[str]:
        """Start all; why the group did not start, as each member knows it."""
        for rank in range(3):
            self.start(rank)
        self.statuses()
        return {self.state(rank)["failure"]["reason"] for rank in range(3)}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[CheckedGroup]:
    yield from ended(CheckedGroup(tmp_path))


def test_ranks_that_would_differ_do_not_start(group: CheckedGroup) -> None:
    group.change = lambda rank, config: config["container"]["environment"].update({"NCCL_BUFFSIZE": str(1 + (rank == 2))})
    (reason,) = group.reasons()
    assert reason.startswith("rank 2 on t3 would start with another value of NCCL_BUFFSIZE than the head: ")
    assert group.calls("run") == [], "no container of any rank has run"


def test_a_missing_image_is_refused_everywhere_and_leaves_evidence(group: CheckedGroup) -> None:
    (group.root / "noimage").touch()
    reasons = group.reasons()
    assert any("cannot start: there is no image i: run site.yml --tags runtime" in reason for reason in reasons)
    assert group.calls("run") == []
    assert json.loads((group.root / "var0/recovery/lab.json").read_text())["failures"]


def test_a_failure_leaves_one_folder_on_each_member_without_a_secret(group: CheckedGroup) -> None:
    """Rank 1 dies when all containers stand, on a loaded machine as well."""
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    standing = (group.root / "gb10-lab-2.pid").read_text()
    (group.root / "proc" / standing).symlink_to(f"/proc/{standing}")
    os.kill(int((group.root / "gb10-lab-1.pid").read_text()), signal.SIGKILL)
    group.statuses()
    (reason,) = {group.state(rank)["failure"]["reason"] for rank in range(3)}
    folders = [sorted((group.root / f"var{rank}/evidence/lab").iterdir()) for rank in range(3)]
    assert len({folder.name for (folder,) in folders}) == 1 and folders[0][0].name.endswith("-failed-run")
    for rank, (folder,) in enumerate(folders):
        assert json.loads((folder / "event.json").read_text())["reason"] == reason
        assert "HF_TOKEN=(hidden)\n" in (folder / "environment").read_text() and "A=b c\n" in (folder / "environment").read_text()
        assert "MemFree" in (folder / "meminfo").read_text() and f"engine of gb10-lab-{rank}" in (folder / "rank.log").read_text()
        assert not any("sesame" in file.read_text() for file in folder.iterdir())
    assert "-- kernel" in (folders[2][0] / "stacks").read_text() and "py-spy: " in (folders[2][0] / "stacks").read_text()
    assert group.state(0)["failure"]["evidence"] == str(folders[0][0])


def test_a_start_that_logs_nothing_on_any_rank_hangs(group: CheckedGroup) -> None:
    def hang(rank: int, config: dict[str, Any]) -> None:
        config["recovery"]["load_silence_s"] = 4
        config["api"]["port"] += 1  # where nobody answers

    group.change = hang
    (reason,) = group.reasons()
    assert reason.startswith("rank 0 on t1 waits for the model, and no rank has logged a line for ")
    assert next((group.root / "var2/evidence/lab").iterdir()).name.endswith("-hang")


def test_the_indexes_of_the_last_start_are_remembered(group: CheckedGroup, tmp_path: Path) -> None:
    hca = tmp_path / "sys1/class/infiniband/rocep1s0f0"
    port = hca / "ports/1"
    for path, text in {
        hca / "parent": "enp1s0f0np0", port / "state": _roce.STATE_ACTIVE, port / "gids/5": "0000:0000:0000:0000:0000:ffff:0a0a:0001",
        port / "gid_attrs/types/5": _roce.ROCE_V2, port / "gid_attrs/ndevs/5": "enp1s0f0np0",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "var1/gids").mkdir(parents=True)
    (tmp_path / "var1/gids/lab.json").write_text('{"rocep1s0f0": 3}')
    group.change = lambda rank, config: config["container"]["devices"].append("/dev/infiniband") if rank == 1 else None
    for rank in range(3):
        group.start(rank)
    wait_for(lambda: group.phases() == ["serving"] * 3)
    state = group.state(1)
    assert [event["what"] for event in state["events"]] == ["HCA rocep1s0f0 carries its address at GID index 5 instead of 3"]
    assert state["checks"]["environment"] == {"NCCL_IB_GID_INDEX": "5"}
    assert "NCCL_IB_GID_INDEX=5\n" in (tmp_path / "run1/lab/rank.env").read_text()
    assert json.loads((tmp_path / "var1/gids/lab.json").read_text()) == {"rocep1s0f0": 5}


def test_what_another_rank_calls_an_event_is_no_path() -> None:
    said = {"reason": "r", "culprit": "t2", "log": []}
    name = evidence.event_name(evidence.HANG, 1e9)
    assert GroupEnd.received(said | {"event": name}).event == name == "20010909T014640Z-hang"
    assert {GroupEnd.received(said | {"event": event}).event for event in ("../../x", f"{name}/..", "", None, 3)} == {""}


def test_old_evidence_goes_and_a_long_file_keeps_its_end(group: CheckedGroup, tmp_path: Path) -> None:
    group.start(0)  # for its files
    wait_for(lambda: group.state(0)["phase"] == "waiting")
    loaded = config.load("lab", tmp_path / "etc0", tmp_path / "run0", tmp_path / "var0", tmp_path / "proc")
    for number in range(evidence.KEPT + 3):
        log = ["x" * 1000] * 2000 + [f"last {number}"]
        evidence.collect(loaded, evidence.Evidence(evidence.event_name("hang", 1e9 + number), "why", "t1", log))
    folders = sorted(path.name for path in loaded.evidence.iterdir())
    assert len(folders) == evidence.KEPT and folders[-1] == evidence.event_name("hang", 1e9 + evidence.KEPT + 2)
    kept = (loaded.evidence / folders[-1] / "rank.log").read_bytes()
    assert len(kept) == evidence.FILE_LIMIT and kept.endswith(f"last {evidence.KEPT + 2}\n".encode())
