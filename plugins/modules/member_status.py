#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A member's state."""

from __future__ import annotations

DOCUMENTATION = r"""
module: member_status
short_description: Read the state of a member
version_added: 0.1.0
description:
  - Reads the rank, the legs, the memory and the swap of a member, in one go. The filter P(gb10.cluster.status_screen#filter) makes a screen of it.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  group:
    description: Name of the group.
    type: str
    required: true
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)).
    type: list
    elements: dict
    required: true
  mtu:
    description: MTU of every leg.
    type: int
    default: 9000
  history:
    description: Whether to read the last day as well, which takes 30 kB a member.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read this member's state
  gb10.cluster.member_status:
    group: "{{ plan.service.group }}"
    legs: "{{ plan.members[inventory_hostname].legs }}"
"""

RETURN = r"""
member:
  description:
    - Rank (C(active), C(phase), C(detail), C(failure), C(checks), C(events), C(at_boot)), legs (C(legs), C(leg_problems)), memory in MiB and swaps.
    - C(evidence), the names of the events that were kept, and C(lock), who works on the cluster now, where this member is the head.
    - C(history) with O(history=true), one record per five minutes of the last day with C(at), C(free) and C(available) (least MiB), C(legs) (bytes
      per second by network device), and on the head of a serving group C(canary) (seconds) and C(kv) (share of the KV cache).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _status


def main() -> None:
    """Read, report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "legs": {"type": "list", "elements": "dict", "required": True},
            "mtu": {"type": "int", "default": 9000},
            "history": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    group, legs, mtu, history = (module.params[name] for name in ("group", "legs", "mtu", "history"))
    module.exit_json(changed=False, member=_status.read_member(group, legs, mtu, history=history))


if __name__ == "__main__":
    main()
