#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until the group computes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: group_wait
short_description: Wait until the group of this member's rank serves
version_added: 0.1.0
description:
  - Waits until this member's rank says that the group serves. It says so when the head has generated a token, not when its API answers.
  - Fails as soon as any rank of the group fails, with that rank's last log lines.
  - A wait that fails ends those of the other members in the same task, which would wait for a rank that is not running.
  - While it waits, the controller shows each change of phase and the last line of the rank's log.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
attributes:
  action:
    support: full
    description: Runs partly on the controller, which shows the progress.
options:
  group:
    description: Name of the group.
    type: str
    required: true
  since:
    description: Failures before this time count for nothing; seconds since 1970 by the member's clock, C(started_at) of M(gb10.cluster.rank_unit).
    type: float
    default: 0
  timeout:
    description: Longest wait in seconds.
    type: float
    default: 1800
  waited:
    description:
      - Seconds since all members were told to start, by which O(since) may be too early. A rank that was stopped before them fails no start.
      - The controller's part sets it.
    type: float
    default: 0
  wait:
    description: Longest time in seconds after which the module reports back to the controller, which asks again until O(timeout) is over.
    type: float
    default: 5
"""

EXAMPLES = r"""
- name: Wait for the group
  gb10.cluster.group_wait:
    group: lab
    since: "{{ unit.started_at }}"
"""

RETURN = r"""
phase:
  description: Phase of this member's rank.
  returned: always
  type: str
  sample: serving
detail:
  description: What the rank waits for.
  returned: always
  type: str
line:
  description: Last line of the rank's log.
  returned: always
  type: str
log:
  description: Last log lines of the rank that failed, from whichever member.
  returned: failure
  type: list
  elements: str
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _units

POLL_S = 0.25


def last_line(unit: str) -> str:
    """Last line that the rank logged."""
    return _host.run(
        ["journalctl", "--unit", unit, "--identifier", _units.LOG_IDENTIFIER, "--lines", "1", "--output", "cat", "--no-pager", "--quiet"]
    ).out.strip()


def main() -> None:
    """Poll the rank's state until it serves, it fails, or it is time to report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "since": {"type": "float", "default": 0},
            "timeout": {"type": "float", "default": 1800},
            "waited": {"type": "float", "default": 0},
            "wait": {"type": "float", "default": 5},
        },
        supports_check_mode=True,
    )
    group, unit = module.params["group"], _units.rank_unit(module.params["group"])
    deadline = time.monotonic() + module.params["wait"]
    stops_since = time.time() - module.params["waited"]
    seen = None
    while True:
        state = _units.read_rank_state(group)
        if state.has_failed(module.params["since"], stops_since):
            failure = state.failure or {}
            module.fail_json(
                msg=f"group {group} did not start, {failure['reason']}: read its last lines here, all with journalctl -u {unit} on {failure['culprit']}",
                phase="failed",
                detail=failure["reason"],
                line="",
                log=failure["log"],
            )
        if not state.is_active:
            module.fail_json(
                msg=f"{unit} is {state.active} and not running: start the group (playbook gb10.cluster.start)",
                phase=state.phase,
                detail=state.detail,
                line=last_line(unit),
                log=[],
            )
        changed = seen is not None and seen != (state.phase, state.detail)
        seen = (state.phase, state.detail)
        if state.phase == "serving" or changed or time.monotonic() > deadline:
            module.exit_json(changed=False, phase=state.phase, detail=state.detail, line=last_line(unit))
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
