#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The legs of a member, addressed by netplan, in two phases."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_network
short_description: Address this member's legs by netplan, with a way back that needs nobody
version_added: 0.1.0
description:
  - Writes one netplan file for the legs, takes their entries out of the member's other netplan files, and has netplan render all of it in a scratch
    directory. What it renders is judged, so that a wildcard, a bond or a second address on a leg is refused before anything changes.
  - Then arms a way back on the member itself, applies, and looks whether the legs are as planned and every other device still has its addresses.
    Where not, the previous files are back at once.
  - A change that stands there is only pending. Unless a second call with O(state=confirmed) comes within O(revert_after) seconds, the member
    puts the previous files back by itself. That holds when Ansible's connection is lost, when the controller is killed and when the
    member reboots in between. Prove the legs of all members before confirming.
  - Where another netplan file is edited, its bytes are kept; O(state=absent) gives them back exactly.
  - Applies as well when the files are right but the live legs are not. Touches no other interface.
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
    description: Netplan renderer of the legs; empty leaves it to the member's other netplan files.
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
  revert_after:
    description: Seconds from the application to the way back, unless the change is confirmed.
    type: int
    default: 120
  change:
    description: The pending change, as RV(change) named it, for O(state=confirmed) and O(state=reverted).
    type: str
  state:
    description:
      - V(present) addresses the legs and V(absent) removes that, both as a pending change.
      - V(confirmed) keeps the pending change; V(reverted) goes the way back now.
    type: str
    choices: [present, absent, confirmed, reverted]
    default: present
"""

EXAMPLES = r"""
- name: Address the legs
  gb10.cluster.fabric_network:
    legs: "{{ plan.members[inventory_hostname].legs }}"
    mtu: "{{ plan.fabric.mtu }}"
  register: legs

- name: Keep them, once every member has proven its own
  gb10.cluster.fabric_network:
    state: confirmed
    change: "{{ legs.change }}"
  when: legs.change
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
change:
  description: Name of the change that waits for its confirmation; empty where none does.
  returned: always
  type: str
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _netplan, _rollback, _units
from ..module_utils._files import Borrowed, Change, FileSet, ManagedFile

OWNER = "fabric-network"
NETPLAN_FOLDERS = ("etc/netplan", "run/netplan", "lib/netplan")
"""netplan-generate(8): where it reads. Only the first is edited, the others are made by programs."""
RENDERED = ("run/systemd/network/*.network", "run/NetworkManager/system-connections/*.nmconnection")
FOREIGN = ("etc/systemd/network/*.network", "etc/NetworkManager/system-connections/*.nmconnection")
APPLY_TIMEOUT_S = 120
SETTLE_S = 30
"""NetworkManager takes the management address away for a second or more when netplan is applied (FujitsuPolycom/sparkring issue 168)."""


def devices() -> dict[str, _netplan.Netdev]:
    """The live devices."""
    return _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)


def wanted_files(parameters: dict[str, Any]) -> list[ManagedFile]:
    """The files of our own."""
    legs = parameters["legs"]
    content = _netplan.netplan_file(legs, parameters["mtu"], parameters["renderer"])
    files = [ManagedFile(_netplan.NETPLAN_FILE, content.encode(), _netplan.NETPLAN_MODE)]
    if Path(_netplan.NETWORK_MANAGER_FILE).parent.is_dir():
        files.append(ManagedFile(_netplan.NETWORK_MANAGER_FILE, _netplan.network_manager_file([leg["netdev"] for leg in legs]).encode()))
    return files


def without_legs(legs: list[dict[str, Any]]) -> dict[str, bytes]:
    """The member's other netplan files as they are to be: path -> content without an entry of a leg.

    Files that NetworkManager keeps itself (90-NM-UUID.yaml) are its own: it would write them again.
    """
    netdevs = {leg["netdev"] for leg in legs}
    paths = [path for path in sorted(Path("/etc/netplan").glob("*.yaml")) if not path.name.startswith("90-NM-")]
    texts = {str(path): path.read_bytes().decode("utf-8", "surrogateescape") for path in paths if str(path) != _netplan.NETPLAN_FILE}
    return {path: _netplan.without_devices(text, netdevs).encode("utf-8", "surrogateescape") for path, text in texts.items()}


