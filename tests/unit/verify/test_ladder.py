# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a ladder tries, what it calls better, and where it ends: the rules over simulated groups, and the doors in real runs of ansible-playbook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _bench, _bench_schema, _changes, _ladder
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs, _report
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
MEMBERS = [{"name": f"t{rank}", "address": f"198.51.100.{rank}"} for rank in (1, 2, 3)]
SETTINGS = {
    "cluster_name": "lab", "cluster_profile": "lab-tiny", "cluster_topology": "ring", "cluster_devices": [], "cluster_gpu": False,
    "cluster_management_interface": "mgmt0", "cluster_checkpoint_source": "/srv/tiny", "cluster_image_archive": "/srv/image.tar",
}  # fmt: skip
CASE = ({"kind": "decode", "tokens": 256, "concurrency": 4}, {"kind": "prefill", "tokens": 400})


def arguments(**options: Any) -> dict[str, Any]:
    """Settings that change the engine's arguments."""
    return {_changes.CHANGES: {"engine": {"arguments": {name.replace("_", "-"): value for name, value in options.items()}}}}


def plan(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of the lab's tiny model with other settings."""
    return _inputs.plan(MEMBERS, _changes.settings_with(SETTINGS, changes))


FIRST = plan({})
RUNGS = (
    {"name": "four", "settings": arguments(max_num_seqs=4)},
    {"name": "chunks", "settings": arguments(max_num_batched_tokens=512)},
    {"name": "port", "settings": {"cluster_api_port": 8001}},
)


def step(settings: Mapping[str, Any], values: Sequence[float]) -> dict[str, Any]:
    """A measured step, synthetic."""
    repetitions = [{"requests": [], "value": value, "refused": ""} for value in values]
    measured = _bench.concluded(_bench.step_of(settings), repetitions)
    return measured | {"memory_floor": {}, "client_cpu_share": 0.0}


def outcome(ladder: Mapping[str, Any], values: Sequence[float] | None) -> dict[str, Any]:
    """What the next try gives: its values for every step of the case, or None for a start that fails."""
    if values is None:
        return {"failed": ["", ["rank 0 ended with status 1", "a log line"], "the group did not start: see what the other members say"]}
    settings = _ladder.turn(ladder, len(ladder["tries"]))["settings"]
    return {
        "digest": plan(settings)["cluster"]["digest"],
        "provenance": {},
        "steps": [step(each, values) for each in ladder["case"]],
    }


def begun(rungs: Sequence[Mapping[str, Any]] = RUNGS, case: Sequence[Mapping[str, Any]] = CASE) -> dict[str, Any]:
    """A ladder of which nothing was tried."""
    return _ladder.begin("2026-11-30T000000Z", FIRST, rungs, case)


def climbed(gives: Sequence[Sequence[float] | None], stops: Sequence[int] = ()) -> dict[str, Any]:
    """A ladder to its end. Before the places in `stops` its run is killed: what the head kept is all that the next one knows."""
    ladder = begun()
    for place, values in enumerate(gives):
        if place in stops:
            ladder = _ladder.resumed(json.loads(json.dumps(ladder)), begun() | {"utc": "later"}, again=False)
        for replayed in range(place):
            assert not _ladder.turn(ladder, replayed)["due"]
        assert _ladder.turn(ladder, place)["due"]
        ladder = _ladder.tried(ladder, outcome(ladder, values))
    return ladder


SPEEDS = st.lists(st.floats(1, 100), min_size=3, max_size=5)
LADDERS = st.tuples(SPEEDS, *(st.none() | SPEEDS for _rung in RUNGS))


@given(LADDERS)
def test_it_never_ends_on_a_state_that_failed_and_never_on_one_that_is_not_beyond_the_spread(gives: tuple[Any, ...]) -> None:
    ladder = climbed(gives)
    Draft202012Validator(_bench_schema.LADDER).validate(ladder)
    by_name = {each["name"]: each for each in ladder["tries"]}
    end = _ladder.base(ladder)
    assert by_name[end["name"]]["verdict"] in _ladder.KEPT
    for each, values in zip(ladder["tries"], gives, strict=True):
        assert (each["verdict"] == _ladder.FAILED) == (values is None)
        if each["verdict"] == _ladder.BETTER:
            below = by_name[each["on"]]
            assert each["steps"][0]["least"] > below["steps"][0]["most"]
    # Every state that was kept is above the ones that were kept before it, so the end is the best of them.
    kept = [each["steps"][0]["median"] for each in ladder["tries"] if each["verdict"] in _ladder.KEPT]
    assert kept == sorted(kept)


@given(LADDERS, st.sets(st.integers(0, len(RUNGS))))
def test_a_run_that_was_killed_ends_where_it_would_have_ended(gives: tuple[Any, ...], stops: set[int]) -> None:
    assert climbed(gives, sorted(stops)) == climbed(gives)


@given(LADDERS)
def test_a_rung_is_put_on_the_best_so_far_and_on_nothing_else(gives: tuple[Any, ...]) -> None:
    ladder = climbed(gives)
    settings: dict[str, Any] = {}
    for each, rung in zip(ladder["tries"][1:], RUNGS, strict=True):
        assert each["settings"] == _changes.settings_with(settings, rung["settings"])
        settings = each["settings"] if each["verdict"] == _ladder.BETTER else settings
    assert _ladder.base(ladder)["settings"] == settings


def test_two_better_rungs_add_up_and_a_slower_second_step_is_not_better() -> None:
    ladder = climbed([[10, 10, 10], [20, 20, 20], [30, 30, 30], None])
    assert _ladder.base(ladder) == {"name": "chunks", "settings": arguments(max_num_seqs=4, max_num_batched_tokens=512)}
    ladder = _ladder.tried(begun(), outcome(begun(), [10, 10, 10]))
    mixed = outcome(ladder, [20, 20, 20])
    mixed["steps"][1] = step(CASE[1], [5, 5, 5])
    last = _ladder.tried(ladder, mixed)["tries"][-1]
    assert (last["verdict"], last["why"]) == ("worse", "prefill 400 10 to 5 (-50.0%), slower")


def test_a_rung_without_a_figure_is_left_and_a_first_state_without_one_ends_it() -> None:
    ladder = _ladder.tried(begun(), outcome(begun(), [10, 10, 10]))
    assert _ladder.tried(ladder, outcome(ladder, [50, 50]))["tries"][-1]["verdict"] == "unmeasured"
    with pytest.raises(PlanError, match="nothing to compare with, the first state has no figure: 2 of 2"):
        _ladder.tried(begun(), outcome(begun(), [50, 50]))


def test_of_a_failure_the_member_that_knows_most_is_heard() -> None:
    ladder = climbed([[10, 10, 10], None])
    assert ladder["tries"][-1]["why"] == "rank 0 ended with status 1"
    assert _ladder.cause(["", "the group did not start: see what the other members say"]).startswith("the group did not start")


@pytest.mark.parametrize(
    ("rungs", "why"),
    [
        ([], "no list with a rung in it"),
        ("x", "no list with a rung in it"),
        ([{"name": "a"}], "rung 1 of ladder_rungs is not"),
        ([{"name": "a", "settings": {}, "set": {}}], "rung 1 of ladder_rungs is not"),
        ([{"name": "first", "settings": {}}], "not 'first'"),
        ([{"name": "A b", "settings": {}}], "called 'A b'"),
        ([{"name": "a", "settings": {"cluster_mtu": 1}}, {"name": "a", "settings": {}}], "two rungs of ladder_rungs are called a"),
        (
            [{"name": "a", "settings": {"cluster_mtu": 1}}, {"name": "b", "settings": {"cluster_mtu": 1}}],
            "rungs a and b of ladder_rungs are the same",
        ),
    ],
)
def test_rungs_that_are_none_are_refused(rungs: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        _ladder.rungs_of(rungs)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cluster_name": "other"}, "rung x changes cluster.name of the plan"),
        ({"cluster_leg_pool": "10.20.0.0/16"}, "rung x changes fabric.legs"),
        ({"cluster_storage_root": "/srv/models"}, "rung x changes storage.directory"),
        ({_changes.CHANGES: {"image": {"reference": "localhost/x:1"}}}, "rung x changes image.reference"),
        (arguments(dtype="float32"), "rung x changes nothing of what runs"),
        ({_changes.CHANGES: {"probes": {"limit": None}}}, "rung x changes nothing of what runs"),
    ],
)
def test_a_rung_that_changes_more_than_the_service_or_nothing_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        _ladder.check_plans(FIRST, {"x": plan(settings)})


