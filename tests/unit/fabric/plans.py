# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans of small clusters."""

from __future__ import annotations

from typing import Any

from ansible_collections.gb10.cluster.plugins.module_utils import _plan, _topology
from ansible_collections.gb10.cluster.plugins.module_utils._schema import with_defaults


def make_plan(topology: str, count: int, **settings: Any) -> dict[str, Any]:
    """As much of a plan as its fabric: members t1, t2, … and their legs."""
    full = with_defaults({"cluster_topology": topology, **settings})
    members = _plan.members_of([{"name": f"t{n}", "address": f"198.51.100.{10 + n}"} for n in range(1, count + 1)], full)
    fabric = _topology.plan_fabric(members, full)
    legs = [
        {
            "cable": leg.cable,
            "half": leg.half,
            "ends": [
                {"member": end.member, "cage": end.port.cage, "netdev": end.port.netdev, "hca": end.port.hca, "address": end.address}
                for end in leg.ends
            ],
        }
        for leg in fabric.legs
    ]
    cluster = {"topology": topology, "members": list(fabric.members), "head": fabric.members[0], "name": "lab"}
    return {
        "cluster": cluster,
        "fabric": {"legs": legs, "mtu": fabric.mtu, "notes": []},
        "members": {name: {"rank": rank, "legs": _plan.member_legs(fabric, name)} for rank, name in enumerate(fabric.members)},
    }
