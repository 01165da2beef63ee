# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is really at the other end of every port, against the plan, and which plug to move.

Each member sends a beacon out of each of its ports and notes whose beacons come in there. That is proof on layer 2: a ping can
be answered by another way (masquerator-coder, colonel-otto). NVIDIA's own set-up script discovers its neighbours so, too, with
the same experimental EtherType and by broadcast (NVIDIA/dgx-spark-playbooks, spark_cluster_setup).

A cable is one wire with two network devices at each end, so on a Spark a broadcast arrives on both halves of the far cage and on
the sender's own twin (christopherowen/dgx-spark-networking). Which cage it comes from decides; halves only where a half stays deaf.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ._errors import PlanError
from ._topology import CAGES, Cable, Plug, check_cables

ETHERTYPE = 0x88B5
"""IEEE 802 local experimental EtherType 1: never routed, nobody's protocol."""
BROADCAST = b"\xff" * 6
"""A switch floods it; the addresses that LLDP uses would end there, and a switched fabric is checked as well."""
MAGIC = b"gb10-cable\n"

RIGHT = "right"
ABSENT = "absent"
NO_CARRIER = "no carrier"
MISSING = "missing cable"
LOOP = "loop"
SWAPPED = "swapped"
UNKNOWN = "unknown neighbour"
SEVERAL = "several neighbours"
WRONG_HALF = "wrong half"
ONE_WAY = "one way"
DOWN = "down"
SPARE = "not in the plan"