def refusal(changes: list[Change], legs: list[dict[str, Any]]) -> str | None:
    """What stands against the member's netplan files as they would be, by netplan's own reading; None when nothing does."""
    with tempfile.TemporaryDirectory() as scratch:
        for folder in NETPLAN_FOLDERS:
            if Path("/", folder).is_dir():
                shutil.copytree(Path("/", folder), Path(scratch) / folder)
        for change in changes:
            path = Path(scratch) / change.path.lstrip("/")
            if change.after:
                _host.write(path, change.after.content, change.after.mode)
            else:
                path.unlink(missing_ok=True)
        done = _host.run(["netplan", "generate", "--root-dir", scratch])
        if done.status:
            said = next((line for line in done.err.splitlines() if "rror" in line), done.message).replace(scratch, "").strip()
            return f"netplan refuses the files ({said}): correct those in /etc/netplan of this member"
        rendered = {f"/{path.relative_to(scratch)}": path for pattern in RENDERED for path in Path(scratch).glob(pattern)}
        rendered |= {str(path): path for pattern in FOREIGN for path in Path("/").glob(pattern)}
        texts = {name: _host.read(path) or "" for name, path in rendered.items()}
    macs = {name: device.mac for name, device in devices().items()}
    if problems := _netplan.rendered_problems(texts, legs, macs):
        return f"{'; '.join(problems)}: take that off the legs in /etc/netplan (one of NetworkManager's own: nmcli connection delete) and run again"
    return None


def settled(parameters: dict[str, Any], before: dict[str, _netplan.Netdev]) -> list[str]:
    """What is still wrong once the renderer has had its time."""
    legs, present = parameters["legs"], parameters["state"] == "present"
    netdevs = [leg["netdev"] for leg in legs]
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = devices()
        wrong = _netplan.lost_addresses(before, now, netdevs)
        wrong += _netplan.leg_differences(legs, parameters["mtu"], now) if present else []
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(0.2)


