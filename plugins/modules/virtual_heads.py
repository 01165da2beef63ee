#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head padding in a checkpoint's config.json."""

from __future__ import annotations

DOCUMENTATION = r"""
module: virtual_heads
short_description: Report more attention heads in config.json, so that they divide by the ranks
version_added: 0.1.0
description:
  - Some engine images pad heads and output groups at load when config.json says so. This module makes config.json say so. No weight file changes.
  - The original is kept as C(config.json.orig-hf). A file that has neither the real nor the padded numbers is refused and stays as it is.
  - A checkpoint that was staged again has its original config.json back; that is noticed, and padded again. So run it after every staging and
    before every start.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  path:
    description: The checkpoint's directory.
    type: path
    required: true
  shape:
    description:
      - The profile's C(checkpoint.preparation.virtual_heads), C({"num_attention_heads","o_groups","from":{"num_attention_heads","o_groups"}}). The
        padded numbers must be those that follow from the real ones; they are never guessed from the file.
      - Needed for O(state=present).
    type: dict
  ranks:
    description: The tensor-parallel size. Needed for O(state=present).
    type: int
  padded_at_launch:
    description:
      - The image pads by itself at launch. Both at once would pad twice, so O(state=present) is then refused.
    type: bool
    default: false
  state:
    description: V(absent) puts the original back, byte for byte.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Pad for three ranks
  gb10.cluster.virtual_heads:
    path: /var/lib/gb10/models/deepseek-v4.1-flash-exl3-3.5bpw
    ranks: 3
    shape:
      num_attention_heads: 72
      o_groups: 9
      from: {num_attention_heads: 64, o_groups: 8}

- name: Put the original back
  gb10.cluster.virtual_heads:
    path: /var/lib/gb10/models/deepseek-v4.1-flash-exl3-3.5bpw
    state: absent
"""

RETURN = r"""
changes:
  description: Each changed key with its old and new value.
  returned: success
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _padding
from ..module_utils._checkpoint import ORIGINAL
from ..module_utils._padding import Files, PaddingError


def read(path: Path) -> str | None:
    """A file's text exactly; None when it does not exist."""
    content = _host.read_bytes(path)
    return None if content is None else content.decode("utf-8", "replace")


def write(path: Path, now: str | None, wanted: str | None) -> None:
    """Replace a file whole where its text differs."""
    if wanted is not None and wanted != now:
        _host.write(path, wanted.encode())


def main() -> None:
    """Compute, compare, write."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "shape": {"type": "dict"},
            "ranks": {"type": "int"},
            "padded_at_launch": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("shape", "ranks"))],
        supports_check_mode=True,
    )
    path = module.params["path"]
    config, original = Path(path, "config.json"), Path(path, f"config.json{ORIGINAL}")
    now = Files(read(config), read(original))
    try:
        if module.params["state"] == "absent":
            wanted = _padding.restored_files(now, path)
        elif module.params["padded_at_launch"]:
            raise PaddingError(
                "this image pads heads at launch, and config.json would pad them once more: remove virtual_heads from the profile"
            )
        else:
            wanted = _padding.padded_files(now, _padding.shape_of(module.params["shape"], module.params["ranks"]), path)
    except PaddingError as error:
        module.fail_json(msg=str(error))
    if wanted != now and not module.check_mode:
        write(original, now.original, wanted.original)  # first, so that it is on the disk whenever the run ends
        write(config, now.config, wanted.config)
        if wanted.original is None:
            original.unlink(missing_ok=True)
    module.exit_json(
        changed=wanted != now,
        changes=_padding.differences(now.config, wanted.config),
        diff={"before_header": str(config), "after_header": str(config), "before": now.config or "", "after": wanted.config or ""},
    )


if __name__ == "__main__":
    main()
