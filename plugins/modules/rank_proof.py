#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank really runs with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_proof
short_description: Hold what a rank's processes really run with against the plan
version_added: 0.1.0
description:
  - Reads image, arguments and variables of the container's processes from the engine and from procfs, and compares them with the rank's configuration
    and with the environment that its start wrote.
  - Names of variables and one hash are returned, never a value.
  - Processes that have overwritten their memory with a title, as the engine's workers do, cannot be read; they are listed as such.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  group:
    description: Name of the group.
    type: str
    required: true
  strict:
    description: Fail where something differs.
    type: bool
    default: true
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Prove what this rank runs
  gb10.cluster.rank_proof:
    group: lab
"""

RETURN = r"""
problems:
  description: What differs, one sentence each.
  returned: always
  type: list
  elements: str
seen:
  description: C(image), C(arguments), names of C(variables), those C(not_given) by the plan, the hash C(environment) and C(processes).
  returned: success
  type: dict
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _proof


def processes(root: int, procfs: str) -> list[_proof.Process]:
    """The container's processes, its own first."""
    found = []
    for pid in _host.descendants(root, procfs):
        try:
            cmdline, environ = ((Path(procfs) / str(pid) / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # has ended meanwhile
            continue
        found.append(_proof.Process(pid, _proof.arguments_of(cmdline), _proof.environment_of(environ)))
    return found


def look(module: AnsibleModule) -> tuple[list[str], dict[str, Any]]:
    """Read and compare; fails where nothing runs."""
    group, procfs = module.params["group"], module.params["procfs_root"]
    rank, env_file = _host.read(f"/etc/gb10/{group}/rank.json"), _host.read(f"/run/gb10/{group}/rank.env")
    if rank is None or env_file is None:
        module.fail_json(msg=f"group {group} has never been started on this member: run playbook gb10.cluster.start", problems=[])
    config = json.loads(rank)
    container = config["container"]
    pid, image = _proof.container(_host.run(_proof.container_argv(config["engine"], container["name"])).out)
    if not pid:
        module.fail_json(msg=f"no container {container['name']} runs on this member: run playbook gb10.cluster.start", problems=[])
    if not (running := processes(pid, procfs)):
        module.fail_json(msg=f"container {container['name']} has just ended: run playbook gb10.cluster.status", problems=[])
    return _proof.judge(container, _proof.given(env_file), image, running)


def main() -> None:
    """Look, report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "strict": {"type": "bool", "default": True},
            "procfs_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    problems, seen = look(module)
    if problems and module.params["strict"]:
        cure = "run playbook gb10.cluster.restart, and look for what sets it (image, hooks of the engine) when it comes back"
        module.fail_json(msg=f"{'; '.join(problems)}: {cure}", problems=problems, seen=seen)
    module.exit_json(changed=False, problems=problems, seen=seen)


if __name__ == "__main__":
    main()
