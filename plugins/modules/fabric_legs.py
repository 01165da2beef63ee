#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove every leg with a full-size packet."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_legs
short_description: Prove every leg by a packet of full size without fragmentation
version_added: 0.1.0
description:
  - Sends one packet of the leg's whole MTU over each leg to each of its peers, with fragmentation forbidden, all legs at once.
  - The first packets warm up the neighbour tables too; a cold one lets the first RDMA contact fail.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)).
    type: list
    elements: dict
    required: true
  mtu:
    description: MTU of every leg.
    type: int
    default: 9000
  attempts:
    description: Packets sent, one second apart, until one is answered.
    type: int
    default: 3
"""

EXAMPLES = r"""
- name: Prove the legs
  gb10.cluster.fabric_legs:
    legs: "{{ plan.members[inventory_hostname].legs }}"
    mtu: "{{ plan.fabric.mtu }}"
"""

RETURN = r"""
proven:
  description: Number of legs and peers that answered.
  returned: always
  type: int
problems:
  description: What is wrong, one sentence each.
  returned: always
  type: list
  elements: str
"""

from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _netplan

IPV4_ICMP_HEADERS = 28
"""Bytes of a packet that are not ping's payload: 20 of IPv4 and 8 of ICMP."""


def ping(netdev: str, address: str, mtu: int, attempts: int) -> str | None:
    """None when a full-size packet comes back, else what ping said."""
    command = ["ping", "-4", "-n", "-M", "do", "-s", str(mtu - IPV4_ICMP_HEADERS), "-I", netdev, "-W", "1", "-c", "1", address]
    for _attempt in range(attempts):
        done = _host.run(command, timeout=10)
        if done.status == 0:
            return None
    local = next((line for line in (done.err + done.out).splitlines() if "too long" in line or "unreachable" in line.lower()), None)
    return local.strip() if local else "no answer"


def main() -> None:
    """Ping over all legs at once."""
    module = AnsibleModule(
        argument_spec={
            "legs": {"type": "list", "elements": "dict", "required": True},
            "mtu": {"type": "int", "default": 9000},
            "attempts": {"type": "int", "default": 3},
        },
        supports_check_mode=True,
    )
    legs, mtu = module.params["legs"], module.params["mtu"]
    live = _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)
    problems = [f"{sentence}: run the fabric role" for sentence in _netplan.leg_differences(legs, mtu, live)]
    problems += [
        f"{leg['netdev']} has no carrier: check cable {leg['cable']}"
        for leg in legs
        if leg["netdev"] in live and not live[leg["netdev"]].carrier
    ]
    paths = [(leg, peer) for leg in legs for peer in leg["peers"]] if not problems else []
    with ThreadPoolExecutor(max_workers=max(1, len(paths))) as pool:
        answers = list(pool.map(lambda path: ping(path[0]["netdev"], path[1]["address"], mtu, module.params["attempts"]), paths))
    for (leg, peer), said in zip(paths, answers, strict=True):
        if said:
            problems.append(
                f"{leg['netdev']} does not reach {peer['member']} ({peer['address']} on {peer['netdev']}) with {mtu} bytes: {said}; "
                f"check cable {leg['cable']} and the MTU at both ends"
            )
    result = {"changed": False, "proven": answers.count(None), "problems": problems}
    if problems:
        module.fail_json(msg="; ".join(problems), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
