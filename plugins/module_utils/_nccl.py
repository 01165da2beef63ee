# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The NCCL and Gloo environment of a rank, from the fabric's topology and cabling: each variable with its reason, what must be
absent, and what the library must know for it to work.

What decides: NCCL 2.30.7's source (subnet-aware routing came with that release; older ones ignore the variable), NVIDIA's ring
recipe (NVIDIA/dgx-spark-playbooks) and the LLMKube three-Spark ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

from ._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._topology import Fabric


@dataclass(frozen=True)
class Variable:
    """A variable's value and why it is that."""

    value: str
    reason: str


@dataclass(frozen=True)
class Requirement:
    """What a library must know: the name of a parameter without its `NCCL_`, a string in the file; `reason` ends in a cure."""

    feature: str
    reason: str


# NCCL_IB_SUBNET_PREFIX_LEN's default in NCCL 2.30.7: so many leading bits tell one leg from another.
NCCL_PREFIX_LENGTH = 24

# The shortest ring in which some ranks are no neighbours.
OPEN_RING = 4

SUBNET_ROUTING = "IB_SUBNET_AWARE_ROUTING"
SUBNET_ROUTING_SINCE = (2, 30, 7)
"""Tags and wheels up to 2.30.4 lack the string, 2.30.7 and 2.31.2 hold it; ">= 2.30" is too loose."""
# FujitsuPolycom/sparkring's patch.
SKIP_TREES = "SKIP_TREE_CONNECT"
# christopherowen/dgx-spark-networking: channels that are only set up when used leave the trees out as well.
LAZY_TREES = {"NCCL_RUNTIME_CONNECT": "1", "NCCL_CUMEM_ENABLE": "1"}

_ONE_GPU = "a member has one GPU, which has no use for it"
_FAIL = "a broken fabric shall fail, not fall back to sockets"
_V2 = "with no index pinned NCCL looks for an IPv4 entry of RoCE v2 in each device's own table"
_LINES = "at WARN nothing in the log proves the transport; these lines come at start only"

# Every fabric (LLMKube, NVIDIA, LakyFx).
COMMON = {
    "NCCL_CUMEM_ENABLE": Variable("0", _ONE_GPU),
    "NCCL_IB_ADDR_FAMILY": Variable("AF_INET", _V2),
    "NCCL_IB_DISABLE": Variable("0", _FAIL),
    "NCCL_IB_ROCE_VERSION_NUM": Variable("2", _V2),
    "NCCL_IGNORE_CPU_AFFINITY": Variable("1", "affinity read from the topology would pin proxy threads to few of the 20 cores"),
    "NCCL_NET": Variable("IB", _FAIL),
    "NCCL_NET_PLUGIN": Variable("none", "a plugin that comes with an image must not replace the transport that knows the legs"),
    "NCCL_NVLS_ENABLE": Variable("0", _ONE_GPU),
    "NCCL_DEBUG": Variable("INFO", _LINES),
    "NCCL_DEBUG_SUBSYS": Variable("INIT,NET,ENV,BOOTSTRAP", _LINES),
}

# Eight channels were neutral on the three-ring and pinned 0.3 GiB more per rank (LLMKube).
RING_CHANNELS = Variable("4", "eight are no faster on a ring and pin 0.3 GiB more per rank")
# 23.2 GB/s on a three-ring against 13.9 with half A alone (LLMKube; masquerator-coder).
ALL_HALVES = "both halves of each cabled cage: one alone has half the bandwidth, and an unaddressed one hangs the group"
# NVIDIA sets it for every topology; without it a ring dies in channel setup, since NICs are paired by index.
BY_SUBNET = Variable("1", "NCCL then takes for each peer the device on that peer's leg; by index it would take the wrong one in a ring")
MERGED = Variable("1", "a cable joins equal cages, and there only merged devices find their leg")
UNMERGED = Variable("0", "a merged device would span two neighbours; with cage 0 at one end of each cable single ones find their leg")
APART = Variable("0", "each half is a device with a leg of its own")
RING_ONLY = Variable("Ring", "ranks that are no neighbours have no path for a tree")
NO_TREES = Variable("1", "a library patched for it leaves out the trees between ranks that are no neighbours; a plain one ignores it")
# The exact form (=) for NCCL; Gloo knows plain names only.
ON_MANAGEMENT = "rendezvous and bootstrap reach all members on the management plane only: a leg reaches one neighbour"

# What no profile may set, with the reason.
FROM_INVENTORY = "it follows from the inventory"
# What no plan sets. A rank's start writes the GID index that all its devices share at that moment, where there is one (`_start`).
ABSENT = {
    "NCCL_IB_GID_INDEX": (
        "NCCL takes one number for all devices, but the index differs per port and moves when a link flaps; "
        "unset, NCCL finds each device's own"
    ),
    "NCCL_IB_ADDR_RANGE": "one range cannot cover the legs and narrows the choice that subnet-aware routing needs",
}
# The LLMKube ring forbids it; recipes for longer rings set it.
ABSENT_IN_FULL_RING = {"NCCL_CROSS_NIC": "it rotates ports against the choice that subnet-aware routing makes"}
FORBIDDEN = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"), FROM_INVENTORY) | ABSENT


