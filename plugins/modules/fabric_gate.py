#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All-reduce over all ranks and over every pair, and whether a pass still holds."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_gate
short_description: Measure the fabric by all-reduces inside the serving image, or tell whether the last pass still holds
version_added: 0.1.0
description:
  - Runs one container per member, with the image, devices, limits and variables of the serving rank. They meet on the management plane and
    all-reduce over every pair and over all ranks, from 8 bytes to 256 MiB, by NCCL where the members have GPUs, else by Gloo over each leg.
  - All members must run it at the same time, so C(forks) must not be smaller than their number.
  - Where all values are right and every way reaches its mark the gate is passed. Else the message names the member, the cable or the leg that
    the slow ways have in common.
  - The head keeps what was measured in C(/var/lib/gb10/gate/GROUP.json).
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Nothing is measured then.
  diff_mode:
    support: full
    details:
      - Shows the bandwidth of every way, as it was and as it is.
  idempotent:
    support: none
    details:
      - Each call with O(state=measured) measures anew.
options:
  plan:
    description: The plan of the cluster.
    type: dict
    required: true
  member:
    description: This member's name in the plan.
    type: str
    required: true
  state:
    description:
      - V(measured) measures, and fails where the gate is not passed.
      - V(read) only reads what the head keeps; V(passed) fails where that is no pass that holds, unless the group runs, which proves its fabric
        by serving. On other members both say nothing.
    type: str
    choices: [measured, read, passed]
    default: measured
  max_age:
    description: Seconds for which a pass holds.
    type: int
    default: 604800
  largest:
    description: Bytes of the largest all-reduce; 8, 256, 8192, 262144, 8388608 and 268435456 are measured as far as this allows.
    type: int
    default: 268435456
  all_gb_per_s:
    description: Bus bandwidth in GB/s that all ranks together have to reach. Left out, the mark of the topology.
    type: float
  pair_gb_per_s:
    description: Bus bandwidth in GB/s that every pair has to reach. Left out, the mark of the topology.
    type: float
  leg_gb_per_s:
    description: Bus bandwidth in GB/s that every leg has to reach where Gloo measures legs one by one.
    type: float
  timeout:
    description: Seconds for all of it.
    type: int
    default: 600
  program:
    description: What runs in the container. The action plugin gives it, from C(runtime/gate/gb10_gate.py).
    type: str
seealso:
  - module: gb10.cluster.fabric_legs
  - module: gb10.cluster.cable_check
"""

EXAMPLES = r"""
- name: Measure the fabric
  gb10.cluster.fabric_gate:
    plan: "{{ plan }}"
    member: "{{ inventory_hostname }}"

- name: Refuse to go on without a pass that holds
  gb10.cluster.fabric_gate:
    plan: "{{ plan }}"
    member: "{{ inventory_hostname }}"
    state: passed
    max_age: 86400
"""

RETURN = r"""
verdict:
  description: Why there is no pass that holds, in one sentence; empty where there is one, and on other members than the head.
  returned: always
  type: str
running:
  description: Whether the group's rank runs on this member. Nothing is measured beside it.
  returned: always
  type: bool
summary:
  description: What was measured, one line per way.
  returned: on the head
  type: list
  elements: str
artefact:
  description: >-
    What was measured, on what and when - C(measurements) has each way with its rows of C(bytes), C(seconds), C(bus_gb_per_s) and C(wrong) -
    and C(problems), empty for a pass.
  returned: on the head, where something was measured
  type: dict
"""

import json
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _gate, _gate_pass, _host, _image, _units
from ..module_utils._engine import Engine

LAST_LINES = 5
"""Of a container that ended badly; enough for an exception's end."""


def read_artefact(path: Path) -> dict[str, Any] | None:
    """What the head keeps; None where there is nothing that can be read."""
    try:
        return json.loads(_host.read(path) or "null")
    except ValueError:
        return None


