# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a group served with before: the rules over any history, and the door to them over files and a stand-in for podman."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _generation, _units
from ansible_collections.gb10.cluster.plugins.module_utils._generation import Generation
from ansible_collections.gb10.cluster.plugins.modules import generation
from hypothesis import given
from hypothesis import strategies as st


def plan(digest: str, checkpoint: str = "/models/a", engine: str = "podman") -> dict[str, Any]:
    config = {
        "start": {"checkpoint": checkpoint},
        "container": {"image": "name:tag", "volumes": [{"source": checkpoint, "target": "/m", "read_only": True}]},
    }
    return {
        "version": 1,
        "cluster": {"digest": digest, "engine": engine, "profile": "p"},
        "members": {"t1": {"rank": 0, "rank_config": config}},
    }


def one(digest: str, at: float = 0.0) -> Generation:
    return Generation(0, at, plan(digest), f"image of {digest}", f"content of {digest}", "c" * 64)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_the_last_two_that_differ_are_kept_and_a_rollback_leads_to_the_other(history: list[str]) -> None:
    known: list[Generation] = []
    for at, digest in enumerate(history):
        known = _generation.recorded(known, one(digest, at))
        assert known[-1].digest == one(digest).digest and len({each.digest for each in known}) == len(known) <= _generation.KEPT
    changes = [digest for place, digest in enumerate(history) if place == 0 or history[place - 1] != digest]
    back = _generation.previous(known, known[-1].digest)
    assert (back.plan["cluster"]["digest"] if back else None) == (changes[-2] if len(changes) > 1 else None)
    assert known[-1].number == len(changes)
    assert _generation.parse(_generation.text_of(known)) == known


def test_what_never_served_is_left_for_what_served_last() -> None:
    known = _generation.recorded(_generation.recorded([], one("a")), one("b"))
    back = _generation.previous(known, "a plan that did not come up")
    assert back is not None and back.plan["cluster"]["digest"] == "b"


def test_one_that_comes_back_keeps_the_plan_that_it_was_noted_with() -> None:
    known = _generation.recorded(_generation.recorded([], one("a")), one("b"))
    again = replace(known[0], number=0, at=9.0, plan=known[0].pinned())
    kept = _generation.recorded(known, again)[-1]
    assert (kept.number, kept.at, kept.plan) == (3, 9.0, plan("a"))


def test_members_whose_stores_name_an_image_differently_remember_the_same() -> None:
    other = replace(one("a"), image="its manifest")
    assert other.digest == one("a").digest != replace(one("a"), content="of another").digest
    assert other.pinned()["members"]["t1"]["rank_config"]["container"]["image"] == "its manifest"


def test_a_plan_goes_back_with_the_image_and_not_with_its_name() -> None:
    assert one("a").pinned()["members"]["t1"]["rank_config"]["container"]["image"] == "image of a"
    assert one("a").plan["members"]["t1"]["rank_config"]["container"]["image"] == "name:tag"


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '[{"number": 1}]', "7"])
def test_a_damaged_file_holds_none(text: str | None) -> None:
    assert _generation.parse(text) == []


PODMAN = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls: calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["image", "inspect"]:
    if (here / "gone").exists(): sys.exit("Error: image not known")
    print(json.dumps([{{"Id": sys.argv[3]}}]))
