# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What members see at their ports, for any cabling; the verdicts, and that the moves lead to the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _cabling, _topology
from ansible_collections.gb10.cluster.plugins.module_utils._cabling import End, Move
from ansible_collections.gb10.cluster.plugins.module_utils._topology import CAGES, PORTS, Plug
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fabric.plans import make_plan

Cables = list[tuple[Plug, Plug]]
Observed = dict[str, list[dict[str, Any]]]


def plug(text: str) -> Plug:
    member, _dot, cage = text.rpartition(".")
    return Plug(member, int(cage))


def planned(plan: dict[str, Any]) -> Cables:
    return [(Plug(a["member"], a["cage"]), Plug(b["member"], b["cage"])) for a, b in (leg["ends"] for leg in plan["fabric"]["legs"][::2])]


def see(members: list[str], cables: Cables, *, twins: bool) -> Observed:
    """What the module reports of a cabling.

    With `twins` both halves of a cage share the wire, as on a Spark, and hear themselves too; else each has a wire of its own.
    """
    far = {one: other for pair in cables for one, other in (pair, pair[::-1])}

    def heard(member: str, port: _topology.Port) -> list[dict[str, Any]]:
        here = Plug(member, port.cage)
        ends = [End(far[here].member, far[here].cage, half) for half in "AB" if twins or half == port.half] if here in far else []
        ends += [End(member, port.cage, half) for half in "AB" if twins]
        return [{"member": end.member, "cage": end.cage, "half": end.half} for end in ends]

    return {
        member: [
            {
                "cage": port.cage,
                "half": port.half,
                "netdev": port.netdev,
                "present": True,
                "down": False,
                "carrier": Plug(member, port.cage) in far,
                "heard": heard(member, port),
            }
            for port in PORTS
        ]
        for member in members
    }


def verdicts(result: dict[str, Any], where: str) -> set[str]:
    return {row["verdict"] for row in result["ports"] if f"{row['member']}.{row['cage']}" == where}


@pytest.mark.parametrize("twins", [True, False])
@pytest.mark.parametrize(("topology", "size"), [("pair", 2), ("ring", 3), ("ring", 4)])
def test_the_planned_cabling_is_right(topology: str, size: int, twins: bool) -> None:
    plan = make_plan(topology, size)
    result = _cabling.judge(plan, see(plan["cluster"]["members"], planned(plan), twins=twins))
    assert result["ok"] and not result["moves"] and not result["message"]
    assert {row["verdict"] for row in result["ports"]} <= {"right", "not in the plan"}


# -- the moves


def carry_out(cables: Cables, moves: list[Move]) -> set[frozenset[Plug]]:
    """Do with plugs what the instructions say; the cables afterwards."""
    number = count()
    plugged = {plug: index for index, pair in zip(number, cables, strict=False) for plug in pair}
    for move in moves:
        if move.kind == "cable":
            assert move.one not in plugged and move.other not in plugged
            plugged[move.one] = plugged[move.other] = next(number)
            continue
        here, there = plugged.pop(move.one, None), plugged.pop(move.other, None)
        assert here is not None and (there is not None) == (move.kind == "swap")
        plugged |= {place: cable for place, cable in ((move.other, here), (move.one, there)) if cable is not None}
    return {frozenset(plug for plug, cable in plugged.items() if cable == index) for index in plugged.values()}


@st.composite
def cablings(draw: st.DrawFn) -> tuple[dict[str, Any], Cables]:
    """A plan and its cables with their ends in any cages of any members; some are missing."""
    topology, size = draw(st.sampled_from([("pair", 2), ("ring", 3), ("ring", 4), ("ring", 6)]))
    plan = make_plan(topology, size)
    number = len(planned(plan)) - draw(st.integers(0, 1))
    places = draw(st.permutations([Plug(member, cage) for member in plan["cluster"]["members"] for cage in CAGES]))
    return plan, [(places[2 * index], places[2 * index + 1]) for index in range(number)]