def run_rank(module: AnsibleModule, config: dict[str, Any]) -> tuple[_gate.Output, str, list[str]]:
    """This member's rank from start to end; its output, the image's id, and what its log says against the planned transport."""
    engine, reference = config["engine"], config["container"]["image"]
    try:
        image = Engine(engine).image(reference)
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    if image is None:
        module.fail_json(msg=_image.verdict(reference, image, None))
    plan, member, timeout = module.params["plan"], module.params["member"], module.params["timeout"]
    specification = _gate.spec(plan, member, module.params["largest"], timeout)
    remove = [engine, "rm", "--force", _gate.container_name(config["group"])]
    _host.run(remove)  # what a killed run left
    try:
        done = _host.run(_gate.argv(config, module.params["program"], specification), timeout=timeout + _gate.JOIN_S)
    finally:
        # The container outlives its client.
        _host.run(remove)
    output, log = _gate.parse(done.out), done.out + done.err
    against = _gate.transport_problems(plan, member, log)
    if done.status or (member == plan["cluster"]["head"] and output.result is None):
        where = f" at {output.at!r}" if output.at else ""
        lines = [line for line in log.splitlines() if line.strip() and not line.startswith(_gate.MARK)]
        sentences = [f"the gate ended on {member}{where}: {output.error or done.message}", *against]
        module.fail_json(msg="; ".join(sentences), log=lines[-LAST_LINES:])
    return output, image.id, against


def new_artefact(module: AnsibleModule, output: _gate.Output, image: str, against: list[str]) -> dict[str, Any]:
    """What was run, on what, when, and the values; the head's output has the result of all ranks."""
    plan, parameters = module.params["plan"], module.params
    said = output.result or {}
    measurements = _gate.measured(plan, said["result"])
    marks = _gate.marks(plan["cluster"]["topology"], len(plan["cluster"]["members"]), _gate.backend(plan))
    marks |= {kind: value for kind in ("all", "pair", "leg") if (value := parameters[f"{kind}_gb_per_s"]) is not None}
    head = plan["members"][plan["cluster"]["head"]]["rank_config"]
    return {
        "version": _gate_pass.VERSION,
        "group": plan["cluster"]["name"],
        "measured_at": round(time.time()),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "digest": _gate_pass.digest(plan),
        "plan": plan["cluster"]["digest"],
        "topology": plan["cluster"]["topology"],
        "members": plan["cluster"]["members"],
        "backend": _gate.backend(plan),
        "torch": said.get("torch", ""),
        "nccl": said.get("nccl", ""),
        "image": {"reference": head["container"]["image"], "id": image},
        "environment": _gate_pass.transport(head["container"]["environment"]),
        "marks_gb_per_s": marks,
        "measurements": measurements,
        "problems": against + _gate.judge(measurements, marks),
    }


def main() -> None:
    """Read, or measure and keep."""
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "member": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["measured", "read", "passed"], "default": "measured"},
            "max_age": {"type": "int", "default": 604800},
            "largest": {"type": "int", "default": 268435456},
            "all_gb_per_s": {"type": "float"},
            "pair_gb_per_s": {"type": "float"},
            "leg_gb_per_s": {"type": "float"},
            "timeout": {"type": "int", "default": 600},
            "program": {"type": "str"},
        },
        supports_check_mode=True,
    )
    plan, member, state = module.params["plan"], module.params["member"], module.params["state"]
    group, is_head = plan["cluster"]["name"], member == plan["cluster"]["head"]
    running = _units.read_rank_state(group).is_active
    path = Path(_gate.FOLDER) / f"{group}.json"
    kept = read_artefact(path) if is_head else None
    result: dict[str, Any] = {"changed": False, "verdict": "", "running": running}
    if is_head:
        result["verdict"] = _gate_pass.stale(kept, group, _gate_pass.digest(plan), time.time(), module.params["max_age"])
        result["summary"] = _gate.summary(kept)
    if state == "passed" and result["verdict"] and not running:
        module.fail_json(msg=result["verdict"], **result)
    if state != "measured" or module.check_mode:
        module.exit_json(**result | {"changed": state == "measured" and is_head}, **({"artefact": kept} if kept else {}))

    if running:
        module.fail_json(
            msg=f"group {group} runs on {member}, nothing can be measured beside it: stop it first (playbook gb10.cluster.stop)", **result
        )
    output, image, against = run_rank(module, plan["members"][member]["rank_config"])
    if not is_head:
        if against:
            module.fail_json(msg="; ".join(against), **result)
        module.exit_json(**result)
    artefact = new_artefact(module, output, image, against)
    _host.write(path, (json.dumps(artefact, indent=1) + "\n").encode())
    lines = _gate.summary(artefact)
    before, after = ("".join(f"{line}\n" for line in side) for side in (result["summary"], lines))
    result |= {"changed": True, "summary": lines, "verdict": "; ".join(artefact["problems"]), "artefact": artefact}
    result["diff"] = {"before_header": str(path), "after_header": str(path), "before": before, "after": after}
    if artefact["problems"]:
        module.fail_json(msg=f"{result['verdict']} (all values: {path})", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
