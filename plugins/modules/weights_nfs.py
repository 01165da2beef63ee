#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint that members read from the head's disk."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_nfs
short_description: Export a checkpoint to members by NFS, or mount it there
version_added: 0.1.0
description:
  - For members whose disks cannot hold a copy. The head exports the directory read-only to the addresses that are named and to nobody else; the
    members mount it with NFS 4.2 over a leg, at each boot.
  - Other exports of the head, and other mounts, are not touched. The identity of the exported file system stays the same.
  - A local directory with files is never hidden by a mount, and a mount of somebody else's is never taken down.
  - What the head refuses is said before anything changes on the member.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
requirements:
  - nfs-kernel-server on the head, nfs-common on the members
options:
  name:
    description: The checkpoint's name.
    type: str
    required: true
  path:
    description: The directory, on the head that which is exported, on a member where it is mounted.
    type: path
    required: true
  state:
    description: V(exported) is for the head, V(mounted) for a member; V(absent) undoes either.
    type: str
    choices: [exported, mounted, absent]
    required: true
  clients:
    description: Addresses of the members on their legs, for O(state=exported).
    type: list
    elements: str
    default: []
  server:
    description: The head's address on the leg, for O(state=mounted).
    type: str
  source:
    description: The directory on the head, for O(state=mounted); O(path) unless given.
    type: path
seealso:
  - module: gb10.cluster.weights_replica
"""

EXAMPLES = r"""
- name: Export the checkpoint to t2
  gb10.cluster.weights_nfs:
    name: smollm2-135m-instruct
    path: /var/lib/gb10/models/smollm2-135m-instruct
    state: exported
    clients: [10.10.0.2]

- name: Mount it
  gb10.cluster.weights_nfs:
    name: smollm2-135m-instruct
    path: /var/lib/gb10/models/smollm2-135m-instruct
    state: mounted
    server: 10.10.0.1
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
"""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _nfs, _replica
from ..module_utils._files import FileSet, ManagedFile

TIMEOUT_S = 120
PACKAGES = {"exportfs": "nfs-kernel-server", "mount.nfs4": "nfs-common"}


class Member:
    """This member: what it does is listed, and done unless it is a check run."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self.actions: list[str] = []

    def need(self, program: str) -> None:
        """Fail where a program is missing."""
        if not self._module.get_bin_path(program, opt_dirs=["/sbin", "/usr/sbin"]):
            self._module.fail_json(msg=f"{program} is missing on this member: install it (apt-get install {PACKAGES[program]})")

    def do(self, action: str, *argv: str) -> None:
        """Run a command that changes something."""
        self.actions.append(action)
        if self._module.check_mode:
            return
        done = _host.run(argv, timeout=TIMEOUT_S)
        if done.status:
            self._module.fail_json(msg=f"{' '.join(argv)} failed ({done.message}): run it on this member to see more", actions=self.actions)

    def write(self, files: FileSet) -> None:
        """Bring the files to what they should be."""
        self.actions += [f"{'write' if change.after else 'remove'} {change.path}" for change in files.changes]
        if files.changes and not self._module.check_mode:
            files.apply()


def is_active(unit: str) -> bool:
    """Whether systemd has the unit up."""
    return _host.run(["systemctl", "is-active", unit]).out.strip() == "active"


def is_enabled(unit: str) -> bool:
    """Whether it comes with the next boot."""
    return _host.run(["systemctl", "is-enabled", unit]).out.strip() == "enabled"


def unit_of(path: str) -> str:
    """The name that systemd wants for the mount of a path."""
    return _host.run(["systemd-escape", "--path", "--suffix=mount", path]).out.strip()


