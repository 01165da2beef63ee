#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HCAs and the GID index of each planned address."""

from __future__ import annotations

DOCUMENTATION = r"""
module: roce_info
short_description: Find the GID index of each leg's address
version_added: 0.1.0
description:
  - Reads the RDMA devices from sysfs and finds, for each leg, the RoCE v2 GID that carries the leg's IPv4 address on the HCA's own netdev.
  - With O(selector) the HCAs are those that a value of E(NCCL_IB_HCA) means, and each one's address is the one that its table has.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)); C(hca), C(netdev) and C(address) are read.
    type: list
    elements: dict
  selector:
    description: A value of E(NCCL_IB_HCA), with all of its forms (V(=) for whole names, V(^) to exclude, else prefixes; C(:1) for the port).
    type: str
  pinned:
    description: An index that E(NCCL_IB_GID_INDEX) is set to somewhere; an HCA whose address is not there is a problem.
    type: int
  sysfs_root:
    description: Where sysfs is mounted.
    type: path
    default: /sys
  strict:
    description: Fail when an HCA has no usable GID or is slow; otherwise only report it.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read the GID tables
  gb10.cluster.roce_info:
    legs: "{{ plan.members[inventory_hostname].legs }}"

- name: See what NCCL would make of another launcher's variables
  gb10.cluster.roce_info:
    selector: rocep1s0f0,roceP2p1s0f0
    pinned: 3
"""

RETURN = r"""
hcas:
  description:
    - Per HCA its netdev, state, rate in Gb/s, MTU, link layer, PCIe link (GT/s and lanes), GID table with its C(holes), C(gid_index) of the
      address, and a C(verdict).
    - The verdict is V(right), V(inactive), V(unaddressed), V(ipv6-only), V(v1-only), V(other-address), V(elsewhere) (on another netdev, as
      that of a VLAN), V(empty), V(pinned), V(slow), V(slow-pcie), V(not-ethernet) or V(other-netdev).
  returned: always
  type: list
  elements: dict
gid_index:
  description: The one index that all HCAs share; none when they differ.
  returned: always
  type: int
gid_reason:
  description: Why there is a common index or none.
  returned: always
  type: str
problems:
  description: What is wrong, one sentence each.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _roce


def main() -> None:
    """Read, judge, report."""
    module = AnsibleModule(
        argument_spec={
            "legs": {"type": "list", "elements": "dict"},
            "selector": {"type": "str"},
            "pinned": {"type": "int"},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "strict": {"type": "bool", "default": False},
        },
        mutually_exclusive=[("legs", "selector")],
        required_one_of=[("legs", "selector")],
        supports_check_mode=True,
    )
    hcas = _roce.read_hcas(module.params["sysfs_root"])
    if module.params["selector"] is None:
        planned = {leg["hca"]: (leg["netdev"], leg["address"]) for leg in module.params["legs"]}
        result = _roce.judge(hcas, planned, module.params["pinned"])
    else:
        result = _roce.judge_selector(hcas, module.params["selector"], module.params["pinned"])
    if result["problems"] and module.params["strict"]:
        module.fail_json(msg="; ".join(result["problems"]), **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