@pytest.mark.parametrize(("part", "value"), [("digest", "0"), ("rungs", RUNGS[:1]), ("case", CASE[:1])])
def test_another_ladder_is_not_gone_on_with(part: str, value: Any) -> None:
    kept, fresh = begun(), begun() | {part: value}
    with pytest.raises(PlanError, match=r"was not finished and .* ladder_again"):
        _ladder.resumed(kept, fresh, again=False)
    assert _ladder.resumed(kept, fresh, again=True) == fresh == _ladder.resumed(kept | {"done": True}, fresh, again=False)
    assert _ladder.resumed({}, fresh, again=False) == fresh


def test_a_case_that_would_mislead_is_refused() -> None:
    with pytest.raises(PlanError, match=r"ladder_case: .* window of 64 tokens"):
        begun(case=[{"kind": "decode", "tokens": 64}])
    with pytest.raises(PlanError, match="ladder_case is empty"):
        begun(case=[])


LEAVES = st.none() | st.integers() | st.text(max_size=3)
DOCUMENTS = st.recursive(LEAVES, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=12)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), DOCUMENTS, max_size=3)


def makes_anew(first: Any, then: Any) -> bool:
    """Whether `first` takes away, or makes something flat of, what `then` makes a mapping of."""
    if not isinstance(then, Mapping):
        return False
    if not isinstance(first, Mapping):
        return True
    return any(key in first and makes_anew(first[key], value) for key, value in then.items())