def export(module: AnsibleModule, member: Member, files: FileSet, wanted: list[str], before: str) -> None:
    """Make exactly the wanted clients' exports of this directory live."""
    path = module.params["path"]
    if wanted:
        member.need("exportfs")
        mountinfo = _host.read("/proc/self/mountinfo") or ""
        sentence = _nfs.refusal(path, wanted, _nfs.filesystem_of(os.path.realpath(path), mountinfo))
        if not sentence and not Path(path).is_dir():
            sentence = f"{path} does not exist on this member: bring the checkpoint here first"
        if sentence:
            module.fail_json(msg=sentence)
    member.write(files)
    if wanted and not is_active("nfs-server"):
        # It reads the file that was just written.
        member.do("start nfs-server", "systemctl", "start", "nfs-server")
    if wanted and not is_enabled("nfs-server"):
        member.do("enable nfs-server", "systemctl", "enable", "nfs-server")
    live = _nfs.parse_exports(_host.run(["exportfs", "-s"]).out)
    for client in wanted:
        if not any(_nfs.is_live(export, path, client) for export in live):
            member.do(f"export {path} to {client}", "exportfs", "-o", _nfs.export_options(path), f"{client}:{path}")
    for client in sorted(set(_nfs.clients_of(before)) - set(wanted)):
        if any((export.path, export.client) == (path, client) for export in live):
            member.do(f"no longer export {path} to {client}", "exportfs", "-u", f"{client}:{path}")


def mount(module: AnsibleModule, member: Member, files: FileSet, unit: str) -> None:
    """Mount it now and at each boot; what the head refuses is known before anything changes."""
    path, server = module.params["path"], module.params["server"]
    source = module.params["source"] or path
    member.need("mount.nfs4")
    # Not the path itself: to look at a mount whose head is gone is to wait for the head.
    point = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    live = _nfs.mount_at(point, _host.read("/proc/self/mountinfo") or "")
    if live is None and any(not name.startswith(".") for name in _host.names(path)):
        module.fail_json(msg=f"{path} has files of its own, which a mount would hide: remove them, or copy by rsync instead of NFS")
    if live and not os.path.exists(f"/etc/systemd/system/{unit}"):
        module.fail_json(
            msg=f"{path} is a mount of {live.source} ({live.kind}) that this collection did not make: unmount it, or copy by rsync instead of NFS"
        )
    if not files.changes and _nfs.is_as_wanted(live, server, source):
        if not is_enabled(unit):
            member.do(f"enable {unit}", "systemctl", "enable", unit)
        return
    if not module.check_mode:
        with tempfile.TemporaryDirectory() as directory:
            done = _host.run(_nfs.trial_argv(server, source, directory), timeout=TIMEOUT_S)
        if done.status:
            module.fail_json(msg=_nfs.trial_refusal(server, source, done.message.replace(f" on {directory}", "")))
    if live:
        member.do(f"unmount {path}", "systemctl", "stop", unit)
    if files.changes:
        member.write(files)
        member.do("reload systemd", "systemctl", "daemon-reload")
    if not is_enabled(unit):
        member.do(f"enable {unit}", "systemctl", "enable", unit)
    member.do(f"mount {path}", "systemctl", "start", unit)


def main() -> None:
    """Compare, then act."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["exported", "mounted", "absent"], "required": True},
            "clients": {"type": "list", "elements": "str", "default": []},
            "server": {"type": "str"},
            "source": {"type": "path"},
        },
        required_if=[("state", "mounted", ("server",))],
        supports_check_mode=True,
    )
    parameters = module.params
    name, path, state = parameters["name"], parameters["path"], parameters["state"]
    if not _replica.is_name(name):
        module.fail_json(msg=f"{name!r} cannot name a checkpoint: use letters, digits, dots, dashes and underscores")
    member, unit = Member(module), unit_of(path)
    exports = _nfs.exports_path(name)
    before = _host.read(exports) or ""
    wanted = []
    if state == "exported":
        if not parameters["clients"]:
            module.fail_json(msg=_nfs.refusal(path, [], ""))
        wanted = [ManagedFile(exports, _nfs.exports_text(path, parameters["clients"]).encode())]
    if state == "mounted":
        content = _nfs.mount_unit(name, parameters["server"], parameters["source"] or path, path)
        wanted = [ManagedFile(f"/etc/systemd/system/{unit}", content.encode())]
    files = FileSet(f"nfs-{name}", wanted)
    diff = [change.diff() for change in files.changes]
    if state == "mounted":
        mount(module, member, files, unit)
    elif state == "exported":
        export(module, member, files, sorted(set(parameters["clients"])), before)
    else:
        if any(change.path.endswith(unit) for change in files.changes):
            member.do(f"unmount {path}", "systemctl", "disable", "--now", unit)
        export(module, member, files, [], before)
    module.exit_json(changed=bool(member.actions), actions=member.actions, diff=diff)


if __name__ == "__main__":
    main()
