#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image of this member."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_info
short_description: Tell whether a container engine answers and which image it has under a name
version_added: 0.1.0
description:
  - Asks the engine for the image and compares its id with the expected one.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.info_module]
options:
  engine:
    description: The container engine.
    type: str
    choices: [docker, podman]
    required: true
  reference:
    description: The image's name with its tag.
    type: str
    required: true
  id:
    description: The id that the image should have, the SHA-256 of its configuration. Left out, every image of that name is right.
    type: str
  must_match:
    description: Fail where there is no such image or another.
    type: bool
    default: false
  must_fit:
    description: Fail where the image is to be loaded and the engine's disk has less room than this many bytes.
    type: int
    default: 0
seealso:
  - module: gb10.cluster.image_ship
"""

EXAMPLES = r"""
- name: Look for the engine's image
  gb10.cluster.image_info:
    engine: podman
    reference: localhost/gb10-lab-engine:0.32.0
  register: image
"""

RETURN = r"""
ok:
  description: Whether the engine has the image with the expected id.
  returned: success
  type: bool
present:
  description: Whether it has an image of that name.
  returned: success
  type: bool
verdict:
  description: What is wrong and the cure, in one sentence; empty when nothing is.
  returned: success
  type: str
id:
  description: The image's id, in hex; empty without an image.
  returned: success
  type: str
labels:
  description: The image's labels.
  returned: success
  type: dict
size:
  description: The image's size in bytes.
  returned: success
  type: int
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _host, _image
from ..module_utils._survey import free_bytes


def main() -> None:
    """Ask and compare."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "id": {"type": "str"},
            "must_match": {"type": "bool", "default": False},
            "must_fit": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    engine, reference = module.params["engine"], module.params["reference"]
    try:
        image = _image.inspected(engine, _host.run(_image.inspect_argv(engine, reference)))
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    verdict = _image.verdict(reference, image, module.params["id"])
    result = {
        "ok": not verdict,
        "present": image is not None,
        "verdict": verdict,
        "id": image.id if image else "",
        "labels": dict(image.labels) if image else {},
        "size": image.size if image else 0,
    }
    if verdict and module.params["must_match"]:
        module.fail_json(msg=verdict)
    if verdict and module.params["must_fit"]:
        root = _host.run(_image.root_argv(engine)).out.strip() or "/var/lib"
        shortage = _checkpoint.shortage(root, module.params["must_fit"], free_bytes(Path(root)))
        if shortage:
            module.fail_json(msg=shortage)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
