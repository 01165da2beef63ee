#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint on this member, brought here from its neighbours."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_replica
short_description: Make a directory hold a checkpoint, with files from neighbours that pass them on
version_added: 0.1.0
description:
  - Compares the directory with the manifest as M(gb10.cluster.checkpoint_verify) does, removes what is extra, takes what is missing, short or
    corrupt from whichever neighbour has it, and offers each file on as soon as its SHA-256 was read back from this disk. So the files go around
    the ring while they still arrive, and nothing wrong goes further than one hop.
  - The copy is a job on the member that outlives the connection. A second run finds it and goes on waiting, and one that was cut goes on where it
    ended, inside a file as well. A neighbour that fails is a source less and nothing else.
  - Files are written in place, but for those with another name elsewhere (hard links, as those of a slim Engram directory), which get content of
    their own. Of a corrupt file only the blocks that differ are sent. Holes stay holes.
  - The disk is asked for room before anything is copied. Nothing outside the directory is written, and files with a leading dot in their path are
    let be.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.JOB]
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
  name:
    description: The source's name, see M(gb10.cluster.weights_source).
    type: str
    required: true
  state:
    description:
      - V(present) copies and waits, V(started) only begins, V(awaited) waits for what was begun.
      - V(stopped) ends a copy that runs. What it has copied stays.
    type: str
    choices: [present, started, awaited, stopped]
    default: present
  sources:
    description:
      - Where to copy from. Several addresses of one neighbour are used at the same time.
      - Empty on the member to which the files come from elsewhere, such as M(gb10.cluster.hf_snapshot) or a copy from the controller. It then offers
        each file as soon as it is whole.
    type: list
    elements: dict
    default: []
    suboptions:
      member:
        description: The neighbour's name.
        type: str
        required: true
      address:
        description: One of its addresses.
        type: str
        required: true
  port:
    description: The sources' TCP port.
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
  max_used_percent:
    description: How full the copy may make the disk.
    type: int
    default: 85
seealso:
  - module: gb10.cluster.weights_source
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Copy the checkpoint from t1 over both legs of the cable
  gb10.cluster.weights_replica:
    path: /var/lib/gb10/models/smollm2-135m-instruct
    manifest: "{{ lookup('ansible.builtin.file', 'smollm2-135m-instruct.manifest.json') | from_json }}"
    name: smollm2-135m-instruct
    sources:
      - {member: t1, address: 10.10.0.1}
      - {member: t1, address: 10.10.1.1}
"""

RETURN = r"""
ok:
  description: Whether the directory holds the checkpoint, or will when the copy ends.
  returned: success
  type: bool
finished:
  description: Whether nothing is being copied any more.
  returned: success
  type: bool
directory:
  description: The directory.
  returned: success
  type: str
began:
  description: Whether it was this task that began the copy, and not another run.
  returned: when O(state) is V(present) or V(started)
  type: bool
copied:
  description: Paths of the files that were copied, are being copied, or would be in check mode.
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
seconds:
  description: How long it took.
  returned: when a copy has ended
  type: float
progress:
  description: How far the copy is.
  returned: while it runs
  type: dict
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _relay, _replica, _space, _units
from ..module_utils._job import Job, answer, key_of
from ..module_utils._survey import STAMPS, survey


def look(module: AnsibleModule) -> dict[str, Any]:
    """What must be copied and removed; fails where that cannot be."""
    parameters = module.params
    path, directory = parameters["path"], Path(parameters["path"])
    try:
        files = _checkpoint.parse_manifest(parameters["manifest"] or {})
    except _checkpoint.ManifestError as error:
        module.fail_json(msg=str(error))
    sizes = {file.path: file.size for file in files}
    seen = survey(directory, sizes, parameters["deep"], None, None if module.check_mode else STAMPS)
    problems = _checkpoint.compare(files, seen.found)
    wanted = _checkpoint.to_copy(files, problems)
    need = _checkpoint.growth(wanted, seen.found)
    shortage = _space.shortage(path, need, _space.disk_of(directory), parameters["max_used_percent"])
    if shortage:
        module.fail_json(msg=shortage)
    if problems and parameters["group"] and _units.read_rank_state(parameters["group"]).holds_group:
        sentence = (
            f"group {parameters['group']} runs, and {path} needs other files: stop it first (playbook gb10.cluster.stop) "
            "or set cluster_allow_disruption=true"
        )
        if module.check_mode:
            module.warn(sentence)
        elif not parameters["allow_disruption"]:
            module.fail_json(msg=sentence)
    return {
        "wanted": wanted,
        "held": sorted(set(sizes) - {file.path for file in wanted}),
        "extra": [problem.path for problem in problems if problem.kind == "extra"],
    }


