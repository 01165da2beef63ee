#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a member's GPU is as fast as it should be."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_probe
short_description: Measure this member's GPU for slow states that nvidia-smi does not show
version_added: 0.1.0
description:
  - Runs a probe in one container, with the image, devices and variables of the serving rank, and judges its series. A latched clock and the hidden
    slow state are told apart, each with its cure.
  - Nothing is measured while the group runs, nor where the rank has no GPU.
  - Keeps the series in C(/var/lib/gb10/gate/GROUP-gpu.json).
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Nothing is measured then.
  diff_mode:
    support: N/A
    details:
      - What it writes is a measurement.
  idempotent:
    support: none
    details:
      - Each call measures anew.
options:
  config:
    description: The rank's configuration from the plan (C(members.NAME.rank_config)).
    type: dict
    required: true
  program:
    description: The text of what runs in the container (C(runtime/gate/gb10_gpu.py)).
    type: str
    required: true
  seconds:
    description: Seconds of each series; the burn takes half as long again.
    type: int
    default: 10
seealso:
  - module: gb10.cluster.fabric_gate
"""

EXAMPLES = r"""
- name: Measure the GPU
  gb10.cluster.gpu_probe:
    config: "{{ plan.members[inventory_hostname].rank_config }}"
    program: "{{ lookup('ansible.builtin.file', 'runtime/gate/gb10_gpu.py') }}"
"""

RETURN = r"""
series:
  description: What was measured, one value a second, by kind.
  returned: where something was measured
  type: dict
problems:
  description: What is wrong with the GPU, one sentence each.
  returned: always
  type: list
  elements: str
"""

import json
import time
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _gate, _gpu, _host, _units
from ..module_utils._findings import REFUSE

SERIES = 6
"""Of the probe, with the longer burn counted as two."""
START_S = 300
"""For the image to start and PyTorch to load."""


def main() -> None:
    """Measure, judge, keep."""
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "dict", "required": True},
            "program": {"type": "str", "required": True},
            "seconds": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    config, seconds = module.params["config"], module.params["seconds"]
    if module.check_mode or not config["container"]["gpus"] or _units.read_rank_state(config["group"]).is_active:
        module.exit_json(changed=False, problems=[])
    remove = [config["engine"], "rm", "--force", _gate.container_name(config["group"])]
    _host.run(remove)  # what a killed run left
    try:
        specification = {"seconds": seconds, "burn_seconds": seconds * 3 // 2}
        done = _host.run(_gate.argv(config, module.params["program"], specification), timeout=SERIES * seconds + START_S)
    finally:
        _host.run(remove)  # the container outlives its client
    series = _gpu.parse_series(done.out)
    findings = _gpu.judge_gpu(series)
    problems = [finding.sentence for finding in findings]
    if done.status and not series:
        module.fail_json(msg=f"the GPU probe did not run ({done.message}): see that the image starts with its GPU", problems=problems)
    artefact = {
        "group": config["group"],
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "image": config["container"]["image"],
        "series": series,
        "findings": [asdict(finding) for finding in findings],
    }
    _host.write(f"{_gate.FOLDER}/{config['group']}-gpu.json", (json.dumps(artefact, indent=1) + "\n").encode())
    if any(finding.severity == REFUSE for finding in findings):
        module.fail_json(msg="; ".join(problems), problems=problems, series=series)
    for sentence in problems:
        module.warn(sentence)
    module.exit_json(changed=True, problems=problems, series=series)


if __name__ == "__main__":
    main()
