#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's log."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_log
short_description: Read the log of this member's rank, or follow it
version_added: 0.1.0
description:
  - Reads the last lines of the rank from the journal, also of its earlier lives.
  - With O(follow), the controller shows new lines as they come, until the time is over or the run is interrupted.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
attributes:
  action:
    support: full
    description: Runs partly on the controller, which shows what is followed.
options:
  group:
    description: Name of the group.
    type: str
    required: true
  lines:
    description: How many of the last lines.
    type: int
    default: 40
  follow:
    description: Seconds for which new lines are shown; 0 for none.
    type: int
    default: 0
  cursor:
    description: Read what came after this place of the journal instead, as returned before.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show the last lines
  gb10.cluster.rank_log:
    group: lab
  register: log
"""

RETURN = r"""
lines:
  description: Lines with their time.
  returned: always
  type: list
  elements: str
cursor:
  description: Where the last line stands in the journal.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _units

CURSOR = "-- cursor: "


def main() -> None:
    """Read, report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "lines": {"type": "int", "default": 40},
            "follow": {"type": "int", "default": 0},
            "cursor": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    unit, cursor = _units.rank_unit(module.params["group"]), module.params["cursor"]
    start = ["--after-cursor", cursor] if cursor else ["--lines", str(module.params["lines"])]
    done = _host.run(["journalctl", "--unit", unit, "--no-pager", "--all", "--quiet", "--output", "short-iso", "--show-cursor", *start])
    if done.status:
        module.fail_json(msg=f"the journal of {unit} cannot be read ({done.message}): run journalctl -u {unit} on this member")
    lines = done.out.splitlines()
    at = [line.removeprefix(CURSOR) for line in lines if line.startswith(CURSOR)]
    module.exit_json(changed=False, lines=[line for line in lines if not line.startswith(CURSOR)], cursor=at[-1] if at else cursor)


if __name__ == "__main__":
    main()
