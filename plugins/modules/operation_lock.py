#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One operator at a time."""

from __future__ import annotations

DOCUMENTATION = r"""
module: operation_lock
short_description: Keep two runs from working on one cluster at the same time
version_added: 0.1.0
description:
  - Takes and gives back a lock on the head. A run whose lock is held by another one fails, with who that is and for how long.
  - A lock is taken over, with a sentence, when its run's process is gone on the same controller, when its owner has not been heard of for an hour, or
    when O(takeover) says so. It does not outlive a boot of the head.
  - The run that has the lock may ask again, which shows that it is there.
  - Nothing is taken in check mode. A lock is no state of the cluster, so taking it is no change.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
attributes:
  action:
    support: full
    description: Runs partly on the controller, which says who asks and whether an earlier run of its own is still there.
options:
  group:
    description: Name of the group.
    type: str
    required: true
  what:
    description: What the run does, such as V(site). Only what took a lock gives it back.
    type: str
    required: true
  state:
    description: Whether the lock is to be taken or given back.
    type: str
    choices: [present, absent]
    default: present
  takeover:
    description: Take the lock whoever has it.
    type: bool
    default: false
  who:
    description: User and controller that ask. Set by the controller's side.
    type: str
    default: ""
  boot:
    description: The controller's boot. Set by the controller's side.
    type: str
    default: ""
  pid:
    description: The run's process on the controller. Set by the controller's side.
    type: int
    default: 0
  gone:
    description: Process of an earlier run from the same controller that is no longer there. Set by the controller's side.
    type: int
    default: 0
"""

EXAMPLES = r"""
- name: Take the lock
  gb10.cluster.operation_lock:
    group: lab
    what: site
  delegate_to: "{{ plan.cluster.head }}"
  run_once: true
"""

RETURN = r"""
lock:
  description: The lock as it is now, with C(owner), C(since) and C(seen); none when it is free.
  returned: always
  type: dict
took_over:
  description: From whom the lock was taken over, and why; empty otherwise.
  returned: always
  type: str
"""

import fcntl
import json
import time
from pathlib import Path
from typing import Any, TextIO

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _lock, _units


def take(module: AnsibleModule, file: TextIO, held: _lock.Lock | None, asking: _lock.Owner) -> dict[str, Any]:
    """Take the lock, or fail with who has it."""
    now, parameters = time.time(), module.params
    verdict, took_over = _lock.judge(held, asking, now), ""
    if held and verdict in (_lock.HELD, _lock.STALE):
        same_place = (held.owner.who, held.owner.boot) == (asking.who, asking.boot)
        if same_place and parameters["gone"] == held.owner.pid:
            took_over = _lock.takeover_sentence(held, now, "its process is gone")
        elif verdict == _lock.STALE:
            took_over = _lock.takeover_sentence(held, now, f"it has not been heard of for {_lock.age_text(now - held.seen)}")
        elif parameters["takeover"]:
            took_over = _lock.takeover_sentence(held, now, "as asked by lock_takeover")
        else:
            module.fail_json(msg=_lock.held_sentence(held, now), lock=held.record(), took_over="")
    lock = _lock.taken(held, asking, now)
    write(file, json.dumps(lock.record()))
    return {"lock": lock.record(), "took_over": took_over}


def write(file: TextIO, text: str) -> None:
    """Replace what the locked file holds."""
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def main() -> None:
    """Read, decide and write while nobody else can."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "what": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "takeover": {"type": "bool", "default": False},
            "who": {"type": "str", "default": ""},
            "boot": {"type": "str", "default": ""},
            "pid": {"type": "int", "default": 0},
            "gone": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, lock=_units.read_lock(module.params["group"]), took_over="")
    asking = _lock.Owner(*(module.params[key] for key in ("who", "boot", "pid", "what")))
    path = Path(_units.lock_file(module.params["group"]))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = _lock.parse(_units.read_lock(module.params["group"]))
        if module.params["state"] == "present":
            module.exit_json(changed=False, **take(module, file, held, asking))
        if _lock.frees(held, asking):
            write(file, "")
            held = None
    module.exit_json(changed=False, lock=held.record() if held else None, took_over="")


if __name__ == "__main__":
    main()
