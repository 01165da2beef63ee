# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cables, legs and addresses: the fabric of a cluster, made from the inventory alone.

Words: a *cage* is a QSFP port of a Spark, a *half* one of its two PCIe views, a *cable* joins two cages and a *leg* is one half
of one cable, an L2 segment with a network of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Port:
    """One half of one cage, as Linux shows it on every Spark."""

    cage: int
    half: str
    netdev: str
    hca: str


# NVIDIA/dgx-spark-playbooks, connect-two-sparks and connect-three-sparks (July 2026): cage 0 is the one next to the RJ45.
# The capital P2 is PCI domain 0002, the second x4 link of the same ConnectX-7.
PORTS = (
    Port(0, "A", "enp1s0f0np0", "rocep1s0f0"),
    Port(0, "B", "enP2p1s0f0np0", "roceP2p1s0f0"),
    Port(1, "A", "enp1s0f1np1", "rocep1s0f1"),
    Port(1, "B", "enP2p1s0f1np1", "roceP2p1s0f1"),
)
CAGES = (0, 1)

# A 4-ring is the longest switchless ring with published measurements (NestuFNG, jnardiello, yunwei37, sparkring).
LONGEST_MEASURED_RING = 4

# The longest prefix that has two addresses, a network and a broadcast address.
POINT_TO_POINT_PREFIX = 30

_END = r"(\S+)\.(\d+)"
_CABLE = re.compile(rf"\s*{_END}\s+-\s+{_END}\s*")


def ports_of(cage: int) -> tuple[Port, ...]:
    """The halves A and B of a cage."""
    return tuple(port for port in PORTS if port.cage == cage)


@dataclass(frozen=True)
class Member:
    """One Spark: its inventory name, its rank and its place on the management plane."""

    name: str
    rank: int
    address: str
    interface: str


@dataclass(frozen=True)
class Plug:
    """One end of a cable: a cage of a member."""

    member: str
    cage: int

    def __str__(self) -> str:
        return f"{self.member}.{self.cage}"


@dataclass(frozen=True)
class Cable:
    """An unordered pair of plugs; the one named first gets the lower address of each leg."""

    ends: tuple[Plug, Plug]

    @property
    def name(self) -> str:
        return f"{self.ends[0]}-{self.ends[1]}"

    def __str__(self) -> str:
        return f"{self.ends[0]} - {self.ends[1]}"

    @property
    def joins_equal_cages(self) -> bool:
        return self.ends[0].cage == self.ends[1].cage

    def other(self, member: str) -> Plug:
        """The plug at the far end, seen from a member."""
        return self.ends[1] if self.ends[0].member == member else self.ends[0]

    def near(self, member: str) -> Plug:
        """The plug of a member."""
        return self.ends[0] if self.ends[0].member == member else self.ends[1]


# What shares a wire: a cable, or one cage number of all members on a switch; its name and its plugs in order.
Segment = tuple[str, "Sequence[Plug]"]


@dataclass(frozen=True)
class LegEnd:
    """Where a leg meets a member."""

    member: str
    port: Port
    address: str


@dataclass(frozen=True)
class Leg:
    """One half of one cable (or, on a switch, one half of one cage number of all members)."""

    cable: str
    half: str
    network: IPv4Network
    ends: tuple[LegEnd, ...]

    def __str__(self) -> str:
        return f"leg {self.cable} half {self.half}"


@dataclass(frozen=True)
class Fabric:
    """The whole fabric plane. `cables` is empty on a switch; `notes` are sentences for the user, never errors."""

    topology: str
    mtu: int
    prefix_length: int
    members: tuple[str, ...]
    cables: tuple[Cable, ...]
    legs: tuple[Leg, ...]
    notes: tuple[str, ...]

    def legs_of(self, member: str) -> list[tuple[Leg, LegEnd]]:
        """A member's legs in the order of the plan, so that position k of one end of a cable faces position k of the other."""
        return [(leg, end) for leg in self.legs for end in leg.ends if end.member == member]