"""


class Member:
    """A member whose rank serves with a plan; the module as Ansible runs it."""

    def __init__(self, root: Path, run: Callable[..., dict[str, Any]], patch: pytest.MonkeyPatch) -> None:
        self.root, self._run, self._patch = root, run, patch
        self.engine = root / "podman"
        self.engine.write_text(PODMAN.format(python=sys.executable))
        self.engine.chmod(0o755)
        self.checkpoint = root / "model"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        self.file = root / "generations/lab.json"
        patch.setattr(_generation, "FOLDER", str(self.file.parent))
        self.phase = "serving"
        patch.setattr(_units, "read_rank_state", lambda group: _units.RankState("active", self.phase, "", "", None))
        patch.setattr(generation, "rank_json", lambda module: self.rank)

    def serve(self, digest: str) -> dict[str, Any]:
        """Set up a plan, and let it be noted."""
        self.plan, image, config = (
            plan(digest, str(self.checkpoint), str(self.engine)),
            digest * 64,
            _units.config_hash(str(self.checkpoint)),
        )
        self.rank = {
            "container": {"image": image},
            "start": {"config_hash": config},
            "files": {"image": f"content of {digest}", "node": "n"},
        }
        self.rank["digest"] = _units.rank_digest(self.plan, self.rank["files"]["image"], config, self.rank)
        return self.run(plan=self.plan)

    def run(self, **options: Any) -> dict[str, Any]:
        return self._run("generation", group="lab", **options)

    def calls(self, verb: str) -> list[str]:
        return [line for line in (self.root / "calls").read_text().splitlines() if line.split()[0] == verb]


@pytest.fixture
def member(tmp_path: Path, run_module: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(tmp_path, run_module, monkeypatch)


def test_what_serves_is_noted_once_and_its_image_gets_a_name(member: Member) -> None:
    first = member.serve("a")
    assert first["changed"] and first["number"] == 1
    assert stat.S_IMODE(member.file.stat().st_mode) == 0o600
    assert first["diff"]["after"] == f"generation 1: profile p, image {'a' * 12}, {member.checkpoint}\n"
    assert not member.serve("a")["changed"]
    assert member.calls("tag") == [f"tag {'a' * 64} localhost/gb10-generation:lab-{first['digest'][:12]}"]
    assert "nothing to go back to" in member.run(state="previous")["msg"]


def test_what_does_not_serve_is_not_noted(member: Member) -> None:
    member.phase = "loading"
    assert "does not serve (loading)" in member.serve("a")["msg"] and not member.file.exists()


def test_the_one_before_is_found_whole_and_a_third_takes_its_place(member: Member) -> None:
    first = member.serve("a")
    member.serve("b")
    found = member.run(state="previous")
    assert (found["changed"], found["number"], found["digest"]) == (False, 1, first["digest"])
    assert found["plan"]["members"]["t1"]["rank_config"]["container"]["image"] == "a" * 64
    member.serve("c")
    assert member.calls("rmi") == [f"rmi localhost/gb10-generation:lab-{first['digest'][:12]}"]
    assert len(json.loads(member.file.read_text())) == 2


def test_an_image_that_is_gone_is_one_sentence(member: Member) -> None:
    member.serve("a")
    member.serve("b")
    (member.root / "gone").touch()
    assert member.run(state="previous")["msg"].startswith("the image of generation 1 of group lab is gone from this member (")


@pytest.mark.parametrize(("change", "word"), [("{ }", "was changed since"), (None, "is not there")])
def test_a_checkpoint_that_is_another_is_one_sentence(member: Member, change: str | None, word: str) -> None:
    member.serve("a")
    member.serve("b")
    path = member.checkpoint / "config.json"
    path.unlink() if change is None else path.write_text(change)
    assert f"config.json of generation 1 of group lab {word}: bring that checkpoint back" in member.run(state="previous")["msg"]


def test_a_plan_of_another_version_is_refused(member: Member) -> None:
    member.serve("a")
    member.serve("b")
    member.file.write_text(member.file.read_text().replace('"version": 1', '"version": 0'))
    assert "was planned by another version of this collection" in member.run(state="previous")["msg"]


def test_absent_forgets_and_check_mode_does_nothing(member: Member) -> None:
    member.serve("a")
    assert member.run(state="absent", check=True)["changed"] and member.file.exists()
    assert member.run(state="absent")["changed"] and not member.file.exists() and len(member.calls("rmi")) == 1
    assert not member.run(state="absent")["changed"]
