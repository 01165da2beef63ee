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
  - Sends one packet of the leg's whole MTU over each leg to each of its peers, with fragmentation forbidden, all legs at once. Where none comes
    back, a small one tells a too small MTU at the other end from a leg that is dead.
  - Asks on each leg by ARP whether somebody else has this member's address.
  - The first packets warm up the neighbour tables too; a cold one lets the first RDMA contact fail.
  - Asks the other members' management addresses too, where they are given.
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
  management:
    description: The other members' management addresses, by member.
    type: dict
    default: {}
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
from functools import partial

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _netplan, _sockets

IPV4_ICMP_HEADERS = 28
"""Bytes of a packet that are not ping's payload: 20 of IPv4 and 8 of ICMP."""
SMALL = 64
"""Bytes of a packet that passes wherever anything does."""


def ping(address: str, netdev: str, size: int, attempts: int) -> str:
    """Empty when an unbroken packet of this size comes back, else what ping said."""
    device = ["-I", netdev] if netdev else []
    command = ["ping", "-4", "-n", "-M", "do", "-s", str(size - IPV4_ICMP_HEADERS), *device, "-W", "1", "-c", "1", address]
    for _attempt in range(attempts):
        done = _host.run(command, timeout=10)
        if done.status == 0:
            return ""
    local = next((line for line in (done.err + done.out).splitlines() if "too long" in line or "unreachable" in line.lower()), None)
    return local.strip() if local else "no answer"


def main() -> None:
    """Ask over all legs at once."""
    module = AnsibleModule(
        argument_spec={
            "legs": {"type": "list", "elements": "dict", "required": True},
            "mtu": {"type": "int", "default": 9000},
            "management": {"type": "dict", "default": {}},
            "attempts": {"type": "int", "default": 3},
        },
        supports_check_mode=True,
    )
    legs, mtu, management, attempts = (module.params[name] for name in ("legs", "mtu", "management", "attempts"))
    live = _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)
    problems = [f"{sentence}: run the fabric role" for sentence in _netplan.leg_differences(legs, mtu, live)]
    problems += [
        f"{leg['netdev']} has no carrier: check cable {leg['cable']}"
        for leg in legs
        if leg["netdev"] in live and live[leg["netdev"]].up and not live[leg["netdev"]].carrier
    ]
    broken = {sentence.split()[0].rstrip(":") for sentence in problems}
    asked = [leg for leg in legs if leg["netdev"] not in broken]
    paths = [(leg, peer) for leg in asked for peer in leg["peers"]]
    own = {device.mac for device in live.values()}
    with ThreadPoolExecutor(max_workers=max(1, len(paths) + len(asked) + len(management))) as pool:
        full = [pool.submit(ping, peer["address"], leg["netdev"], mtu, attempts) for leg, peer in paths]
        twins = [pool.submit(_sockets.holder, leg["netdev"], leg["address"], own) for leg in asked]
        planes = {member: pool.submit(ping, address, "", SMALL, attempts) for member, address in management.items()}
        answers = [answer.result() for answer in full]
        failed = [path for path, said in zip(paths, answers, strict=True) if said]
        small = list(pool.map(partial(reaches, attempts=attempts), failed))
        problems += [_netplan.twin_sentence(leg, mac.result()) for leg, mac in zip(asked, twins, strict=True) if mac.result()]
        problems += [
            f"{member} does not answer on the management plane ({management[member]}: {said.result()}), where the ranks meet: check the LAN and firewalls"
            for member, said in planes.items()
            if said.result()
        ]
    said = [answer for answer in answers if answer]
    problems += [_netplan.path_sentence(*path, mtu, *verdict) for path, *verdict in zip(failed, said, small, strict=True)]
    result = {"changed": False, "proven": answers.count(""), "problems": problems}
    if problems:
        module.fail_json(msg="; ".join(problems), **result)
    module.exit_json(**result)


def reaches(path: tuple[dict[str, str], dict[str, str]], attempts: int) -> bool:
    """Whether a small packet comes back."""
    leg, peer = path
    return not ping(peer["address"], leg["netdev"], SMALL, attempts)


if __name__ == "__main__":
    main()