def plan_fabric(members: Sequence[Member], settings: Mapping[str, Any]) -> Fabric:
    """Members and settings (valid by the schema, defaults applied) to a fabric; raises PlanError."""
    check_management(members, settings)
    topology = settings["cluster_topology"]
    names = tuple(member.name for member in members)
    check_count(topology, names)
    cables: tuple[Cable, ...] = ()
    if topology == "switched":
        if settings["cluster_cables"]:
            raise PlanError("inventory: cluster_cables lists cables, but cluster_topology is switched: remove one of the two")
        segments: list[Segment] = [(f"switch.{cage}", [Plug(name, cage) for name in names]) for cage in settings["cluster_switch_cages"]]
    else:
        listed = tuple(parse_cable(text, names) for text in settings["cluster_cables"])
        cables = listed or rotation(topology, names)
        check_cables(topology, names, cables)
        segments = [(cable.name, list(cable.ends)) for cable in cables]
    check_pool(members, settings)
    hosts = host_numbers(segments, names, settings)
    prefix = leg_prefix(topology, hosts, settings)
    legs = plan_legs(segments, hosts, settings, prefix)
    return Fabric(
        topology=topology,
        mtu=settings["cluster_mtu"],
        prefix_length=prefix,
        members=names,
        cables=cables,
        legs=legs,
        notes=tuple(cabling_notes(topology, names, cables)),
    )


def check_count(topology: str, names: Sequence[str]) -> None:
    """A pair has two members, a ring three or more, a switched fabric two or more."""
    least, most = {"pair": (2, 2), "ring": (3, None), "switched": (2, None)}[topology]
    if len(names) < least or (most and len(names) > most):
        wanted = f"exactly {least}" if most else f"at least {least}"
        raise PlanError(
            f"inventory: cluster_topology {topology} needs {wanted} members, but group sparks has {len(names)} "
            f"({', '.join(names) or 'none'}): correct one of the two"
        )


def check_management(members: Sequence[Member], settings: Mapping[str, Any]) -> None:
    """Every member has an IPv4 address of its own, inside the management network where one is named."""
    network = settings["cluster_management_network"]
    seen: dict[IPv4Address, str] = {}
    for member in members:
        try:
            address = IPv4Address(member.address)
        except ValueError:
            raise PlanError(
                f"inventory: the management address of {member.name} is {member.address!r}, not an IPv4 address: "
                "set ansible_host or cluster_address of that host"
            ) from None
        if address in seen:
            raise PlanError(
                f"inventory: {seen[address]} and {member.name} both have the management address {address}: "
                "give each member its own ansible_host or cluster_address"
            )
        if network and address not in parse_network("cluster_management_network", network):
            raise PlanError(
                f"inventory: the management address {address} of {member.name} is outside cluster_management_network "
                f"{network}: correct one of the two"
            )
        seen[address] = member.name


def parse_network(key: str, text: str) -> IPv4Network:
    """A setting's CIDR text as a network."""
    try:
        return IPv4Network(text)
    except ValueError as error:
        raise PlanError(f"inventory: {key} is {text!r}, not an IPv4 network ({error}): write it like 10.10.0.0/16") from None


def parse_cable(text: str, names: Sequence[str]) -> Cable:
    """`t1.0 - t2.1` (member.cage - member.cage) as a cable between known members."""
    where = f"inventory: cluster_cables has {text!r}"
    match = _CABLE.fullmatch(text)
    if not match:
        raise PlanError(f"{where}, which is not of the form 'member.cage - member.cage': correct it")
    ends = (Plug(match[1], int(match[2])), Plug(match[3], int(match[4])))
    for end in ends:
        if end.member not in names:
            raise PlanError(f"{where}, but {end.member} is not in group sparks ({', '.join(names)}): correct the name")
        if end.cage not in CAGES:
            raise PlanError(f"{where}, but a Spark has only the cages 0 and 1: correct cage {end.cage}")
    if ends[0].member == ends[1].member:
        raise PlanError(f"{where}, which joins {ends[0].member} with itself: name the member at the other end")
    return Cable(ends)


def rotation(topology: str, names: Sequence[str]) -> tuple[Cable, ...]:
    """The vendor's cabling: in a ring cage 0 of each member to cage 1 of the next, in a pair one cable from cage 0 to cage 0.

    Ordered by the ranks that they join, the lower rank first, as NVIDIA's table of three Sparks numbers them.
    Source: NVIDIA/dgx-spark-playbooks, connect-three-sparks and connect-two-sparks (same cage at both ends).
    """
    if topology == "pair":
        return (Cable((Plug(names[0], 0), Plug(names[1], 0))),)
    steps = [(Plug(name, 0), Plug(names[rank + 1], 1)) for rank, name in enumerate(names[:-1])]
    closing = (Plug(names[0], 1), Plug(names[-1], 0))
    return tuple(Cable(ends) for ends in [steps[0], closing, *steps[1:]])


