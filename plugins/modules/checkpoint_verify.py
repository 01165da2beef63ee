#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint's manifest against what lies on the disk."""

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_verify
short_description: Compare a checkpoint's files with its manifest, by size and SHA-256
version_added: 0.1.0
description:
  - Tells apart what is missing, short, corrupt and extra below a directory. Extra files with a leading dot in their path are let be.
  - Changes nothing but its own memory, one stamp file in C(/var/lib/gb10/stamps) that holds each file's hash with its size, inode and times. A
    file whose stamp fits is not read again, so that a repeat takes a moment; a written file is.
  - A byte that turned on the disk without a write leaves size and times as they were. Only O(deep=true) finds it.
  - Links count as corrupt. A container to which the directory is mounted could not follow them.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Does the same, but leaves the stamp file as it is.
  diff_mode:
    support: N/A
    details:
      - There is nothing to show; stamps are not a setting.
  idempotent: {support: full}
options:
  path:
    description: The checkpoint's directory. It need not exist.
    type: path
    required: true
  manifest:
    description:
      - The files as they should be, C({"version":1,"files":[{"path","size","sha256"}]}), with paths relative to O(path).
      - Left out, the files that are there are hashed and returned as RV(manifest).
    type: dict
  deep:
    description: Read every file, whatever the stamps say.
    type: bool
    default: false
  jobs:
    description: Files to hash at a time. The default is the number of processors, at most 8.
    type: int
  allow_extra:
    description: Take no notice of files that are no part of the checkpoint.
    type: bool
    default: false
  must_match:
    description: Fail, with the first problem, where anything differs.
    type: bool
    default: false
  must_fit:
    description: Fail where the disk has no room for what must be copied.
    type: bool
    default: false
seealso:
  - module: gb10.cluster.weights_replica
"""

EXAMPLES = r"""
- name: Read the whole checkpoint once
  gb10.cluster.checkpoint_verify:
    path: /var/lib/gb10/models/smollm2-135m-instruct
    manifest: "{{ lookup('ansible.builtin.file', 'smollm2-135m-instruct.manifest.json') | from_json }}"
    deep: true
    must_match: true

- name: Make the manifest of a checkpoint that is known to be good
  gb10.cluster.checkpoint_verify:
    path: /var/lib/gb10/models/smollm2-135m-instruct
  register: good
"""

RETURN = r"""
ok:
  description: Whether the directory holds the checkpoint.
  returned: success
  type: bool
directory:
  description: The directory.
  returned: success
  type: str
verdict:
  description: The first problem, how many more there are, and the cure, in one sentence; empty when there is none.
  returned: success
  type: str
problems:
  description: All problems, one sentence each.
  returned: success
  type: list
  elements: str
missing:
  description: Paths of files that are not there.
  returned: success
  type: list
  elements: str
short:
  description: Paths of files whose copy has not ended.
  returned: success
  type: list
  elements: str
corrupt:
  description: Paths of files with other content, and of those that cannot be read.
  returned: success
  type: list
  elements: str
extra:
  description: Paths of files that are no part of the checkpoint.
  returned: success
  type: list
  elements: str
copy_bytes:
  description: Size of the files that must be copied here.
  returned: success
  type: int
free_bytes:
  description: Free space of the disk.
  returned: success
  type: int
hashed:
  description: How many files were read; the others' stamps fitted.
  returned: success
  type: int
manifest:
  description: The manifest that describes the files as they are.
  returned: when O(manifest) is left out
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint
from ..module_utils._survey import STAMPS, survey


def main() -> None:
    """Survey and compare."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest": {"type": "dict"},
            "deep": {"type": "bool", "default": False},
            "jobs": {"type": "int"},
            "allow_extra": {"type": "bool", "default": False},
            "must_match": {"type": "bool", "default": False},
            "must_fit": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path, given = module.params["path"], module.params["manifest"]
    try:
        files = None if given is None else _checkpoint.parse_manifest(given)
    except _checkpoint.ManifestError as error:
        module.fail_json(msg=str(error))
    sizes = None if files is None else {file.path: file.size for file in files}
    stamps = None if module.check_mode else STAMPS
    seen = survey(Path(path), sizes, module.params["deep"], module.params["jobs"], stamps)
    measured = {}
    if files is None:
        files = _checkpoint.as_found(seen.found)
        measured["manifest"] = _checkpoint.manifest_of(files)
    problems = _checkpoint.compare(files, seen.found, allow_extra=module.params["allow_extra"])
    wanted = _checkpoint.to_copy(files, problems)
    result = {
        **_checkpoint.report(problems),
        **measured,
        "directory": path,
        "verdict": _checkpoint.verdict(path, problems),
        "copy_bytes": sum(file.size for file in wanted),
        "free_bytes": seen.free,
        "hashed": seen.hashed,
    }
    if module.params["must_match"] and problems:
        module.fail_json(msg=result["verdict"])
    shortage = _checkpoint.shortage(path, _checkpoint.growth(wanted, seen.found), seen.free)
    if module.params["must_fit"] and shortage:
        module.fail_json(msg=shortage)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
