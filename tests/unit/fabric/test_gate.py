# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gate measures for a plan, whom it blames, and how long a pass holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _gate, _gate_pass
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.nccl import lines
from tests.unit.fabric.plans import make_plan

PROGRAM = Path(__file__).resolve().parents[3] / "runtime/gate/gb10_gate.py"


def plan_of(topology: str, count: int, *, gpus: bool = True, **settings: Any) -> dict[str, Any]:
    plan = make_plan(topology, count, **settings)
    plan["image"] = {"reference": "image:1"}
    for name, member in plan["members"].items():
        member["management"] = {"address": f"198.51.100.{10 + int(name[1:])}", "interface": "enP7s7"}
        member["rank_config"] = {
            "engine": "podman",
            "group": "lab",
            "container": {
                "image": "image:1",
                "environment": {"NCCL_NET": "IB", "MODEL": "x"},
                "devices": ["/dev/infiniband"],
                "gpus": gpus,
                "capabilities": ["IPC_LOCK"],
                "ulimits": {"memlock": "-1"},
                "shm_mib": 64,
                "oom_score_adj": 500,
            },
        }
    return plan


# -- what is measured


@pytest.mark.parametrize(("topology", "count", "pairs"), [("pair", 2, 1), ("ring", 3, 3), ("ring", 4, 4), ("switched", 4, 6)], ids=str)
def test_nccl_measures_every_pair_that_shares_a_cable_and_all(topology: str, count: int, pairs: int) -> None:
    """Ranks that are no neighbours in a ring have no way to each other."""
    plan = plan_of(topology, count)
    found = _gate.ways(plan)
    assert [way["kind"] for way in found] == ["pair"] * pairs + ["all"]
    shared = {frozenset(end["member"] for end in leg["ends"]) for leg in plan["fabric"]["legs"]}
    assert all(any(set(way["members"]) <= members for members in shared) for way in found[:-1])
    assert len({tuple(way["ranks"]) for way in found[:-1]}) == pairs and len(found[-1]["ranks"]) == count


@pytest.mark.parametrize(("topology", "count", "legs"), [("pair", 2, 2), ("ring", 3, 6), ("ring", 5, 10), ("switched", 3, 6)], ids=str)
def test_gloo_measures_every_leg_by_its_own_addresses(topology: str, count: int, legs: int) -> None:
    plan = plan_of(topology, count, gpus=False)
    *found, everybody = _gate.ways(plan)
    assert len(found) == legs and {way["kind"] for way in found} == {"leg"}
    by_address = {end["address"]: end["member"] for leg in plan["fabric"]["legs"] for end in leg["ends"]}
    assert all([by_address[address] for address in way["addresses"]] == way["members"] for way in found)
    # All together is a ring by the legs: hop h joins rank h and the next, each lane has hops of its own.
    names = plan["cluster"]["members"]
    assert len(everybody["lanes"]) == 2
    for lane in everybody["lanes"]:
        assert [[by_address[address] for address in hop] for hop in lane] == [[names[h], names[(h + 1) % count]] for h in range(count)]


def test_names_of_ways_are_distinct() -> None:
    """They are keys in the store."""
    for topology, count in (("pair", 2), ("ring", 4), ("switched", 4)):
        for gpus in (True, False):
            names = [
                way["name"]
                for way in _gate.ways(
                    plan_of(topology, count, gpus=gpus, **({"cluster_switch_cages": [0, 1]} if topology == "switched" else {}))
                )
            ]
            assert len(set(names)) == len(names)


def test_the_container_is_the_ranks_own_without_its_model() -> None:
    plan = plan_of("ring", 3)
    argv = _gate.argv(plan["members"]["t2"]["rank_config"], "print()", _gate.spec(plan, "t2", 8, 60))
    assert argv[:3] == ["podman", "run", "--rm"] and "--pull" in argv
    assert argv[-4:-1] == ["image:1", "-c", "print()"]
    said = json.loads(argv[-1])
    assert said["rank"] == 1 and said["store"] == ["198.51.100.11", _gate.PORT] and said["sizes"] == [8]
    text = " ".join(argv)
    assert (
        "--device /dev/infiniband" in text
        and "--ulimit memlock=-1" in text
        and "--env NCCL_NET=IB" in text
        and "--cap-add IPC_LOCK" in text
    )


def test_vllms_library_is_the_one_that_is_measured() -> None:
    plan = plan_of("ring", 3)
    config = plan["members"]["t1"]["rank_config"]
    config["container"]["environment"]["VLLM_NCCL_SO_PATH"] = "/opt/nccl/lib/libnccl.so.2"
    assert "LD_PRELOAD=/opt/nccl/lib/libnccl.so.2" in _gate.argv(config, "", {})


