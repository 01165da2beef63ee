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
      - V(fabric) looks for the devices of the legs, for netplan, for networks of this member that overlap a leg, for the
        management interface, and for a kernel, driver and firmware that are known to work together.
      - V(service) looks for the ports that the rank will need, unless the rank runs.
      - Both this one and V(start) look for the head's certificate where the plan has TLS.
      - V(start) looks for what the rank would refuse at its start, as far as a running rank can be asked, that is image, C(config.json) and GIDs.
    type: str
    choices: [fabric, service, start]
    required: true
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)), for O(concern=fabric).
    type: list
    elements: dict
    default: []
  management:
    description: The member's place on the management plane (C(members.NAME.management)), for O(concern=fabric).
    type: dict
  unknown_platform:
    description:
      - What to do about a kernel, driver or firmware that no public report calls good, for O(concern=fabric).
      - One that is known to be broken is refused in any case.
    type: str
    choices: [accept, warn, refuse]
    default: warn
  config:
    description: The rank's configuration from the plan (C(members.NAME.rank_config)), for O(concern=service) and O(concern=start).
    type: dict
  tls_certificate:
    description: The head's certificate in PEM, where a new one is given, for O(concern=service) and O(concern=start).
    type: str
    default: ""
  tls_key:
    description: Its private key in PEM.
    type: str
    default: ""
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
  sysfs_root:
    description: Where the RDMA devices are read.
    type: path
    default: /sys
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
platform:
  description: Kernel, driver, firmware by HCA, and what else is known of the platform.
  returned: for O(concern=fabric)
  type: dict
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _image, _netplan, _networks, _platform, _roce, _sockets, _start, _units
from ..module_utils._engine import Engine
from ..module_utils._findings import REFUSE, Finding


def fabric_findings(legs: list[dict[str, Any]], management: Mapping[str, str] | None) -> list[Finding]:
    """What stands against the planned legs."""
    findings = []
    if not shutil.which("netplan"):
        findings.append(Finding(REFUSE, "no-netplan", "netplan is not installed: apt-get install netplan.io"))
    addresses, routes, rules = (
        _host.run(["ip", "-json", *words]).out for words in (["address"], ["-4", "route", "show", "table", "all"], ["-4", "rule"])
    )
    devices = _netplan.parse_addresses(addresses)
    if missing := [leg["netdev"] for leg in legs if leg["netdev"] not in devices]:
        cure = "check the ConnectX driver and /etc/nvidia/cx7-hotplug-enabled"
        findings.append(Finding(REFUSE, "no-leg-device", f"{', '.join(missing)} does not exist: {cure}"))
    if management:
        wireless = [management["interface"]] if _host.names(f"/sys/class/net/{management['interface']}/phy80211") else []
        findings += _networks.judge_management(management, addresses, wireless)
    return findings + _networks.judge_networks(legs, addresses, routes, rules)


def platform_findings(facts: Mapping[str, Any], unknown: str) -> list[Finding]:
    """What is known of this platform, with what is merely unknown as severe as the user wants it."""
    findings = _platform.judge_platform(facts)
    if unknown == "accept":
        return [finding for finding in findings if finding.severity == REFUSE]
    return [replace(finding, severity=REFUSE) for finding in findings] if unknown == "refuse" else findings


def service_problems(config: Mapping[str, Any], procfs_root: str) -> list[str]:
    """Ports of the head that something else holds. A running rank holds its own."""
    if config["rank"] or _units.read_rank_state(config["group"]).is_active:
        return []
    wanted = {config["coordination_port"]: "stop it", **_start.port_cures(config["api"]["port"], config["master_port"])}
    return _start.port_problems(wanted, _sockets.listeners(procfs_root))


def tls_problems(config: Mapping[str, Any], certificate: str, key: str) -> list[str]:
    """A certificate that is not there, or does not serve."""
    try:
        _units.tls_for(config, certificate, key)
    except ValueError as error:
        return [str(error)]
    return []


def start_problems(config: Mapping[str, Any], sysfs_root: str) -> list[str]:
    """What the supervisor of this rank would refuse, but for ports and memory, which a running rank holds itself."""
    engine, reference, start = config["engine"], config["container"]["image"], config["start"]
    try:
        image = Engine(engine).image(reference)
        problems = [_image.verdict(reference, image, None)]
    except _image.ImageError as error:
        problems = [str(error)]
    config_json = _host.read(f"{start['checkpoint']}/config.json")
    problems.append(_start.checkpoint_problem(start["checkpoint"], config_json, "", start["virtual_heads"], config["world_size"]))
    if config["container"]["devices"]:
        problems += _start.resolve_gids(_roce.read_hcas(sysfs_root), start["legs"]).problems
    return [problem for problem in problems if problem]


def main() -> None:
    """Look, report."""
    module = AnsibleModule(
        argument_spec={
            "concern": {"type": "str", "choices": ["fabric", "service", "start"], "required": True},
            "legs": {"type": "list", "elements": "dict", "default": []},
            "management": {"type": "dict"},
            "unknown_platform": {"type": "str", "choices": ["accept", "warn", "refuse"], "default": "warn"},
            "config": {"type": "dict"},
            "tls_certificate": {"type": "str", "default": ""},
            "tls_key": {"type": "str", "default": "", "no_log": True},
            "procfs_root": {"type": "path", "default": "/proc"},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        required_if=[("concern", "service", ("config",)), ("concern", "start", ("config",))],
        supports_check_mode=True,
    )
    parameters, more = module.params, {}
    if parameters["concern"] == "fabric":
        facts = _platform.read_platform(parameters["procfs_root"], parameters["sysfs_root"])
        findings = fabric_findings(parameters["legs"], parameters["management"]) + platform_findings(facts, parameters["unknown_platform"])
        problems, more = [finding.sentence for finding in findings if finding.severity == REFUSE], {"platform": facts}
        for finding in findings:
            if finding.severity != REFUSE:
                module.warn(finding.sentence)
    else:
        config, starts = parameters["config"], parameters["concern"] == "start"
        problems = start_problems(config, parameters["sysfs_root"]) if starts else service_problems(config, parameters["procfs_root"])
        problems += tls_problems(config, parameters["tls_certificate"], parameters["tls_key"])
    if problems:
        module.fail_json(msg="; ".join(problems), problems=problems, **more)
    module.exit_json(changed=False, problems=[], **more)


if __name__ == "__main__":
    main()
