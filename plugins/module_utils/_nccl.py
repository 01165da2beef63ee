# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The NCCL and Gloo environment of a rank, from the fabric's topology and cabling.

What decides: NCCL 2.30.7's source (subnet-aware routing came with that release; older ones ignore the variable), NVIDIA's ring
recipe (NVIDIA/dgx-spark-playbooks) and the LLMKube three-Spark ring.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from ._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._topology import Fabric

# NCCL_IB_SUBNET_PREFIX_LEN's default in NCCL 2.30.7: so many leading bits tell one leg from another.
NCCL_PREFIX_LENGTH = 24

# The shortest ring in which some ranks are no neighbours.
OPEN_RING = 4

# Every fabric. Explicit IB makes a broken fabric fail instead of falling back to sockets; one GPU per member has no use for
# cuMem and NVLS; affinity read from the topology would pin proxy threads to few of the 20 cores (LLMKube, NVIDIA, LakyFx).
COMMON = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IB_ADDR_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_ROCE_VERSION_NUM": "2",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_NET": "IB",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_NVLS_ENABLE": "0",
    # At WARN nothing in the log proves the transport; these lines come at start only.
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
}

# Eight channels were neutral on the three-ring and pinned 0.3 GiB more per rank (LLMKube).
RING_CHANNELS = "4"

# What no profile may set, with the reason.
FROM_INVENTORY = "it follows from the inventory"
FORBIDDEN = {
    "GLOO_SOCKET_IFNAME": FROM_INVENTORY,
    "NCCL_SOCKET_IFNAME": FROM_INVENTORY,
    "NCCL_IB_HCA": FROM_INVENTORY,
    "NCCL_IB_GID_INDEX": "it differs per port and moves when a link flaps, so each rank finds it at its start",
    "NCCL_IB_ADDR_RANGE": "one range cannot cover the legs and narrows the choice that subnet-aware routing needs",
}
# The LLMKube ring forbids it; recipes for longer rings set it.
FORBIDDEN_IN_FULL_RING = {"NCCL_CROSS_NIC": "it rotates ports against the choice that subnet-aware routing makes"}


def environment(fabric: Fabric, member: str, interface: str, *, devices: bool, overrides: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables: `interface` is its management interface, `devices` whether it has RDMA devices, `overrides` the profile's.

    Without devices (a host that is no Spark) only the socket interfaces are named. Rendezvous and bootstrap stay on the
    management plane: each fabric address is reachable from one neighbour only.
    """
    # The exact form (=) for NCCL; Gloo knows plain names only.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if not devices:
        return sockets
    hcas = [end.port.hca for dummy, end in fabric.legs_of(member)]
    result = {
        **COMMON,
        # All halves: 23.2 GB/s on a three-ring against 13.9 with half A alone (LLMKube; masquerator-coder).
        "NCCL_IB_HCA": "=" + ",".join(hcas),
        # NVIDIA sets it for every topology; without it a ring dies in channel setup, since NICs are paired by index.
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        # Unmerged devices find their leg only where every cable joins cage 0 to cage 1; merged ones do with any cabling.
        "NCCL_IB_MERGE_NICS": "1" if fabric.topology == "ring" and any(c.joins_equal_cages for c in fabric.cables) else "0",
    }
    if fabric.topology == "ring":
        result["NCCL_MAX_NCHANNELS"] = RING_CHANNELS
    if fabric.topology == "ring" and len(fabric.members) >= OPEN_RING:
        result["NCCL_ALGO"] = "Ring"
    if not distinct_at(fabric, NCCL_PREFIX_LENGTH):
        result["NCCL_IB_SUBNET_PREFIX_LEN"] = str(fabric.prefix_length)
    return {**result, **overrides, **sockets}


def distinct_at(fabric: Fabric, bits: int) -> bool:
    """Whether the legs differ in their first bits and the ends of each leg agree in them."""
    keys = [{int(IPv4Address(end.address)) >> (32 - bits) for end in leg.ends} for leg in fabric.legs]
    return all(len(key) == 1 for key in keys) and len(set().union(*keys)) == len(keys)


def check_overrides(fabric: Fabric, overrides: Mapping[str, str], profile: str) -> None:
    """Refuse a profile's override of what the plan or the rank's start decides."""
    forbidden = dict(FORBIDDEN)
    if fabric.topology == "ring" and len(fabric.members) < OPEN_RING:
        forbidden |= FORBIDDEN_IN_FULL_RING
    for key in sorted(overrides):
        if key in forbidden:
            raise PlanError(f"profile {profile}: nccl.overrides.{key} may not be set, {forbidden[key]}: remove it")


def notes(fabric: Fabric) -> list[str]:
    """What the fabric asks of the NCCL library beyond a plain release."""
    if fabric.topology != "ring" or len(fabric.members) < OPEN_RING:
        return []
    return [
        f"a ring of {len(fabric.members)} has ranks that are no neighbours, and a plain NCCL still connects trees between "
        "them: use a library patched for NCCL_SKIP_TREE_CONNECT=1, or NCCL_RUNTIME_CONNECT=1 with NCCL_CUMEM_ENABLE=1, set "
        "in the profile's nccl.overrides"
    ]
