#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove an endpoint by what it answers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_probe
short_description: Prove a served model by its answers
version_added: 0.1.0
description:
  - Runs on the head, so that the API key never leaves it. Asks the endpoint and judges the answers, one probe after the other.
  - V(health), V(key) and V(models) always hold; which others do, and with what template arguments, the profile says (C(probes)).
  - The head keeps all requests and replies in C(/var/lib/gb10/verify/GROUP.json). That is no change.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE, gb10.cluster._attributes.ENDPOINT]
options:
  context:
    description: Planned context in tokens; the endpoint must say the same where it says one.
    type: int
    default: 0
  probes:
    description: The profile's probes with their settings (C(service.probes) of the plan). What is absent or null is not probed.
    type: dict
    default: {}
  only:
    description: Names of the probes to run; empty for all.
    type: list
    elements: str
    default: []
  reference:
    description: Greedy tokens of the same model run as one rank, with C(prompt) and C(token_ids). The endpoint must generate the same.
    type: dict
    default: {}
  since:
    description:
      - Seconds since 1970 by the head's clock. A group that began to serve before is the one that is to be replaced, and is not believed.
    type: float
    default: 0
  timeout:
    description: Seconds for one request; a long prompt gets more, by its length.
    type: float
    default: 300
"""

EXAMPLES = r"""
- name: Ask for a capital
  gb10.cluster.serving_probe:
    group: lab
    port: 8000
    model: smollm2
    probes:
      chat: {prompt: "What is the capital of France?", max_tokens: 32, expect: paris}

- name: Wait until the group is another than the one before, and prove that
  gb10.cluster.serving_probe:
    group: lab
    port: 8000
    model: smollm2
    since: "{{ before_the_change }}"
  register: probe
  until: probe is success
  retries: 120
  delay: 5
"""

RETURN = r"""
results:
  description: Per probe its C(name), C(verdict) (passed, failed, not probed), C(note) and C(faults) (C(code), C(sentence)).
  returned: always
  type: list
  elements: dict
problems:
  description: What is wrong, one sentence each.
  returned: always
  type: list
  elements: str
codes:
  description: Names of the faults, as docs/verification.md explains them.
  returned: always
  type: list
  elements: str
lines:
  description: One line per probe, for a person.
  returned: always
  type: list
  elements: str
answer:
  description: Text of the chat answer.
  returned: when the probe V(chat) passed
  type: str
token_ids:
  description: Greedy tokens, which are those of O(reference).
  returned: when the probe V(parity) passed
  type: list
  elements: int
seconds:
  description: Time that each probe took, by name.
  returned: always
  type: dict
evidence:
  description: File on the head with every request and its reply.
  returned: always
  type: str
"""

import json
import secrets
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _endpoint, _host, _probes, _units

FOLDER = "/var/lib/gb10/verify"


def main() -> None:
    """Ask, judge, keep, report all that is wrong."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "context": {"type": "int", "default": 0},
            "probes": {"type": "dict", "default": {}},
            "only": {"type": "list", "elements": "str", "default": []},
            "reference": {"type": "dict", "default": {}},
            "since": {"type": "float", "default": 0},
            "timeout": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    group, only = parameters["group"], parameters["only"]
    if unknown := sorted(set(only) - set(_probes.PROBES)):
        module.fail_json(msg=f"there is no probe {', '.join(unknown)}: choose from {', '.join(_probes.PROBES)}")
    try:
        endpoint = _endpoint.of_group(group, parameters["port"], parameters["timeout"])
    except LookupError as error:
        module.fail_json(msg=str(error))
    before = _units.rank_record(group)
    if old := _probes.not_yet(before, parameters["since"]):
        module.fail_json(msg=old, codes=["old-group"], problems=[old], results=[], seconds={})

    target = _probes.Target(parameters["model"], parameters["context"], secrets.token_hex(8), parameters["reference"])
    results = _probes.run(target, parameters["probes"], only, endpoint.ask_all)
    after = _units.rank_record(group)
    if before.get("since") != after.get("since"):
        moved = f"the group was {before.get('phase')} when the probes began and is {after.get('phase')} since: what answered is not one group, run them again"
        module.fail_json(msg=moved, codes=["group-changed"], problems=[moved], results=[], seconds={})

    path = f"{FOLDER}/{group}.json"
    kept = {
        "version": 1,
        "group": group,
        "model": target.model,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "results": results,
    }
    _host.write(path, (json.dumps(kept, indent=1, allow_nan=False) + "\n").encode(), 0o600)
    shown = [{name: value for name, value in result.items() if name != "exchanges"} for result in results]
    faults = [(entry["name"], fault) for entry in results for fault in entry["faults"]]
    result: dict[str, Any] = {
        "changed": False,
        "results": shown,
        "problems": [f"{name}: {fault['sentence']}" for name, fault in faults],
        "codes": [fault["code"] for _name, fault in faults],
        "seconds": {entry["name"]: entry["seconds"] for entry in results if entry["verdict"] != "not probed"},
        "lines": _probes.lines(results),
        "evidence": path,
    }
    passed = {entry["name"]: entry["note"] for entry in results if entry["verdict"] == "passed"}
    result |= {"answer": passed["chat"]} if "chat" in passed else {}
    result |= {"token_ids": target.reference["token_ids"]} if "parity" in passed else {}
    if faults:
        module.fail_json(msg=f"{'; '.join(result['problems'])} (every request and reply: {path})", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
