#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a rank fits into this member's memory, before it is started."""

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_plan
short_description: Hold what a rank will need against the memory that a member has
version_added: 0.1.0
description:
  - Adds up, line by line, what a rank will need, that is its part of the weights, by the headers of the checkpoint's files and the engine's sharding
    rules, the KV cache, communication buffers, workspaces, graphs, processes, the step of a long prefill and a reserve. No weight is read.
  - Fails where the member does not have it, with the numbers and the longest context that would fit.
  - Memory that holds page cache counts as available, but a GPU cannot take it. Where only that would make a rank fit, RV(drop_caches) says so.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  path:
    description: The checkpoint's directory.
    type: path
    required: true
  config:
    description:
      - The rank's configuration from the plan (C(members.NAME.rank_config)). Its container's arguments and variables decide what is loaded and how
        large the cache is.
    type: dict
    required: true
  kv_bytes_per_token:
    description:
      - Bytes of KV cache per token and rank, as measured with this image; the size of the pool by the tokens that the engine says it holds.
      - Left out or 0, the least that the model's layers keep. An engine's pages may take twice that.
    type: float
  member:
    description: The member's name for messages.
    type: str
    default: this member
  group:
    description: The group's name. While its rank runs here, the memory is in use by just that, and nothing is compared.
    type: str
    default: ""
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
seealso:
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Refuse a start that cannot end well
  gb10.cluster.memory_plan:
    path: "{{ plan.storage.directory }}"
    config: "{{ plan.members[inventory_hostname].rank_config }}"
    kv_bytes_per_token: 4265
    member: "{{ inventory_hostname }}"
    group: "{{ plan.cluster.name }}"
"""

RETURN = r"""
need:
  description: Bytes that the rank needs.
  returned: success
  type: int
parts:
  description: The same by line.
  returned: success
  type: dict
weights:
  description: Bytes of the rank's weights by kind.
  returned: success
  type: dict
left_out:
  description: Bytes of the checkpoint, of a rank's share, that stay on the disk, such as Engram tables.
  returned: success
  type: dict
bits:
  description: Bits per weight of the routed experts of each layer, gate and up, down, from the shapes of the tensors.
  returned: success
  type: dict
available:
  description: Bytes that the member has.
  returned: success
  type: int
context:
  description: The longest context that fits, in tokens.
  returned: success
  type: int
drop_caches:
  description: Whether the page cache must be given back before the start.
  returned: success
  type: bool
note:
  description: What to watch; empty when nothing is.
  returned: success
  type: str
compared:
  description: Whether the member's memory was looked at; not while its rank runs.
  returned: success
  type: bool
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _host, _memory, _units, _weights
from ..module_utils._safetensors import INDEX, SUFFIX, FormatError, parse_index
from ..module_utils._survey import tensor_headers


def shards(directory: Path) -> list[str]:
    """The files that an engine loads: those of the index, or all where there is none. Raises FormatError."""
    text = _host.read(directory / INDEX)
    if text is None:
        return [path.name for path in directory.glob(f"*{SUFFIX}")]
    return sorted(set(parse_index(text)[0].values()))


def main() -> None:
    """Add up, compare."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "config": {"type": "dict", "required": True},
            "kv_bytes_per_token": {"type": "float", "no_log": False},
            "member": {"type": "str", "default": "this member"},
            "group": {"type": "str", "default": ""},
            "procfs_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    path, group = module.params["path"], module.params["group"]
    directory = Path(path)
    try:
        config = json.loads(_host.read(directory / "config.json") or "")
        headers, broken = tensor_headers(directory, shards(directory))
    except (ValueError, FormatError) as error:
        what = f"{INDEX} {error}" if isinstance(error, FormatError) else "config.json cannot be read"
        module.fail_json(msg=f"{path}: {what}, so that nobody can say what a rank needs: fetch the checkpoint first")
    if broken or not headers:
        module.fail_json(msg=_checkpoint.verdict(path, broken) or f"{path} has no tensor files: fetch the checkpoint first")
    launch = _memory.launch_of(module.params["config"])
    sharding = _weights.Sharding(launch.ranks, launch.expert_parallel, launch.draft, launch.vision, not launch.tables_on_disk)
    weights = _weights.weigh((pair for tensors in headers.values() for pair in tensors.items()), config, sharding)
    lines = _memory.parts(weights.parts, config, launch)
    memory = _memory.parse_meminfo(_host.read(Path(module.params["procfs_root"], "meminfo")) or "")
    per_token = module.params["kv_bytes_per_token"] or _memory.kv_bytes_per_token(config)
    verdict = _memory.verdict(module.params["member"], lines, launch, memory, per_token)
    running = bool(group) and _units.read_rank_state(group).is_active
    if not verdict.fits and not running:
        module.fail_json(msg=verdict.sentence, need=verdict.need, parts=lines, context=verdict.context)
    module.exit_json(
        changed=False,
        need=verdict.need,
        parts=lines,
        weights=dict(weights.parts),
        left_out=dict(weights.left_out),
        bits=weights.bits,
        available=memory.available,
        context=verdict.context,
        drop_caches=verdict.drop_caches and not running,
        note="" if running else verdict.sentence,
        compared=not running,
    )


if __name__ == "__main__":
    main()