@dataclass(frozen=True, order=True)
class End:
    """One half of one cage of one member."""

    member: str
    cage: int
    half: str

    @property
    def plug(self) -> Plug:
        return Plug(self.member, self.cage)

    @property
    def token(self) -> str:
        """A short name, so that a beacon has room for all that were heard: 32 bits of its SHA-256."""
        return hashlib.sha256(f"{self.member} {self.cage}{self.half}".encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return f"half {self.half} of {cage_of(self.plug)}"


def cage_of(plug: Plug) -> str:
    """A plug in words."""
    return f"cage {plug.cage} of {plug.member}"


@dataclass(frozen=True)
class Beacon:
    """What a frame says: who sent it, and whom that port has heard so far (as `End.token`)."""

    sender: End
    heard: frozenset[str]


def encode(cluster: str, sender: End, heard: Iterable[End]) -> bytes:
    """A frame's payload; beacons of another cluster, on the same switch, are not heard."""
    return MAGIC + json.dumps({"cluster": cluster, "from": asdict(sender), "heard": sorted(end.token for end in heard)}).encode()


def decode(cluster: str, payload: bytes) -> Beacon | None:
    """A payload of this cluster; None for anything else, since everybody may send with this EtherType."""
    if not payload.startswith(MAGIC):
        return None
    try:
        # Short frames arrive padded to 60 bytes.
        data = json.loads(payload[len(MAGIC) :].rstrip(b"\0"))
        sender = End(str(data["from"]["member"]), int(data["from"]["cage"]), str(data["from"]["half"]))
        return Beacon(sender, frozenset(map(str, data["heard"]))) if data["cluster"] == cluster else None
    except (ValueError, LookupError, TypeError):
        return None


@dataclass(frozen=True)
class Move:
    """Exchange of what is plugged in at `one` and at `other`; `cable`: from the empty pool into both."""

    one: Plug
    other: Plug
    kind: str

    def __str__(self) -> str:
        if self.kind == "cable":
            return f"no working cable joins {cage_of(self.one)} and {cage_of(self.other)}: plug one in, or replace it"
        if self.kind == "move":
            return f"move the plug in {cage_of(self.one)} to {cage_of(self.other)}"
        if self.one.member == self.other.member:
            return f"swap the two plugs of {self.one.member}"
        return f"swap the plugs in {cage_of(self.one)} and {cage_of(self.other)}"


def moves(planned: Sequence[tuple[Plug, Plug]], found: Mapping[Plug, Plug]) -> list[Move]:
    """The fewest moves of plugs that make a cabling the planned one. `found`: plug -> the plug at its cable's other end, both ways.

    Planned and found cables make alternating cycles; every move closes one planned cable, and a cycle's last closes by itself.
    A cable that the plan has no place for is used where one is missing, and left alone otherwise.
    """
    state, steps = dict(found), []
    wanted = {plug for pair in planned for plug in pair}

    def exchange(one: Plug, other: Plug) -> None:
        ends = state.pop(one, None), state.pop(other, None)
        steps.append(Move(one, other, "swap" if None not in ends else "move"))
        for place, far in ((one, ends[1]), (other, ends[0])):
            if far is not None:
                state[place], state[far] = far, place

    bare = []
    for one, other in planned:
        here, there = state.get(one), state.get(other)
        if here == other:
            continue
        if here is None and there is None:
            bare.append((one, other))
        elif here is None or (there is not None and there.member == one.member and here.member != other.member):
            exchange(there, one)  # type: ignore[arg-type]  # one of the two is cabled
        else:
            exchange(here, other)
    for one, other in bare:
        spare = next((plug for plug, far in sorted(state.items(), key=lambda item: str(item[0])) if not {plug, far} & wanted), None)
        if spare is None:
            steps.append(Move(one, other, "cable"))
            state[one], state[other] = other, one
        else:
            far = state[spare]
            exchange(spare, one)
            exchange(far, other)
    return steps


class Sight:
    """All that the members saw, as who is joined with whom.

    `observed`: member -> its ports as the module `cable_check` returns them.
    """

    def __init__(self, observed: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self.ports = {End(member, port["cage"], port["half"]): port for member, ports in observed.items() for port in ports}
        self.heard = {end: {End(**one) for one in port["heard"]} for end, port in self.ports.items()}
        self.joined: dict[Plug, set[Plug]] = defaultdict(set)
        for end, others in self.heard.items():
            for other in others:
                # The twin shares the wire, and a card may give a port its own broadcasts back: neither is a cable.
                if other.plug != end.plug:
                    self.joined[end.plug].add(other.plug)
                    self.joined[other.plug].add(end.plug)

    def carrier(self, plug: Plug) -> bool:
        """Whether any half of a cage has a link."""
        return any(port["carrier"] for end, port in self.ports.items() if end.plug == plug)

    def down(self, plug: Plug) -> bool:
        """Whether any half of a cage was left administratively down."""
        return any(port["down"] for end, port in self.ports.items() if end.plug == plug)

    def seen(self, member: str) -> bool:
        """Whether a member took part."""
        return any(end.member == member for end in self.ports)

    def meets(self, end: End, plug: Plug) -> tuple[set[str], set[str]]:
        """Halves of a far plug that this port hears, and that hear this port."""
        hears = {other.half for other in self.heard.get(end, ()) if other.plug == plug}
        return hears, {other.half for other, ends in self.heard.items() if other.plug == plug and end in ends}

    def cables(self) -> dict[Plug, Plug] | None:
        """Each cabled plug with the one at the other end; None where somebody sees several, since then no plug can be told to move."""
        if any(len(far) > 1 for far in self.joined.values()):
            return None
        return {plug: next(iter(far)) for plug, far in self.joined.items()}


def judge(plan: Mapping[str, Any], observed: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """All members' observations against the plan.

    Returns `ok`, `ports` (member, cage, half, netdev, `verdict`, `neighbours` as member.cage), `problems` (one sentence each), `moves`
    (what to do, in order; empty where nothing is to be moved or it cannot be told), `cables` (where what is plugged in is the declared
    topology, only not as planned: the value of cluster_cables that says so) and `message`, all of it in one text.
    """
    sight, switched = Sight(observed), plan["cluster"]["topology"] == "switched"
    segments: dict[str, list[Plug]] = {
        leg["cable"]: [Plug(end["member"], end["cage"]) for end in leg["ends"]] for leg in plan["fabric"]["legs"]
    }
    partners = {plug: [far for far in plugs if far != plug] for plugs in segments.values() for plug in plugs}
    members = plan["cluster"]["members"]
    rows: list[dict[str, Any]] = []
    problems = [f"{name} did not take part: reach it and check again" for name in members if not sight.seen(name)]
    for end, port in sorted(sight.ports.items()):
        verdict, problem = _judge_port(sight, end, partners, members, switched)
        neighbours = sorted(map(str, sight.joined.get(end.plug, ())))
        rows.append({**asdict(end), "netdev": port["netdev"], "verdict": verdict, "neighbours": neighbours})
        # Both halves of a cage mostly say the same.
        if problem and problem not in problems:
            problems.append(problem)
    steps: list[Move] = []
    cables: list[str] = []
    if problems and switched:
        steps = _switch_moves(sight, partners)
    elif problems:
        found = sight.cables()
        # Whoever took no part, or is in no plan, may hold the other end of anything.
        if found is not None and all(map(sight.seen, members)) and {plug.member for plug in found} <= set(members):
            steps = moves([(plugs[0], plugs[1]) for plugs in segments.values()], found)
            cables = _as_found(plan, found) if steps else []
    message = "; ".join(problems)
    if steps:
        keep = f" (or keep them so and set cluster_cables to {json.dumps(cables)})" if cables else ""
        message = f"{', then '.join(map(str, steps))}{keep}, since {message}"
    return {
        "ok": not problems,
        "ports": rows,
        "problems": problems,
        "moves": [str(step) for step in steps],
        "cables": cables,
        "message": message,
    }


def _judge_port(sight: Sight, end: End, partners: Mapping[Plug, list[Plug]], members: Sequence[str], switched: bool) -> tuple[str, str]:
    """A port's verdict and a sentence about it (empty where it is as planned)."""
    port, plug = sight.ports[end], end.plug
    if plug not in partners:
        return SPARE, ""
    planned, joined = partners[plug], sight.joined.get(plug, set())
    wish = f"the plan has {'the switch' if switched else cage_of(planned[0])} there"
    if not port["present"]:
        return ABSENT, f"{end} ({port['netdev']}) does not exist: check the device names and the driver of {end.member}"
    if sight.down(plug) or any(map(sight.down, planned)):
        # Check mode raises no port, so there is nothing to be seen.
        return DOWN, ""
    if not port["carrier"]:
        if sight.carrier(plug):
            return NO_CARRIER, f"{end} has no carrier, but the other half has: check {port['netdev']} (driver, firmware, PCIe link)"
        if not switched and not sight.seen(planned[0].member):
            return NO_CARRIER, f"{cage_of(plug)} has no carrier, {wish}: power {planned[0].member} on and check again"
        return MISSING, f"{cage_of(plug)} has no carrier, {wish}: check that the cable is plugged in at both ends"
    if not joined:
        return UNKNOWN, f"{cage_of(plug)} has a carrier, but no member answers there, {wish}: follow the cable"
    if {far.member for far in joined} == {end.member}:
        return LOOP, f"{cage_of(plug)} is cabled to {end.member} itself instead of {cage_of(planned[0])}"
    if strangers := {far.member for far in joined} - set(members):
        return UNKNOWN, f"{cage_of(plug)} is cabled to {min(strangers)}, which is not in the plan, {wish}: follow the cable"
    if not switched and len(joined) > 1:
        seen = " and ".join(cage_of(far) for far in sorted(joined, key=str))
        return SEVERAL, f"{cage_of(plug)} meets {seen}, {wish} alone: a switch is between them, or a bridge on a member"
    if not switched and joined != set(planned):
        return SWAPPED, f"{cage_of(plug)} is cabled to {cage_of(next(iter(joined)))} instead of {cage_of(planned[0])}"
    for far in planned:
        if problem := _judge_pair(sight, end, far, switched):
            return problem
    return RIGHT, ""


def _judge_pair(sight: Sight, end: End, far: Plug, switched: bool) -> tuple[str, str] | None:
    """What is wrong between a port and one planned far plug, where their cages meet as planned."""
    if not sight.carrier(far):
        return None  # the far member's own line says so
    hears, heard_by = sight.meets(end, far)
    if not hears | heard_by:
        if switched:
            cure = "check that one switch, one bridge and one VLAN join all planned ports"
        else:
            cure = f"its other half does: check {sight.ports[end]['netdev']} (driver, firmware, PCIe link)"
        return UNKNOWN, f"{end} does not meet {cage_of(far)}, {cure}"
    if end.half not in hears | heard_by:
        other = min(hears | heard_by)
        return WRONG_HALF, f"{end} meets half {other} of {cage_of(far)} only: check the names of the network devices on both members"
    if not (hears and heard_by):
        deaf, loud = (end, cage_of(far)) if heard_by else (cage_of(far), end)
        return ONE_WAY, f"{deaf} does not hear {loud}, only the other way: replace the cable"
    return None


def _switch_moves(sight: Sight, partners: Mapping[Plug, list[Plug]]) -> list[Move]:
    """Members whose plug is in their other cage: the planned one has no carrier, and others meet the member by the other one."""
    steps = []
    for plug in partners:
        for cage in CAGES:
            other = Plug(plug.member, cage)
            if other not in partners and not sight.carrier(plug) and sight.joined.get(other, set()) & set(partners):
                steps.append(Move(other, plug, "move"))
    return steps


def _as_found(plan: Mapping[str, Any], found: Mapping[Plug, Plug]) -> list[str]:
    """The cabling as a value of `cluster_cables`, where it is one of the declared topology; else nothing."""
    pairs = sorted({(min(pair, key=str), max(pair, key=str)) for pair in found.items()}, key=str)
    cables = [Cable(pair) for pair in pairs]
    if any(one.member == other.member for one, other in pairs):
        return []
    try:
        check_cables(plan["cluster"]["topology"], plan["cluster"]["members"], cables)
    except PlanError:
        return []
    return [str(cable) for cable in cables]