def check_cables(topology: str, names: Sequence[str], cables: Sequence[Cable]) -> None:
    """The cables are the declared topology: those of a pair join its two members, a ring is one cycle through all members."""
    taken: dict[Plug, Cable] = {}
    for cable in cables:
        for end in cable.ends:
            if end in taken:
                raise PlanError(
                    f"inventory: cluster_cables names cage {end.cage} of {end.member} twice "
                    f"({taken[end]} and {cable}): a cage takes one cable, correct one of the two"
                )
            taken[end] = cable
    if topology == "pair":
        return
    loose = [str(Plug(name, cage)) for name in names for cage in CAGES if Plug(name, cage) not in taken]
    if loose:
        raise PlanError(
            f"inventory: cluster_cables is no ring, {', '.join(loose)} has no cable: in a ring both cages of every member are cabled"
        )
    cycle = [name for name, dummy in walk(cables, names[0])]
    if len(cycle) != len(names):
        missed = [name for name in names if name not in cycle]
        raise PlanError(
            f"inventory: cluster_cables is no ring, {'-'.join(cycle)} closes without {', '.join(missed)}: "
            "correct it to one cycle through all members"
        )
    # A ring algorithm sends to the next rank only, so the ranks must follow the cables (sparkring, christopherowen).
    # In a ring of three every order does.
    if cycle not in (list(names), [names[0], *reversed(names[1:])]):
        raise PlanError(
            f"inventory: the cables make the ring {'-'.join(cycle)}, but the members are listed as {'-'.join(names)}: "
            "list the hosts of group sparks in the order of the ring"
        )


def walk(cables: Sequence[Cable], start: str) -> list[tuple[str, Cable]]:
    """The cycle from a member out of the first cable that names it: each member with the cable to the next one."""
    steps: list[tuple[str, Cable]] = []
    member = start
    left = list(cables)
    while cable := next((c for c in left if member in (c.ends[0].member, c.ends[1].member)), None):
        left.remove(cable)
        steps.append((member, cable))
        member = cable.other(member).member
        if member == start:
            break
    return steps


def cabling_notes(topology: str, names: Sequence[str], cables: Sequence[Cable]) -> list[str]:
    """Sentences about a cabling that works, but not as the vendor's would."""
    notes: list[str] = []
    equal = [cable for cable in cables if cable.joins_equal_cages]
    if topology == "pair" and not equal:
        notes.append(
            f"cable {' and '.join(map(str, cables))} joins different cages: it works, since every member is given its own device "
            "names, but the vendor's layout of a pair is the same cage at both ends"
        )
    if topology == "pair" and len(cables) > 1:
        notes.append("the second cable of a pair adds no bandwidth, since both cages share one PCIe link per half")
    if topology == "ring" and equal:
        turned = [name for name, cable in walk(cables, names[0]) if cable.near(name).cage != 0]
        straight = [name for name in names if name not in turned]
        swap = min(turned, straight, key=len)
        notes.append(
            f"{len(equal)} of {len(cables)} cables join equal cages ({', '.join(map(str, equal))}), which needs merged NICs "
            "and subnet-aware routing (NCCL 2.30.7 or newer); the vendor's layout is cage 0 of each member to cage 1 of the "
            f"next: to have it, swap the two plugs of {' and of '.join(swap)}"
        )
    if topology == "ring" and len(names) > LONGEST_MEASURED_RING:
        notes.append(
            f"a ring of {len(names)} has no published measurement (the longest is {LONGEST_MEASURED_RING}): "
            "a switch is the known way to so many members"
        )
    return notes


def host_numbers(segments: Sequence[Segment], names: Sequence[str], settings: Mapping[str, Any]) -> list[list[int]]:
    """The last part of each end's address, by segment: counted over the segment's own ends, or over all members by rank.

    The first is NVIDIA's way (.1 and .2 on every cable); the second gives a member one number everywhere, as eugr's script
    (.11, .12, .13) and most four-ring recipes do.
    """
    first = settings["cluster_leg_first_host"]
    if settings["cluster_leg_numbering"] == "ranks":
        return [[first + names.index(plug.member) for plug in plugs] for dummy, plugs in segments]
    return [[first + end for end in range(len(plugs))] for dummy, plugs in segments]


