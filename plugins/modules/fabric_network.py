#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The legs of a member, addressed by netplan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_network
short_description: Address this member's legs by netplan
version_added: 0.1.0
description:
  - Writes one netplan file for the legs, has netplan validate it together with the member's other files in a scratch directory, applies it, and looks
    whether every leg then has its address and MTU. Where it has not, the previous bytes are put back and applied.
  - Applies as well when the file is right but the live legs are not. Touches no other interface.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)).
    type: list
    elements: dict
    default: []
  mtu:
    description: MTU of every leg.
    type: int
    default: 9000
  renderer:
    description: Netplan renderer for the legs; empty leaves it to the member's other netplan files.
    type: str
    choices: ["", networkd, NetworkManager]
    default: ""
  group:
    description: Name of the group that uses the legs. While it runs, nothing is applied.
    type: str
  allow_disruption:
    description: Apply even while the group runs, which ends it.
    type: bool
    default: false
  state:
    description: V(absent) removes the file and the legs' addresses.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Address the legs
  gb10.cluster.fabric_network:
    legs: "{{ plan.members[inventory_hostname].legs }}"
    mtu: "{{ plan.fabric.mtu }}"
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
"""

import shutil
import tempfile
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _netplan, _units
from ..module_utils._files import FileSet, ManagedFile

APPLY_TIMEOUT_S = 120
SETTLE_S = 15
"""networkd sets addresses within a second; NetworkManager may take several."""


def devices() -> dict[str, _netplan.Netdev]:
    """The live devices."""
    return _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)


def refusal(content: str) -> str | None:
    """What netplan says against the file among the member's others; None when it accepts it."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "etc/netplan"
        if Path("/etc/netplan").is_dir():
            shutil.copytree("/etc/netplan", target)
        _host.write(target / Path(_netplan.NETPLAN_FILE).name, content.encode(), _netplan.NETPLAN_MODE)
        done = _host.run(["netplan", "generate", "--root-dir", scratch])
    return done.message if done.status else None


def main() -> None:
    """Compare, validate, apply, look; undo when the look is bad."""
    module = AnsibleModule(
        argument_spec={
            "legs": {"type": "list", "elements": "dict", "default": []},
            "mtu": {"type": "int", "default": 9000},
            "renderer": {"type": "str", "choices": ["", "networkd", "NetworkManager"], "default": ""},
            "group": {"type": "str"},
            "allow_disruption": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    legs, mtu, group = module.params["legs"], module.params["mtu"], module.params["group"]
    present = module.params["state"] == "present"
    content = _netplan.netplan_file(legs, mtu, module.params["renderer"])
    files = FileSet("fabric-network", [ManagedFile(_netplan.NETPLAN_FILE, content.encode(), _netplan.NETPLAN_MODE)] if present else [])
    differences = _netplan.leg_differences(legs, mtu, devices()) if present else []
    if missing := [sentence for sentence in differences if sentence.endswith("does not exist")]:
        module.fail_json(
            msg=f"{', '.join(missing)}: check the device names, the ConnectX driver and /etc/nvidia/cx7-hotplug-enabled on this member"
        )
    actions = [f"{'write' if change.after else 'remove'} {change.path}" for change in files.changes]
    if files.changes or differences:
        actions.append("apply netplan" + (f" ({'; '.join(differences)})" if differences else ""))
    diff = [change.diff() for change in files.changes]
    if not actions:
        module.exit_json(changed=False, actions=[], diff=[])

    if present and (said := refusal(content)):
        module.fail_json(msg=f"netplan refuses the legs ({said}): correct the files in /etc/netplan of this member")
    if group and _units.read_rank_state(group).holds_group:
        actions[-1] += ", which ends the running group"
        if not module.params["allow_disruption"] and not module.check_mode:
            module.fail_json(
                msg=f"group {group} runs, and changing its legs ends it: stop it first (playbook gb10.cluster.stop) or set cluster_allow_disruption=true"
            )
    if module.check_mode:
        module.exit_json(changed=True, actions=actions, diff=diff)

    files.apply()
    done = _host.run(["netplan", "apply"], timeout=APPLY_TIMEOUT_S)
    trouble = [done.message] if done.status else settled(legs, mtu) if present else []
    if trouble:
        files.restore()
        _host.run(["netplan", "apply"], timeout=APPLY_TIMEOUT_S)
        module.fail_json(
            msg=f"after netplan apply {'; '.join(trouble)}, so the previous files are back: look at journalctl -u systemd-networkd",
            diff=diff,
        )
    if not present:
        for leg in legs:
            _host.run(["ip", "-4", "address", "flush", "dev", leg["netdev"]])
    module.exit_json(changed=True, actions=actions, diff=diff)


def settled(legs: list[dict[str, object]], mtu: int) -> list[str]:
    """Differences that are left once the renderer has had its time."""
    deadline = time.monotonic() + SETTLE_S
    while (differences := _netplan.leg_differences(legs, mtu, devices())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return differences


if __name__ == "__main__":
    main()
