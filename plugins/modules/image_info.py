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
  - Asks the engine for the image and compares it with the expected one, and with what this member can run.
  - Tells what the member that gets the image first is to do about it, and which of its layers others need.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.info_module, gb10.cluster._attributes.ENGINE]
options:
  reference:
    description: The image's name with its tag.
    type: str
    required: true
  id:
    description: The id that the image should have, the SHA-256 of its configuration, or its RV(content). Left out, every image of that name is right.
    type: str
  source:
    description: Where the image comes from, as the plan has it. Then RV(step) tells how to get it.
    type: dict
  way:
    description:
      - V(auto) reuses a right image and gets it otherwise; V(pull) and V(build) do so in any case, and nothing else; V(never) gets nothing.
    type: str
    choices: [auto, pull, build, never]
    default: auto
  stamp:
    description: The stamp of the recipe, for a source that is built.
    type: str
    default: ""
  upstream:
    description: What a registry calls the image. Then RV(by_digest) tells how others pull just the same.
    type: str
  tried:
    description: A published image was pulled already, and is the image of that name now.
    type: bool
    default: false
  layers:
    description: The layers of an image, unpacked, lowest first. Then RV(lacking) tells which of them this member does not have.
    type: list
    elements: str
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
  description: The engine's own id of the image, in hex; empty without an image.
  returned: success
  type: str
content:
  description: What the image is made of, its layers and configuration, as a SHA-256 in hex. Unlike the id it is the same on every engine.
  returned: success
  type: str
layers:
  description: The SHA-256 of its layers, unpacked, lowest first.
  returned: success
  type: list
  elements: str
by_digest:
  description: The name by which the image's very digest is pulled from the repository of O(upstream); empty where it did not come from there.
  returned: where O(upstream) is given
  type: str
step:
  description: What to do, one of C(reuse), C(load), C(pull), C(build) and C(refuse).
  returned: where O(source) is given
  type: str
reason:
  description: Why.
  returned: where O(source) is given
  type: str
lacking:
  description: The layers of O(layers) that have to be brought to this member; all of them where its engine takes archives only whole.
  returned: where O(layers) is given
  type: list
  elements: str
labels:
  description: The image's labels.
  returned: success
  type: dict
size:
  description: The image's size in bytes.
  returned: success
  type: int
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _host, _image, _obtain
from ..module_utils._engine import Engine
from ..module_utils._survey import free_bytes


def lacking(engine: str, layers: list[str]) -> list[str]:
    """The layers that are to be brought to this member."""
    if not _image.takes_parts(_host.run(_image.store_argv(engine)).out):
        return layers
    ids = sorted(set(_host.run(_image.list_argv(engine)).out.split()))
    done = _host.run([*_image.inspect_argv(engine, ids[0]), *ids[1:]]) if ids else None
    present = json.loads(done.out) if done and done.status == 0 else []
    return _image.lacking(layers, [_image.described(data).layers for data in present])


def main() -> None:
    """Ask and compare."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "id": {"type": "str"},
            "must_match": {"type": "bool", "default": False},
            "must_fit": {"type": "int", "default": 0},
            "source": {"type": "dict"},
            "way": {"type": "str", "choices": list(_obtain.WAYS), "default": "auto"},
            "stamp": {"type": "str", "default": ""},
            "upstream": {"type": "str"},
            "tried": {"type": "bool", "default": False},
            "layers": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    engine, reference = parameters["engine"], parameters["reference"]
    try:
        image = Engine(engine).image(reference)
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    verdict = _image.verdict(reference, image, parameters["id"], _image.own_platform())
    result: dict[str, Any] = {
        "ok": not verdict,
        "present": image is not None,
        "verdict": verdict,
        "id": image.id if image else "",
        "content": image.content if image else "",
        "layers": list(image.layers) if image else [],
        "labels": dict(image.labels) if image else {},
        "size": image.size if image else 0,
    }
    if parameters["source"]:
        decision = _obtain.decide(
            parameters["source"], parameters["way"], image, parameters["id"] or "", parameters["stamp"], parameters["tried"]
        )
        result |= {"step": decision.step, "reason": decision.reason}
    if parameters["upstream"]:
        result["by_digest"] = _obtain.by_digest(parameters["upstream"], image) if image else ""
    if parameters["layers"] is not None:
        result["lacking"] = lacking(engine, parameters["layers"])
    if verdict and parameters["must_match"]:
        module.fail_json(msg=verdict)
    if verdict and parameters["must_fit"]:
        root = _host.run(_image.root_argv(engine)).out.strip() or "/var/lib"
        shortage = _checkpoint.shortage(root, parameters["must_fit"], free_bytes(Path(root)))
        if shortage:
            module.fail_json(msg=shortage)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