@given(cablings(), st.booleans())
def test_moves_lead_from_any_cabling_to_the_plan(case: tuple[dict[str, Any], Cables], twins: bool) -> None:
    plan, cables = case
    wanted = planned(plan)
    found = {one: other for pair in cables for one, other in (pair, pair[::-1])}
    steps = _cabling.moves(wanted, found)
    assert {frozenset(pair) for pair in wanted} <= carry_out(cables, steps)
    # And that is what the verdict says, from what the members see.
    result = _cabling.judge(plan, see(plan["cluster"]["members"], cables, twins=twins))
    assert result["moves"] == [str(step) for step in steps]
    assert result["ok"] == ({frozenset(pair) for pair in wanted} <= {frozenset(pair) for pair in cables})
    assert result["ok"] != bool(result["moves"])


@given(st.permutations([Plug(f"t{n}", cage) for n in range(1, 5) for cage in CAGES]))
def test_there_are_no_more_moves_than_needed(places: list[Plug]) -> None:
    """A move joins or parts two alternating cycles of planned and found cables: cables less cycles is the least number."""
    wanted = planned(make_plan("ring", 4))
    cables = list(zip(places[::2], places[1::2], strict=True))
    partner = {one: other for pair in wanted for one, other in (pair, pair[::-1])}
    far = {one: other for pair in cables for one, other in (pair, pair[::-1])}
    cycles, left = 0, set(places)
    while left:
        cycles, start = cycles + 1, next(iter(left))
        while start in left:
            left -= {start, partner[start]}
            start = far[partner[start]]
    assert len(_cabling.moves(wanted, far)) == len(wanted) - cycles


def test_a_swapped_pair_of_plugs_is_named_exactly() -> None:
    """The two plugs of t2, exchanged."""
    plan = make_plan("ring", 3)
    cables = [(plug("t1.0"), plug("t2.0")), (plug("t2.1"), plug("t3.1")), (plug("t3.0"), plug("t1.1"))]
    result = _cabling.judge(plan, see(["t1", "t2", "t3"], cables, twins=True))
    assert result["moves"] == ["swap the two plugs of t2"]
    assert verdicts(result, "t1.0") == verdicts(result, "t2.1") == {"swapped"} and verdicts(result, "t3.0") == {"right"}
    assert "cage 0 of t1 is cabled to cage 0 of t2 instead of cage 1 of t2" in result["problems"]
    # The same cabling is a ring, only another one, so it may also be kept.
    assert result["cables"] == ["t1.0 - t2.0", "t1.1 - t3.0", "t2.1 - t3.1"]
    assert result["message"].startswith("swap the two plugs of t2 (or") and "set cluster_cables" in result["message"]


def test_plugs_swapped_between_members_are_named_exactly() -> None:
    plan = make_plan("ring", 3)
    cables = [(plug("t1.0"), plug("t3.1")), (plug("t2.0"), plug("t2.1")), (plug("t3.0"), plug("t1.1"))]
    result = _cabling.judge(plan, see(["t1", "t2", "t3"], cables, twins=True))
    assert result["moves"] == ["swap the plugs in cage 1 of t3 and cage 1 of t2"]
    assert verdicts(result, "t2.0") == {"loop"} and result["cables"] == []


def test_a_pair_in_the_other_cages_needs_two_moves() -> None:
    plan = make_plan("pair", 2)
    result = _cabling.judge(plan, see(["t1", "t2"], [(plug("t1.1"), plug("t2.1"))], twins=True))
    assert result["moves"] == ["move the plug in cage 1 of t1 to cage 0 of t1", "move the plug in cage 1 of t2 to cage 0 of t2"]
    assert verdicts(result, "t1.0") == {"missing cable"} and verdicts(result, "t1.1") == {"not in the plan"}
    assert result["cables"] == ["t1.1 - t2.1"]


