#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a member can take its part of the plan, found out before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Hold a plan against what a member already has
version_added: 0.1.0
description:
  - Looks for what would make a role fail half-way, before any role changes anything. All that is wrong is reported at once.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  concern:
    description:
      - V(fabric) looks for the devices of the legs, for netplan, and for networks of this member that overlap a leg.
      - V(service) looks for the ports that the rank will need, unless the rank runs.
    type: str
    choices: [fabric, service]
    required: true
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)), for O(concern=fabric).
    type: list
    elements: dict
    default: []
  config:
    description: The rank's configuration from the plan (C(members.NAME.rank_config)), for O(concern=service).
    type: dict
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Look before the legs are addressed
  gb10.cluster.preflight:
    concern: fabric
    legs: "{{ plan.members[inventory_hostname].legs }}"
"""

RETURN = r"""
problems:
  description: What is wrong, one sentence each.
  returned: always
  type: list
  elements: str
"""

import shutil
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _netplan, _sockets, _topology, _units


def fabric_problems(legs: list[dict[str, Any]]) -> list[str]:
    """What stands against the planned legs."""
    problems = []
    if not shutil.which("netplan"):
        problems.append("netplan is not installed: apt-get install netplan.io")
    devices = _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)
    if missing := [leg["netdev"] for leg in legs if leg["netdev"] not in devices]:
        problems.append(f"{', '.join(missing)} does not exist: check the ConnectX driver and /etc/nvidia/cx7-hotplug-enabled")
    routes = _host.run(["ip", "-json", "-4", "route", "show", "table", "all"]).out
    return problems + _topology.overlaps(legs, _netplan.used_networks(devices, routes))


def service_problems(config: Mapping[str, Any], procfs_root: str) -> list[str]:
    """Ports of the head that something else holds. A running rank holds its own."""
    if config["rank"] or _units.read_rank_state(config["group"]).is_active:
        return []
    held = _sockets.listeners(procfs_root)
    cures = {
        config["api"]["port"]: "stop it or choose another cluster_api_port",
        config["coordination_port"]: "stop it",
        config["master_port"]: "stop it or choose another engine.master_port in the profile",
    }
    return [f"port {port} is in use by {held[port]}: {cure}" for port, cure in cures.items() if port in held]


def main() -> None:
    """Look, report."""
    module = AnsibleModule(
        argument_spec={
            "concern": {"type": "str", "choices": ["fabric", "service"], "required": True},
            "legs": {"type": "list", "elements": "dict", "default": []},
            "config": {"type": "dict"},
            "procfs_root": {"type": "path", "default": "/proc"},
        },
        required_if=[("concern", "service", ("config",))],
        supports_check_mode=True,
    )
    if module.params["concern"] == "fabric":
        problems = fabric_problems(module.params["legs"])
    else:
        problems = service_problems(module.params["config"], module.params["procfs_root"])
    if problems:
        module.fail_json(msg="; ".join(problems), problems=problems)
    module.exit_json(changed=False, problems=[])


if __name__ == "__main__":
    main()
