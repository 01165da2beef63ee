#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint on this member, brought here from another."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_replica
short_description: Make a directory hold a checkpoint, with files from another member
version_added: 0.1.0
description:
  - Compares the directory with the manifest as M(gb10.cluster.checkpoint_verify) does, copies what is missing, short or corrupt, removes what is
    extra, and compares again. A copy is done only when every hash is right.
  - Files are written in place. A copy that was cut goes on where it ended, and of a corrupt file only the blocks that differ are sent.
  - The disk is asked for room before anything is copied. Nothing outside the directory is written, and files with a leading dot in their path are
    let be.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Returns what would be copied and removed, and RV(ok) as it would be afterwards.
  diff_mode: {support: full}
  idempotent: {support: full}
options:
  path:
    description: The checkpoint's directory on this member. It is made where it does not exist.
    type: path
    required: true
  manifest:
    description: The files as they should be, as for M(gb10.cluster.checkpoint_verify).
    type: dict
    required: true
  name:
    description: The source's name, see M(gb10.cluster.weights_source).
    type: str
    required: true
  address:
    description: The source's address.
    type: str
    required: true
  port:
    description: The source's TCP port.
    type: int
    default: 8730
  group:
    description: Name of the group that reads the directory. While it runs, no file is written.
    type: str
    default: ""
  allow_disruption:
    description: Write even while the group runs, which may end it.
    type: bool
    default: false
  deep:
    description: Read every file before the comparison, whatever the stamps say.
    type: bool
    default: false
seealso:
  - module: gb10.cluster.weights_source
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Copy the checkpoint from t1
  gb10.cluster.weights_replica:
    path: /var/lib/gb10/models/smollm2-135m-instruct
    manifest: "{{ lookup('ansible.builtin.file', 'smollm2-135m-instruct.manifest.json') | from_json }}"
    name: smollm2-135m-instruct
    address: 10.10.0.1
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
copied:
  description: Paths of the files that were copied, or would be in check mode.
  returned: success
  type: list
  elements: str
removed:
  description: Paths of the files that were removed, or would be in check mode.
  returned: success
  type: list
  elements: str
copy_bytes:
  description: Size of the copied files.
  returned: success
  type: int
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _host, _replica, _units
from ..module_utils._survey import STAMPS, survey


def pull(module: AnsibleModule, paths: list[str]) -> None:
    """Copy these files or fail."""
    parameters = module.params
    source = _replica.url(parameters["name"], parameters["address"], parameters["port"])
    Path(parameters["path"]).mkdir(parents=True, exist_ok=True)
    list_file = Path(module.tmpdir, "files")
    list_file.write_bytes(_replica.list_content(paths))
    done = _host.run(_replica.pull_argv(source, str(list_file), parameters["path"]), timeout=_replica.LIFETIME_S)
    if done.status:
        module.fail_json(msg=_replica.pull_failure(source, done))


def main() -> None:
    """Compare, copy, compare."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest": {"type": "dict", "required": True},
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "default": _replica.PORT},
            "group": {"type": "str", "default": ""},
            "allow_disruption": {"type": "bool", "default": False},
            "deep": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path, group = module.params["path"], module.params["group"]
    directory = Path(path)
    try:
        files = _checkpoint.parse_manifest(module.params["manifest"])
    except _checkpoint.ManifestError as error:
        module.fail_json(msg=str(error))
    sizes = {file.path: file.size for file in files}
    stamps = None if module.check_mode else STAMPS

    before = survey(directory, sizes, module.params["deep"], None, stamps)
    problems = _checkpoint.compare(files, before.found)
    wanted = _checkpoint.to_copy(files, problems)
    extra = [problem.path for problem in problems if problem.kind == "extra"]
    shortage = _checkpoint.shortage(path, _checkpoint.growth(wanted, before.found), before.free)
    if shortage:
        module.fail_json(msg=shortage)

    if problems and group and _units.read_rank_state(group).holds_group:
        sentence = f"group {group} runs, and {path} needs other files: stop it first (playbook gb10.cluster.stop) or set cluster_allow_disruption=true"
        if module.check_mode:
            module.warn(sentence)
        elif not module.params["allow_disruption"]:
            module.fail_json(msg=sentence)
    if problems and not module.check_mode:
        for name in extra:
            (directory / name).unlink()
        if wanted:
            pull(module, [file.path for file in wanted])
        after = survey(directory, sizes, False, None, stamps)
        problems = _checkpoint.compare(files, after.found)
        if problems:
            module.fail_json(msg=f"the copy differs from the manifest: {_checkpoint.verdict(path, problems)}")
    module.exit_json(
        changed=bool(wanted or extra),
        ok=True,
        directory=path,
        copied=[file.path for file in wanted],
        removed=extra,
        copy_bytes=sum(file.size for file in wanted),
        diff={
            "before_header": path,
            "after_header": path,
            "before": "".join(f"{name}\n" for name in extra),
            "after": "".join(f"{file.path} ({_checkpoint.size_text(file.size)})\n" for file in wanted),
        },
    )


if __name__ == "__main__":
    main()