def test_a_cable_with_one_end_loose_is_moved_by_that_end_of_the_other() -> None:
    """t1.0 is empty, t2.1 is cabled to t3.1 instead, t2.0 is empty."""
    plan = make_plan("ring", 3)
    cables = [(plug("t3.1"), plug("t2.1")), (plug("t3.0"), plug("t1.1"))]
    result = _cabling.judge(plan, see(["t1", "t2", "t3"], cables, twins=True))
    assert result["moves"] == [
        "move the plug in cage 1 of t3 to cage 0 of t1",
        "no working cable joins cage 0 of t2 and cage 1 of t3: plug one in, or replace it",
    ]


# -- one thing wrong at a time

RING = make_plan("ring", 3)


def change(where: str, half: str, **values: Any) -> Callable[[Observed], None]:
    def apply(observed: Observed) -> None:
        member, cage = where.split(".")
        for port in observed[member]:
            if (str(port["cage"]), port["half"]) == (cage, half):
                port.update(values)

    return apply


def hear(member: str, cage: int, half: str) -> dict[str, Any]:
    return {"member": member, "cage": cage, "half": half}


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ([change("t1.0", "B", present=False, carrier=False, heard=[])], "absent", "half B of cage 0 of t1 (enP2p1s0f0np0) does not exist"),
        ([change("t1.0", "B", carrier=False, heard=[])], "no carrier", "half B of cage 0 of t1 has no carrier, but the other half has"),
        (
            [change("t1.0", "A", heard=[hear("t2", 1, "B")]), change("t2.1", "A", heard=[])],
            "wrong half",
            "meets half B of cage 1 of t2 only",
        ),
        ([change("t1.0", "A", heard=[])], "one way", "half A of cage 0 of t1 does not hear cage 1 of t2, only the other way"),
        (
            [change("t1.0", "A", heard=[]), change("t2.1", "A", heard=[])],
            "unknown neighbour",
            "does not meet cage 1 of t2, its other half does",
        ),
        (
            [change("t1.0", "A", heard=[hear("t2", 1, "A"), hear("t3", 1, "A")])],
            "several neighbours",
            "meets cage 1 of t2 and cage 1 of t3",
        ),
    ],
)
def test_each_fault_of_a_cable_in_place_has_its_verdict(changes: list[Callable[[Observed], None]], verdict: str, words: str) -> None:
    observed = see(["t1", "t2", "t3"], planned(RING), twins=False)
    for one in changes:
        one(observed)
    result = _cabling.judge(RING, observed)
    assert not result["ok"] and verdict in verdicts(result, "t1.0")
    assert any(words in problem for problem in result["problems"]), result["problems"]


@pytest.mark.parametrize(
    ("far", "verdict", "words"),
    [
        ("x9.0", "unknown neighbour", "cage 0 of t1 is cabled to x9, which is not in the plan"),
        ("t1.1", "loop", "cage 0 of t1 is cabled to t1 itself instead of cage 1 of t2"),
    ],
)
def test_a_cable_that_leads_elsewhere_has_its_verdict(far: str, verdict: str, words: str) -> None:
    observed = see(["t1", "t2", "t3"], planned(RING)[2:], twins=False)
    for half in "AB":
        change("t1.0", half, carrier=True, heard=[hear(plug(far).member, plug(far).cage, half)])(observed)
    result = _cabling.judge(RING, observed)
    assert not result["ok"] and verdicts(result, "t1.0") == {verdict}
    assert any(words in problem for problem in result["problems"]), result["problems"]


def test_a_port_that_check_mode_leaves_down_is_no_fault() -> None:
    observed = see(["t1", "t2", "t3"], planned(RING)[1:], twins=True)
    for half in "AB":
        change("t1.0", half, down=True)(observed)
    result = _cabling.judge(RING, observed)
    assert result["ok"] and verdicts(result, "t1.0") == verdicts(result, "t2.1") == {"down"}