def leg_prefix(topology: str, hosts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> int:
    """The length of a leg's mask: as set, else 30 between two ends numbered 1 and 2, else that of the stride."""
    highest = max(max(numbers) for numbers in hosts)
    small = topology != "switched" and highest <= 2
    prefix: int = settings["cluster_leg_prefix"] or (POINT_TO_POINT_PREFIX if small else settings["cluster_leg_stride_prefix"])
    room = 2 ** (32 - prefix) - 2
    if highest > room:
        raise PlanError(
            f"inventory: a leg of prefix length {prefix} has {room} addresses, but one of its ends is number {highest} "
            "(cluster_leg_first_host, cluster_leg_numbering, number of members): give a shorter cluster_leg_prefix"
        )
    return prefix


def plan_legs(segments: Sequence[Segment], hosts: Sequence[Sequence[int]], settings: Mapping[str, Any], prefix: int) -> tuple[Leg, ...]:
    """Number the legs: segment i has network 2i of the pool for half A and 2i + 1 for half B.

    Every leg starts a stride of its own (a /24 by default), since NCCL tells legs apart by their first 24 bits unless told
    otherwise (NCCL_IB_SUBNET_PREFIX_LEN). A ring of three in 10.10.0.0/16 thus has 10.10.0.0/30 to 10.10.5.0/30, as the
    LLMKube three-Spark ring, with third octets and ends as in NVIDIA's table (1-2: 0 and 1, 1-3: 2 and 3, 2-3: 4 and 5).
    """
    pool = parse_network("cluster_leg_pool", settings["cluster_leg_pool"])
    stride = settings["cluster_leg_stride_prefix"]
    if stride < pool.prefixlen or 2 ** (stride - pool.prefixlen) < 2 * len(segments):
        raise PlanError(
            f"inventory: cluster_leg_pool {pool} has no room for {2 * len(segments)} legs of one /{stride} each: "
            "give a larger pool or a longer cluster_leg_stride_prefix"
        )
    legs: list[Leg] = []
    for (cable, plugs), numbers in zip(segments, hosts, strict=True):
        for view, half in enumerate("AB"):
            start = IPv4Address(int(pool.network_address) + (len(legs) << (32 - stride)))
            ends = tuple(
                LegEnd(plug.member, ports_of(plug.cage)[view], str(start + number)) for plug, number in zip(plugs, numbers, strict=True)
            )
            legs.append(Leg(cable, half, IPv4Network((start, prefix), strict=False), ends))
    check_legs(legs)
    return tuple(legs)


def check_pool(members: Sequence[Member], settings: Mapping[str, Any]) -> None:
    """The pool keeps clear of the management plane and of every reserved network.

    An overlap does not fail loudly: the peer is merely unreachable (LLMKube three-Spark ring; eugr/spark-vllm-docker).
    """
    pool = parse_network("cluster_leg_pool", settings["cluster_leg_pool"])
    taken = [(f"cluster_reserved_networks[{i}]", text) for i, text in enumerate(settings["cluster_reserved_networks"])]
    if settings["cluster_management_network"]:
        taken.insert(0, ("cluster_management_network", settings["cluster_management_network"]))
    for key, text in taken:
        if pool.overlaps(parse_network(key, text)):
            raise PlanError(f"inventory: cluster_leg_pool {pool} overlaps {key} {text}: choose another pool")
    for member in members:
        if IPv4Address(member.address) in pool:
            raise PlanError(
                f"inventory: cluster_leg_pool {pool} holds the management address {member.address} of {member.name}: choose another pool"
            )


def check_legs(legs: Sequence[Leg]) -> None:
    """No two legs share a network: ARP would answer from the wrong half and NCCL could not tell the peers apart."""
    for one, two in combinations(legs, 2):
        if one.network.overlaps(two.network):
            raise PlanError(
                f"inventory: {one} ({one.network}) and {two} ({two.network}) share a network: "
                "cluster_leg_prefix must not be shorter than cluster_leg_stride_prefix"
            )
