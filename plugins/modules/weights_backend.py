#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which way this member gets a checkpoint."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_backend
short_description: Say which way this member gets a checkpoint, and why
version_added: 0.1.0
description:
  - Decides from what is there already, from the room on the disk, from the pools, and from whether a leg leads to the head.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  path:
    description: The checkpoint's directory on this member.
    type: path
    required: true
  size:
    description: Bytes of the whole checkpoint.
    type: int
    required: true
  backend:
    description: The way that is wanted. V(auto) decides; another is only checked.
    type: str
    choices: [auto, nfs, rsync, zfs]
    default: auto
  dataset:
    description: The ZFS dataset for the checkpoint, as POOL/NAME. Without it, V(auto) never chooses V(zfs).
    type: str
    default: ""
  head_adjacent:
    description: Whether a leg leads to the head. NFS goes no other way.
    type: bool
    required: true
  max_used_percent:
    description: How full a copy may make the disk.
    type: int
    default: 85
seealso:
  - module: gb10.cluster.weights_replica
  - module: gb10.cluster.weights_nfs
  - module: gb10.cluster.weights_zfs
"""

EXAMPLES = r"""
- name: Which way
  gb10.cluster.weights_backend:
    path: /var/lib/gb10/models/smollm2-135m-instruct
    size: 272000000
    head_adjacent: true
"""

RETURN = r"""
backend:
  description: The way.
  returned: success
  type: str
  sample: rsync
reason:
  description: Why, in one sentence.
  returned: success
  type: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _nfs, _space, _zfs, _zfs_stream


def before(path: str, dataset: str) -> str:
    """The way in which what is here came; empty where nothing is."""
    kind = _nfs.filesystem_of(os.path.realpath(path), _host.read("/proc/self/mountinfo") or "")
    if kind.startswith("nfs") and os.path.ismount(path):
        return "nfs"
    if dataset and _zfs_stream.value(dataset, "mountpoint") == path:
        return "zfs"
    return "rsync" if any(not name.startswith(".") for name in _host.names(path)) else ""


def main() -> None:
    """Read the host, ask the core."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "size": {"type": "int", "required": True},
            "backend": {"type": "str", "choices": ["auto", "nfs", "rsync", "zfs"], "default": "auto"},
            "dataset": {"type": "str", "default": ""},
            "head_adjacent": {"type": "bool", "required": True},
            "max_used_percent": {"type": "int", "default": _space.MAX_USED_PERCENT},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    wanted, dataset = parameters["backend"], parameters["dataset"]
    if wanted != "auto":
        if wanted == "nfs" and not parameters["head_adjacent"]:
            module.fail_json(msg="no leg of this member leads to the head, and NFS goes no other way: set storage_backend to rsync or auto")
        if wanted == "zfs" and not _zfs.is_dataset(dataset):
            module.fail_json(msg=f"{dataset!r} is no dataset: set storage_zfs_dataset to POOL/NAME")
        module.exit_json(changed=False, backend=wanted, reason="storage_backend says so")
    facts = {
        "replica": before(parameters["path"], dataset),
        "pools": bool(dataset and _zfs_stream.value(dataset.partition("/")[0], "used")),
        "head_adjacent": parameters["head_adjacent"],
    }
    disk = _space.disk_of(Path(parameters["path"]))
    backend, reason = _zfs.choose_backend(facts, parameters["size"], _space.room(disk, parameters["max_used_percent"]))
    if not backend:
        module.fail_json(msg=f"{parameters['path']}: {reason}")
    module.exit_json(changed=False, backend=backend, reason=reason)


if __name__ == "__main__":
    main()
