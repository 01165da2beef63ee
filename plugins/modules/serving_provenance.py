#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a member's rank really runs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_provenance
short_description: Read from the live processes what a member's rank really runs
version_added: 0.1.0
description:
  - Image, arguments, environment, checkpoint, kernel, driver and NCCL, as the running processes have them. Of the variables only hashes are given,
    and of those that look like secrets nothing.
  - Also what the member last measured of its fabric (head) and its GPU.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE, gb10.cluster._attributes.ENGINE]
options:
  group:
    description: Name of the group.
    type: str
    required: true
  checkpoint:
    description: Name of the checkpoint (C(storage.checkpoint) of the plan), by which its verified hashes are found.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Read what runs
  gb10.cluster.serving_provenance:
    group: lab
    engine: podman
    checkpoint: smollm2-135m-instruct
"""

RETURN = r"""
provenance:
  description: C(image), C(arguments), C(environment) (hash by name), C(checkpoint), C(kernel), C(driver), C(nccl); empty where not known.
  returned: always
  type: dict
gpu:
  description: What M(gb10.cluster.gpu_probe) kept of this member's GPU - C(utc) and C(findings) - or an empty mapping.
  returned: always
  type: dict
"""

import json

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _gate, _host, _provenance


def main() -> None:
    """Read, report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "checkpoint": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    group = module.params["group"]
    try:
        kept = json.loads(_host.read(f"{_gate.FOLDER}/{group}-gpu.json") or "{}")
    except ValueError:
        kept = {}
    provenance = _provenance.read(module.params["engine"], group, module.params["checkpoint"])
    module.exit_json(changed=False, provenance=provenance, gpu={name: kept[name] for name in ("utc", "findings") if name in kept})


if __name__ == "__main__":
    main()