def test_nobody_answers_behind_a_carrier() -> None:
    observed = see(["t1", "t2", "t3"], planned(RING)[1:], twins=True)
    for half in "AB":
        change("t1.0", half, carrier=True)(observed)
    result = _cabling.judge(RING, observed)
    assert verdicts(result, "t1.0") == {"unknown neighbour"} and verdicts(result, "t2.1") == {"missing cable"}
    assert any("cage 0 of t1 has a carrier, but no member answers there" in problem for problem in result["problems"])


def test_without_a_member_no_plug_is_told_to_move() -> None:
    """It may hold the other end of anything."""
    observed = see(["t1", "t2", "t3"], [(plug("t1.0"), plug("t2.0")), (plug("t2.1"), plug("t3.1"))], twins=True)
    del observed["t3"]
    result = _cabling.judge(RING, observed)
    assert result["moves"] == [] and "t3 did not take part: reach it and check again" in result["problems"]
    assert verdicts(result, "t1.1") == {"no carrier"}


# -- a switch


def switched(members: list[str], plugs: list[Plug]) -> Observed:
    """All plugs on one bridge, as a switch without VLANs floods it."""
    observed = see(members, [], twins=True)
    for member, ports in observed.items():
        for port in ports:
            if Plug(member, port["cage"]) in plugs:
                port["carrier"] = True
                port["heard"] = [hear(far.member, far.cage, half) for far in plugs for half in "AB" if far != Plug(member, port["cage"])]
    return observed


@pytest.mark.parametrize("cages", [[0], [0, 1]])
def test_a_switch_is_right_when_everybody_meets_everybody(cages: list[int]) -> None:
    plan = make_plan("switched", 4, cluster_switch_cages=cages)
    plugs = [Plug(member, cage) for member in plan["cluster"]["members"] for cage in cages]
    assert _cabling.judge(plan, switched(plan["cluster"]["members"], plugs))["ok"]


def test_a_plug_in_the_other_cage_of_a_switched_member() -> None:
    plan = make_plan("switched", 3)
    result = _cabling.judge(plan, switched(["t1", "t2", "t3"], [plug("t1.0"), plug("t2.1"), plug("t3.0")]))
    assert result["moves"] == ["move the plug in cage 1 of t2 to cage 0 of t2"]
    assert verdicts(result, "t2.0") == {"missing cable"} and verdicts(result, "t1.0") == {"right"}


def test_two_switches_that_are_not_joined() -> None:
    plan = make_plan("switched", 3)
    observed = switched(["t1", "t2", "t3"], [plug("t1.0"), plug("t2.0")])
    for half in "AB":
        change("t3.0", half, carrier=True)(observed)
    result = _cabling.judge(plan, observed)
    assert "cage 0 of t3 has a carrier, but no member answers there, the plan has the switch there: follow the cable" in result["problems"]
    assert any("does not meet cage 0 of t3, check that one switch" in problem for problem in result["problems"])


# -- frames

ENDS = st.builds(End, st.text(min_size=1, max_size=60), st.sampled_from(CAGES), st.sampled_from("AB"))


@given(ENDS, st.lists(ENDS, max_size=18), st.integers(0, 60))
def test_a_beacon_says_who_and_whom_it_heard(sender: End, heard: list[End], padding: int) -> None:
    payload = _cabling.encode("ring", sender, heard)
    assert len(payload) <= 1500  # an MTU that every port has
    beacon = _cabling.decode("ring", payload + bytes(padding))
    assert beacon and beacon.sender == sender and beacon.heard == {end.token for end in heard}
    assert _cabling.decode("another", payload) is None


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda tail: _cabling.MAGIC + tail)))
def test_whatever_else_arrives_is_nothing(payload: bytes) -> None:
    assert _cabling.decode("ring", payload) is None


@pytest.mark.parametrize(
    "data",
    [[], {"cluster": "ring"}, {"cluster": "ring", "from": [], "heard": []}, {"cluster": "ring", "from": {"member": "t1"}, "heard": []}],
)
def test_a_beacon_of_another_make_is_nothing(data: Any) -> None:
    assert _cabling.decode("ring", _cabling.MAGIC + json.dumps(data).encode()) is None