def test_bus_bandwidth_is_what_each_link_carries() -> None:
    """nccl-tests, doc/PERFORMANCE.md: algorithm bandwidth times 2 (n - 1) / n."""
    assert _gate.bus_bandwidth(256 * 10**6, 0.01, 2) == pytest.approx(25.6)
    assert _gate.bus_bandwidth(256 * 10**6, 0.01, 3) == pytest.approx(25.6 * 4 / 3)


# -- who is to blame


def measured(plan: dict[str, Any], speeds: dict[str, float], other: float = 23.2) -> list[dict[str, Any]]:
    """A result where the named ways reach so many GB/s and the rest `other`."""
    results = []
    for way in _gate.ways(plan):
        speed, ranks = speeds.get(way["name"], other), len(way["ranks"])
        rows = [
            {"bytes": size, "seconds": size * 2 * (ranks - 1) / ranks / speed / 1e9, "iterations": 20, "wrong": 0} for size in _gate.SIZES
        ]
        results.append({"name": way["name"], "rows": rows, "error": "", "lost": {}})
    return _gate.measured(plan, results)


RING = plan_of("ring", 3)
MARKS = _gate.marks("ring", 3, "nccl")


def test_a_ring_at_its_published_figure_passes() -> None:
    assert _gate.judge(measured(RING, {}), MARKS) == []


def test_a_sick_member_is_named() -> None:
    """6.8 times slower, with nothing else to be seen."""
    (problem,) = _gate.judge(measured(RING, {"t1 - t2": 3.4, "t2 - t3": 3.4, "all": 3.4}), MARKS)
    assert problem.startswith("every way to t2 is slow and no other is") and "reboot t2" in problem
    assert "pair t1 - t2 reaches 3.4 of 21.9 GB/s" in problem


@given(st.sampled_from(["pair", "leg"]), st.integers(3, 6), st.data())
def test_whoever_is_sick_in_a_ring_or_on_a_switch_is_named(kind: str, count: int, data: st.DataObject) -> None:
    """From four members on it is one against pairs that do not touch it; in a ring of three against the one pair."""
    plan = plan_of(data.draw(st.sampled_from(["ring", "switched"])), count, gpus=kind == "pair")
    sick = data.draw(st.sampled_from(plan["cluster"]["members"]))
    slow = {way["name"]: 3.0 for way in _gate.ways(plan) if sick in way["members"]}
    (problem,) = _gate.judge(measured(plan, slow), {"all": 20.0, kind: 20.0})
    assert problem.startswith(f"every way to {sick} is slow")


@given(st.integers(3, 5), st.data())
def test_a_slow_leg_is_named_and_nothing_else(count: int, data: st.DataObject) -> None:
    plan = plan_of("ring", count, gpus=False)
    way = data.draw(st.sampled_from(_gate.ways(plan)[:-1]))
    (problem,) = _gate.judge(measured(plan, {way["name"]: 0.004, "all": 0.004}, 1.0), {"leg": 0.02, "all": 0.01})
    assert problem.startswith(f"leg {way['name']} reaches 0.004 of 0.02 GB/s") and f"check cable {way['cable']}" in problem


def test_a_cable_with_two_slow_legs_is_one_cable() -> None:
    plan = plan_of("ring", 3, gpus=False)
    slow = {way["name"]: 0.004 for way in _gate.ways(plan) if way["cable"] == "t1.0-t2.1"}
    (problem,) = _gate.judge(measured(plan, slow, 1.0), {"leg": 0.02})
    assert "no other way is slow, so check cable t1.0-t2.1" in problem


def test_where_all_is_slow_no_member_is_blamed() -> None:
    (problem,) = _gate.judge(measured(RING, {}, 7.9), MARKS)
    assert problem.startswith("every way is slow") and "sockets instead of RDMA" in problem
    (far,) = _gate.judge(measured(RING, {}, 7.9), {"leg": 1000.0, "all": 1000.0})
    assert "reaches 7.9 of 1000 GB/s" in far


def test_two_cables_without_a_member_in_common_are_listed() -> None:
    plan = plan_of("ring", 4)
    (problem,) = _gate.judge(measured(plan, {"t1 - t2": 3.0, "t3 - t4": 3.0}), _gate.marks("ring", 4, "nccl"))
    assert "check cable t1.0-t2.1, cable t3.0-t4.1 and their ports" in problem and "reboot" not in problem


def test_a_member_with_one_good_way_is_not_sick() -> None:
    plan = plan_of("switched", 4)
    (problem,) = _gate.judge(measured(plan, {"t1 - t2": 3.0, "t1 - t3": 3.0}), _gate.marks("switched", 4, "nccl"))
    assert "reboot" not in problem and "check the cables of t1 and t2 to the switch, the cables of t1 and t3 to the switch" in problem