def begin(module: AnsibleModule, job: Job, key: str, seen: dict[str, Any], about: dict[str, Any]) -> None:
    """Offer what is here, and start the copy of what is not."""
    parameters, wanted = module.params, seen["wanted"]
    directory = Path(parameters["path"])
    for name in seen["extra"]:
        (directory / name).unlink()
    sources = [_relay.Source(source["member"], source["address"]) for source in parameters["sources"]]
    publisher = _relay.Publisher(
        _replica.offer_folder(parameters["name"]), directory, seen["held"], (1 if sources else 0) if wanted else None
    )
    if wanted:
        relay = _relay.Relay(parameters["name"], directory, wanted, publisher, sources, parameters["port"], STAMPS)
        job.start(key, relay.run, about)


def decide(module: AnsibleModule, job: Job, common: dict[str, Any]) -> bool:
    """Begin what must be copied, unless another run has; whether there is nothing to wait for."""
    key = key_of(module.params, "path", "manifest", "sources", "port")
    state = job.look()
    if state.running and state.key == key and not module.check_mode:
        common["began"] = False  # what it copies is not hashed meanwhile
        return False
    seen = look(module)
    wanted, extra = seen["wanted"], seen["extra"]
    common |= {
        "changed": bool(wanted or extra),
        "copied": [file.path for file in wanted],
        "removed": extra,
        "copy_bytes": sum(file.size for file in wanted),
        "diff": {
            "before_header": module.params["path"],
            "after_header": module.params["path"],
            "before": "".join(f"{name}\n" for name in extra),
            "after": "".join(f"{file.path} ({_checkpoint.size_text(file.size)})\n" for file in wanted),
        },
    }
    if module.check_mode:
        return True
    job.stop()
    begin(module, job, key, seen, dict(common))
    common["began"] = bool(wanted)
    return not wanted


def main() -> None:
    """Compare, copy or wait, and say how far it is."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest": {"type": "dict"},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "started", "awaited", "stopped"], "default": "present"},
            "sources": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"member": {"type": "str", "required": True}, "address": {"type": "str", "required": True}},
            },
            "port": {"type": "int", "default": _replica.PORT},
            "group": {"type": "str", "default": ""},
            "allow_disruption": {"type": "bool", "default": False},
            "deep": {"type": "bool", "default": False},
            "max_used_percent": {"type": "int", "default": _space.MAX_USED_PERCENT},
            "wait": {"type": "float", "default": 5},
        },
        required_if=[("state", "present", ("manifest",)), ("state", "started", ("manifest",))],
        supports_check_mode=True,
    )
    parameters = module.params
    job = Job(f"copy-{parameters['name']}")
    common = {"directory": parameters["path"], "ok": True}
    if parameters["state"] == "stopped":
        running = job.look().running
        if running and not module.check_mode:
            job.stop()
        module.exit_json(changed=running, finished=True, **common)
    if parameters["state"] == "awaited":
        answer(module, job.wait(parameters["wait"]), common)

    with nullcontext() if module.check_mode else job.turn():
        ready = decide(module, job, common)
    if ready:
        module.exit_json(finished=True, **common)
    answer(module, job.wait(parameters["wait"] if parameters["state"] == "present" else 0), common)


if __name__ == "__main__":
    main()