def variables(
    fabric: Fabric, member: str, interface: str, *, devices: bool, overrides: Mapping[str, str] | None = None
) -> dict[str, Variable]:
    """A rank's variables: `interface` is its management interface, `devices` whether it has RDMA devices, `overrides` the profile's.

    Without devices (a host that is no Spark) only the socket interfaces are named.
    """
    sockets = {
        "GLOO_SOCKET_IFNAME": Variable(interface, ON_MANAGEMENT),
        "NCCL_SOCKET_IFNAME": Variable(f"={interface}", ON_MANAGEMENT),
    }
    if not devices:
        return sockets
    hcas = [end.port.hca for dummy, end in fabric.legs_of(member)]
    result = {
        **COMMON,
        "NCCL_IB_HCA": Variable("=" + ",".join(hcas), ALL_HALVES),
        "NCCL_IB_SUBNET_AWARE_ROUTING": BY_SUBNET,
        "NCCL_IB_MERGE_NICS": APART,
    }
    if fabric.topology == "ring":
        equal = any(cable.joins_equal_cages for cable in fabric.cables)
        result |= {"NCCL_IB_MERGE_NICS": MERGED if equal else UNMERGED, "NCCL_MAX_NCHANNELS": RING_CHANNELS}
    if is_open_ring(fabric):
        result |= {"NCCL_ALGO": RING_ONLY, "NCCL_SKIP_TREE_CONNECT": NO_TREES}
    if not distinct_at(fabric, NCCL_PREFIX_LENGTH):
        result["NCCL_IB_SUBNET_PREFIX_LEN"] = Variable(
            str(fabric.prefix_length),
            f"the legs do not differ in their first {NCCL_PREFIX_LENGTH} bits, by which NCCL would tell them apart",
        )
    own = {key: Variable(value, "the profile sets it") for key, value in (overrides or {}).items()}
    return {**result, **own, **sockets}


def is_open_ring(fabric: Fabric) -> bool:
    """Whether some ranks are no neighbours."""
    return fabric.topology == "ring" and len(fabric.members) >= OPEN_RING


def absent(fabric: Fabric) -> dict[str, str]:
    """Variables that must not be set at all, an empty value included: NCCL reads an empty number as 0. Each with its reason."""
    full_ring = fabric.topology == "ring" and not is_open_ring(fabric)
    return {**ABSENT, **(ABSENT_IN_FULL_RING if full_ring else {})}


def requirements(fabric: Fabric, environment: Mapping[str, str]) -> list[Requirement]:
    """What the library of a rank with this environment must know. Not its version: builds of one version differ, and are patched."""
    needed = []
    crossed = len(fabric.cables) > 1 and not all(cable.joins_equal_cages for cable in fabric.cables)
    if fabric.topology == "ring" or crossed:
        since = ".".join(map(str, SUBNET_ROUTING_SINCE))
        reason = f"without it NICs are paired by index and channel setup fails on this cabling: use NCCL {since} or newer"
        needed.append(Requirement(SUBNET_ROUTING, reason))
    if is_open_ring(fabric) and not LAZY_TREES.items() <= environment.items():
        needed.append(
            Requirement(
                SKIP_TREES,
                f"a ring of {len(fabric.members)} has ranks that are no neighbours, and a plain NCCL still connects trees between "
                "them: use a library patched for NCCL_SKIP_TREE_CONNECT=1, or set NCCL_RUNTIME_CONNECT=1 with NCCL_CUMEM_ENABLE=1 "
                "in the profile's nccl.overrides",
            )
        )
    return needed


def distinct_at(fabric: Fabric, bits: int) -> bool:
    """Whether the legs differ in their first bits and the ends of each leg agree in them."""
    keys = [{int(IPv4Address(end.address)) >> (32 - bits) for end in leg.ends} for leg in fabric.legs]
    return all(len(key) == 1 for key in keys) and len(set().union(*keys)) == len(keys)


def check_overrides(fabric: Fabric, overrides: Mapping[str, str], profile: str) -> None:
    """Refuse a profile's override of what the plan or the rank's start decides."""
    forbidden = FORBIDDEN | absent(fabric)
    for key in sorted(overrides):
        if key in forbidden:
            raise PlanError(f"profile {profile}: nccl.overrides.{key} may not be set, {forbidden[key]}: remove it")


def explain(fabric: Fabric, *, devices: bool, overrides: Mapping[str, str]) -> dict[str, Any]:
    """The reasons as plain data: of each variable, of each absent one, and what the library must hold. The same for all members."""
    chosen = variables(fabric, fabric.members[0], "", devices=devices, overrides=overrides)
    environment = {key: variable.value for key, variable in chosen.items()}
    return {
        "reasons": {key: variable.reason for key, variable in sorted(chosen.items())},
        "absent": absent(fabric),
        "library": [{"feature": each.feature, "reason": each.reason} for each in requirements(fabric, environment)] if devices else [],
    }