class Network:
    """One run of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.parameters = module, module.params
        self.legs, self.present = module.params["legs"], module.params["state"] == "present"
        self.before = devices()

    def fail(self, sentence: str, **more: Any) -> NoReturn:
        self.module.fail_json(msg=sentence, **more)
        raise AssertionError

    def exit(self, actions: list[str], diff: list[dict[str, str]], change: str = "") -> NoReturn:
        self.module.exit_json(changed=bool(actions), actions=actions, diff=diff, change=change)
        raise AssertionError

    def end(self) -> None:
        """The second phase: keep what is pending, or go back."""
        name, confirmed = self.parameters["change"], self.parameters["state"] == "confirmed"
        waits = _rollback.pending() == name
        if self.module.check_mode or (not waits and not confirmed):
            self.exit(["keep the change of the network" if confirmed else "put the previous network back"] if waits else [], [])
        if not confirmed:
            _rollback.undo()
        elif not _rollback.confirm(name):
            self.fail("the change of the network was not confirmed in time, so this member has its previous network again: run again")
        self.exit(["kept the change of the network" if confirmed else "put the previous network back"], [])

    def begin(self) -> None:
        """The first phase: compare, judge, arm the way back, apply, look."""
        legs, netdevs = self.legs, [leg["netdev"] for leg in self.legs]
        files = FileSet(OWNER, wanted_files(self.parameters) if self.present else [])
        borrowed = Borrowed(OWNER)
        edits = borrowed.edits(without_legs(legs)) if self.present else borrowed.returns()
        differences = _netplan.leg_differences(legs, self.parameters["mtu"], self.before) if self.present else []
        if missing := [sentence for sentence in differences if sentence.endswith("does not exist")]:
            self.fail(
                f"{', '.join(missing)}: check the device names, the ConnectX driver and /etc/nvidia/cx7-hotplug-enabled on this member"
            )

        actions = [f"{'write' if change.after else 'remove'} {change.path}" for change in files.changes]
        actions += [f"{'take the legs out of' if self.present else 'give back'} {change.path}" for change in edits]
        if actions or differences:
            actions.append("apply netplan" + (f" ({'; '.join(differences)})" if differences else ""))
        elif _rollback.pending():
            actions.append("go on with the change of an earlier run, which was not confirmed")
        changes = [*files.changes, *edits]
        diff = [{side: _netplan.redacted(text) for side, text in change.diff().items()} for change in changes]
        if not actions:
            self.exit([], [])

        if not self.present and (strangers := borrowed.strangers()):
            kept = ", ".join(f"{path} (kept: {copy})" for path, copy in strangers.items())
            self.fail(
                f"{kept} was changed since the legs were taken out of it: put the wanted text into both, or remove both, and run again"
            )
        if said := refusal(changes, legs if self.present else []):
            self.fail(said, diff=diff)
        self.look_at_group(actions)
        if self.module.check_mode:
            self.exit(actions, diff)

        name = self.arm([*files.paths(), *borrowed.paths(edits)], netdevs)
        try:
            files.apply()
            (borrowed.edit if self.present else borrowed.give_back)(edits)
        except OSError as error:
            self.revert(f"{error.filename} cannot be written ({error.strerror})", diff)
        if changes or differences:
            if not self.present:
                for netdev in netdevs:
                    _host.run(["ip", "-4", "address", "flush", "dev", netdev])
            done = _host.run(["netplan", "apply"], timeout=APPLY_TIMEOUT_S)
            if trouble := [f"netplan apply failed ({done.message})"] if done.status else settled(self.parameters, self.before):
                self.revert(f"after netplan apply {'; '.join(trouble)}", diff)
        self.exit(actions, diff, name)

    def look_at_group(self, actions: list[str]) -> None:
        """Refuse while the group runs, unless that is allowed."""
        group = self.parameters["group"]
        if group and _units.read_rank_state(group).holds_group:
            actions[-1] += ", which ends the running group"
            if not self.parameters["allow_disruption"] and not self.module.check_mode:
                self.fail(
                    f"group {group} runs, and changing its legs ends it: stop it first (playbook gb10.cluster.stop) or set cluster_allow_disruption=true"
                )

    def arm(self, paths: list[str], netdevs: list[str]) -> str:
        try:
            return _rollback.begin(paths, *_netplan.way_back(self.before, netdevs), seconds=self.parameters["revert_after"])
        except OSError as error:
            self.fail(f"the way back cannot be armed ({error}), so nothing was changed: make {_rollback.STORE} writable and run again")

    def revert(self, trouble: str, diff: list[dict[str, str]]) -> NoReturn:
        _rollback.undo()
        self.fail(f"{trouble}, so the previous files are back: look at journalctl -u systemd-networkd -u NetworkManager", diff=diff)


def main() -> None:
    """Run the phase that is asked for."""
    module = AnsibleModule(
        argument_spec={
            "legs": {"type": "list", "elements": "dict", "default": []},
            "mtu": {"type": "int", "default": 9000},
            "renderer": {"type": "str", "choices": ["", "networkd", "NetworkManager"], "default": ""},
            "group": {"type": "str"},
            "allow_disruption": {"type": "bool", "default": False},
            "revert_after": {"type": "int", "default": 120},
            "change": {"type": "str"},
            "state": {"type": "str", "choices": ["present", "absent", "confirmed", "reverted"], "default": "present"},
        },
        required_if=[("state", "confirmed", ("change",)), ("state", "reverted", ("change",))],
        supports_check_mode=True,
    )
    if not module.check_mode:
        _rollback.settle()
    network = Network(module)
    if module.params["state"] in ("confirmed", "reverted"):
        network.end()
    else:
        network.begin()


if __name__ == "__main__":
    main()
