#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Old checkpoints: which there are, and giving their room back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_reclaim
short_description: List the checkpoints of a member and remove old ones
version_added: 0.1.0
description:
  - Lists the directories below the storage root with their size and who uses them, and removes those that nobody uses, but for the newest.
  - In use is what O(in_use) names, what a group on this member is configured to mount whether it runs or not, what its generation before that mounted
    (M(gb10.cluster.generation)), what a process has mounted for itself, as any container has, what NFS exports, and what is a filesystem of its own.
  - Removed is only what M(gb10.cluster.checkpoint_verify) has once verified on this member. Other directories are the owner's and are let be.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  root:
    description: The storage root, whose directories are checkpoints.
    type: path
    required: true
  in_use:
    description: Names of directories below the root that stay whatever their age.
    type: list
    elements: str
    default: []
  keep:
    description: How many checkpoints that nobody uses stay, the newest. Left out, all stay and are only listed.
    type: int
seealso:
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Keep the running checkpoint and the one before it
  gb10.cluster.checkpoint_reclaim:
    root: /var/lib/gb10/models
    in_use: [deepseek-v4.1-flash-exl3-3.5bpw]
    keep: 1
"""

RETURN = r"""
checkpoints:
  description: Every directory below the root.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Its name.
      type: str
    size:
      description: Bytes that would come back; files that are linked from elsewhere give none.
      type: int
    use:
      description: Why it stays, empty where it may go.
      type: str
removed:
  description: Names of the directories that were removed, or would be in check mode.
  returned: success
  type: list
  elements: str
freed:
  description: Their bytes.
  returned: success
  type: int
"""

import json
import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _generation, _host, _reclaim
from ..module_utils._reclaim import Candidate, Mount
from ..module_utils._survey import STAMPS

GROUPS = Path("/etc/gb10")
GENERATIONS = Path(_generation.FOLDER)
EXPORTS = Path("/var/lib/nfs/etab")
PROC = Path("/proc")


def mounts() -> tuple[list[Mount], list[Mount]]:
    """The mounts of this process, and those that only others have, each mount namespace once."""
    own_namespace = os.readlink(PROC / "self/ns/mnt")
    others: dict[str, list[Mount]] = {}
    for process in PROC.iterdir():
        try:
            namespace = os.readlink(process / "ns/mnt") if process.name.isdecimal() else own_namespace
        except OSError:
            continue  # it has ended
        if namespace != own_namespace and namespace not in others:
            others[namespace] = _reclaim.parse_mountinfo(_host.read(process / "mountinfo") or "")
    own = _reclaim.parse_mountinfo(_host.read(PROC / "self/mountinfo") or "")
    # A mount of a whole filesystem in another namespace, as a new namespace inherits them, is nobody's use of a directory in it.
    return own, [mount for mounted in others.values() for mount in mounted if mount.root != "/"]


def weigh(directory: Path) -> tuple[int, float]:
    """Bytes that only this directory holds, and the time of its newest file."""
    size, newest = 0, directory.lstat().st_mtime
    for folder, _folders, files in os.walk(directory):
        for name in files:
            status = Path(folder, name).lstat()
            size += status.st_blocks * 512 if status.st_nlink == 1 else 0
            newest = max(newest, status.st_mtime)
    return size, newest


def is_known(directory: Path) -> bool:
    """Whether it has been verified here: its stamps name it."""
    try:
        return json.loads(_host.read(STAMPS / f"{directory.name}.json") or "{}").get("directory") == str(directory)
    except (ValueError, AttributeError):
        return False


def look(root: Path, in_use: list[str]) -> list[Candidate]:
    """Every directory below the root, with who uses it."""
    own, others = mounts()
    configured = {path.parent.name: _reclaim.directories_of(_host.read(path) or "") for path in GROUPS.glob("*/rank.json")}
    remembered = _generation.users({path.stem: _host.read(path) for path in GENERATIONS.glob("*.json")})
    exported = {line.split()[0] for line in (_host.read(EXPORTS) or "").splitlines() if line.strip()}
    candidates = []
    for name in _host.names(root):
        directory = root / name
        if name.startswith(".") or not directory.is_dir():
            continue
        path = str(directory)
        group, before = _reclaim.user_of(path, configured), _reclaim.user_of(path, remembered)
        reasons = {
            "it is in the plan": name in in_use,
            f"group {group} is configured with it": bool(group),
            f"group {before} can be rolled back to it": bool(before),
            "it is a link": directory.is_symlink(),
            "it is a filesystem of its own": directory.is_mount(),
            "NFS exports it": path in exported,
            "a process has it mounted": _reclaim.is_mounted(*_reclaim.place(path, own), others),
            "this collection never verified it": not is_known(directory),
        }
        size, newest = weigh(directory)
        candidates.append(Candidate(name, size, newest, next((reason for reason, holds in reasons.items() if holds), "")))
    return candidates


def remove(root: Path, name: str) -> None:
    """Remove a directory that is first out of everybody's sight, so that no half of it is ever taken for a checkpoint."""
    going = root / f"{_reclaim.PREFIX}{name}"
    (root / name).rename(going)
    (STAMPS / f"{name}.json").unlink(missing_ok=True)
    shutil.rmtree(going)


def main() -> None:
    """Look, choose, and where it is no check, remove."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "in_use": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "int"},
        },
        supports_check_mode=True,
    )
    root, keep = Path(module.params["root"]), module.params["keep"]
    if keep is not None and keep < 0:
        module.fail_json(msg=f"keep is {keep}: give the number of unused checkpoints that stay, from 0")
    candidates = look(root, module.params["in_use"])
    going = _reclaim.choose(candidates, keep)
    leftovers = [name for name in _host.names(root) if name.startswith(_reclaim.PREFIX)] if keep is not None else []
    if not module.check_mode:
        try:
            for name in leftovers:
                shutil.rmtree(root / name)
            for candidate in going:
                remove(root, candidate.name)
        except OSError as error:
            module.fail_json(msg=f"{error.filename} cannot be removed ({error.strerror}): remove it by hand and run again")
    names = [candidate.name for candidate in going]
    module.exit_json(
        changed=bool(names or leftovers),
        checkpoints=[{"name": candidate.name, "size": candidate.size, "use": candidate.use} for candidate in candidates],
        removed=[*leftovers, *names],
        freed=sum(candidate.size for candidate in going),
        diff={
            "before_header": str(root),
            "after_header": str(root),
            "before": "".join(f"{candidate.name} ({_checkpoint.size_text(candidate.size)})\n" for candidate in candidates),
            "after": "".join(f"{c.name} ({_checkpoint.size_text(c.size)})\n" for c in candidates if c.name not in names),
        },
    )


if __name__ == "__main__":
    main()
