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
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)); C(hca), C(netdev) and C(address) are read.
    type: list
    elements: dict
    required: true
  sysfs_root:
    description: Where sysfs is mounted.
    type: path
    default: /sys
  strict:
    description: Fail when a leg has no usable GID; otherwise only report it.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read the GID tables
  gb10.cluster.roce_info:
    legs: "{{ plan.members[inventory_hostname].legs }}"
"""

RETURN = r"""
hcas:
  description: Per planned HCA its netdev, state, rate in Gb/s, MTU, GID table, and C(gid_index) of the planned address.
  returned: always
  type: list
  elements: dict
gid_index:
  description: The one index that all planned HCAs share; none when they differ.
  returned: always
  type: int
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
            "legs": {"type": "list", "elements": "dict", "required": True},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "strict": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    planned = {leg["hca"]: (leg["netdev"], leg["address"]) for leg in module.params["legs"]}
    result = _roce.judge(_roce.read_hcas(module.params["sysfs_root"]), planned)
    if result["problems"] and module.params["strict"]:
        module.fail_json(msg="; ".join(result["problems"]), **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