@given(MAPPINGS, MAPPINGS, MAPPINGS)
def test_composed_changes_do_what_both_do(document: dict[str, Any], first: dict[str, Any], then: dict[str, Any]) -> None:
    before = json.dumps([document, first, then])
    if not makes_anew(first, then):
        assert _changes.changed(document, _changes.composed(first, then)) == _changes.changed(_changes.changed(document, first), then)
    assert json.dumps([document, first, then]) == before


def test_a_mistake_in_a_change_is_sent_to_where_it_was_made() -> None:
    with pytest.raises(PlanError, match=r"engine.enviroment is not a known key .*correct or remove it in cluster_profile_changes"):
        plan({_changes.CHANGES: {"engine": {"enviroment": {}}}})
    with pytest.raises(PlanError, match="inventory: cluster_profile_changes is 'x', expected a mapping"):
        plan({_changes.CHANGES: "x"})
    # Nor does a change on top hide it.
    assert _changes.settings_with({_changes.CHANGES: "x"}, arguments(max_num_seqs=4)) == {_changes.CHANGES: "x"}


def test_a_report_shows_every_try_and_where_it_ends() -> None:
    ladder = climbed([[10, 10, 10], [20, 20, 20], None, [20, 20, 21]])
    lines = _ladder.table(ladder)
    assert [line.split()[:2] for line in lines[1:5]] == [["first", "first"], ["four", "better"], ["chunks", "failed"], ["port", "same"]]
    assert lines[-1] == "the best is four"
    page = _report.ladder_html(ladder)
    assert "<script" not in page and "<h2>Best: four</h2>" in page and "rank 0 ended with status 1" in page
    said = ["t1.arguments: 4 became 8", "t2.arguments: 4 became 8", "t2.kernel: a became b"]
    assert _ladder.gathered(said) == ["t1, t2: arguments: 4 became 8", "t2: kernel: a became b"]
    assert _ladder.table(climbed([[10, 10, 10], None]))[-1] == "no rung is better: it stays as the inventory says"


def run(folder: Path, playbook: str, *arguments: str) -> tuple[int, str]:
    """A playbook of the collection over the inventory in a folder; exit status and all output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env |= {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"), "ANSIBLE_NOCOLOR": "1"}
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts.yml", ROOT / "playbooks" / playbook, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cluster_api_prt": 1}, "rung a: inventory: cluster_api_prt is not a known key (did you mean cluster_api_port?)"),
        ({"cluster_name": "x"}, "rung a changes cluster.name of the plan"),
    ],
)
def test_the_playbook_refuses_a_bad_rung_before_it_touches_a_host(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    hosts = {member["name"]: {"ansible_host": member["address"]} for member in MEMBERS}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": SETTINGS}}))
    (tmp_path / "rungs.json").write_text(json.dumps({"ladder_rungs": [{"name": "a", "settings": settings}]}))
    status, said = run(tmp_path, "ladder.yml", "-e", f"@{tmp_path}/rungs.json")
    assert status != 0 and why in " ".join(said.split()), said
    assert "Take the lock" not in said