def test_a_pair_far_below_the_others_is_slow_without_a_mark() -> None:
    plan = plan_of("ring", 4)
    (problem,) = _gate.judge(measured(plan, {"t1 - t2": 3.0}), {})
    assert "pair t1 - t2 reaches 3 of 5.8 GB/s" in problem


def test_slow_only_together_is_a_matter_of_nccl() -> None:
    (problem,) = _gate.judge(measured(RING, {"all": 13.9}), MARKS)
    assert problem.startswith("all ranks together: reaches 13.9 of 20 GB/s, while every pair alone is fast enough")


def test_wrong_values_fail_whatever_the_speed() -> None:
    result = measured(RING, {})
    result[0]["rows"][3]["wrong"] = 7
    assert _gate.judge(result, MARKS)[0].startswith("an all-reduce over pair t1 - t2 gave 7 wrong values: do not serve with it")


def test_a_way_that_failed_says_why_and_what_was_lost() -> None:
    result = measured(RING, {})
    result[1] |= {"error": "t1: Connection reset by peer", "lost": {"t1": {"rocep1s0f1 out_of_sequence": 12}}}
    (problem,) = _gate.judge(result, MARKS)
    assert "pair t1 - t3 failed with 't1: Connection reset by peer' (12 rocep1s0f1 out_of_sequence by t1)" in problem


NCCL_LOGS = Path(__file__).resolve().parents[2] / "fixtures/nccl"


def test_sockets_instead_of_rdma_are_a_failure_by_the_log() -> None:
    """A real log of two ranks on sockets."""
    plan = plan_of("pair", 2)
    plan["cluster"]["devices"] = ["/dev/infiniband"]
    log = (NCCL_LOGS / "socket.log").read_text()
    (problem, *_more) = _gate.transport_problems(plan, "t1", log)
    assert problem.startswith("t1: the transport is NET/Socket instead of NET/IB")
    # Where no RDMA device is planned they are what is wanted.
    plan["cluster"]["devices"] = []
    assert _gate.transport_problems(plan, "t1", log) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_on_rdma_has_nothing_against_it(rank: int) -> None:
    """A synthetic log, as all RDMA logs of the fixtures."""
    plan = plan_of("ring", 3)
    plan["cluster"]["devices"] = ["/dev/infiniband"]
    log = [line for line in lines.ring(plan) if line.startswith(f"spark{rank + 1}:")]
    assert log and _gate.transport_problems(plan, f"t{rank + 1}", "\n".join(log)) == []


# -- how long it holds

NOW = 1_700_000_000.0


def artefact(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "digest": "d", "measured_at": NOW - 3600, "problems": [], **changes}


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, "has not been measured"),
        (artefact(version=0), "has not been measured"),
        (artefact(digest="e"), "with other members, legs, image or NCCL variables"),
        (artefact(measured_at=NOW - 8 * 86400), "8.0 days ago, fabric_gate_max_age allows 7.0 days"),
        (artefact(measured_at=NOW + 3600), "in the future, so a clock is wrong"),
        (artefact(problems=["every way is slow"]), "did not pass the gate, every way is slow"),
    ],
)
def test_what_is_no_pass_says_why_and_the_cure(kept: dict[str, Any] | None, words: str) -> None:
    sentence = _gate_pass.stale(kept, "lab", "d", NOW, 7 * 86400)
    assert words in sentence and sentence.endswith("run the playbook gb10.cluster.gate")


@pytest.mark.parametrize("age", [0, 3600, 7 * 86400, -60])
def test_a_pass_holds(age: float) -> None:
    assert _gate_pass.stale(artefact(measured_at=NOW - age), "lab", "d", NOW, 7 * 86400) == ""


def test_another_model_keeps_the_measurement_another_image_does_not() -> None:
    plan = plan_of("ring", 3)
    before = _gate_pass.digest(plan)
    plan["members"]["t1"]["rank_config"]["container"]["environment"]["MODEL"] = "y"
    assert _gate_pass.digest(plan) == before
    plan["members"]["t1"]["rank_config"]["container"]["environment"]["NCCL_NET"] = "Socket"
    changed = _gate_pass.digest(plan)
    plan["image"]["reference"] = "image:2"
    assert len({before, changed, _gate_pass.digest(plan)}) == 3


# -- the program's side


def test_output_is_read_between_what_nccl_says() -> None:
    text = f'NCCL INFO\n{_gate.MARK}{{"at": "a - b"}}\n{_gate.MARK}not json\n{_gate.MARK}{{"error": "no"}}\n'
    assert _gate.parse(text) == _gate.Output("a - b", "no", None)
    assert _gate.parse(f'{_gate.MARK}{{"result": [], "torch": "2"}}').result == {"result": [], "torch": "2"}


def test_program_and_module_agree_on_the_mark() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(runpy.run_path({str(PROGRAM)!r})['MARK'], end='')"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert shown.stdout == _gate.MARK
