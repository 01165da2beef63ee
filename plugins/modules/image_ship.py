#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image, loaded from an archive or a folder that lies on this member."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_ship
short_description: Load a container image from an archive and prove which image it is
version_added: 0.1.0
description:
  - Loads the image unless the engine has it, gives it its name, and proves that the name leads to the expected id.
  - An archive of another image is refused before it is loaded.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL, gb10.cluster._attributes.ENGINE]
options:
  reference:
    description: The image's name with its tag.
    type: str
    required: true
  id:
    description: The image's id, the SHA-256 of its configuration, or its content as M(gb10.cluster.image_info) tells it, in hex.
    type: str
  archive:
    description:
      - Path of the archive on this member, as C(docker save) or C(podman save) write it, or of a folder that M(gb10.cluster.image_export) made. The
        folder may lack layers that the engine has.
    type: path
  state:
    description: V(present) loads the image, V(absent) takes the name away, and the image where it has no other.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gb10.cluster.image_info
  - module: gb10.cluster.image_export
"""

EXAMPLES = r"""
- name: Load the engine's image
  gb10.cluster.image_ship:
    engine: podman
    reference: localhost/gb10-lab-engine:0.32.0
    id: 0f3e62b0c2b7a4a0e0d6d4a0c7a6f7f4f37d2a5f2c1d8c3c1c1b0a9f8e7d6c5b
    archive: /var/lib/gb10/images/engine.tar
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
ok:
  description: Whether the name leads to the image, or would outside of check mode.
  returned: always
  type: bool
id:
  description: The engine's id of the image, in hex; empty for O(state=absent).
  returned: always
  type: str
content:
  description: The image's content as M(gb10.cluster.image_info) tells it; empty for O(state=absent), and in check mode where it is not loaded yet.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _image
from ..module_utils._engine import Engine, held_by


def load(engine: Engine, module: AnsibleModule, wanted: str) -> _image.Image:
    """The wanted image, loaded from an archive that holds it."""
    archive = Path(module.params["archive"])
    held = held_by(archive)
    if wanted not in (held.id, held.content):
        raise _image.ImageError(f"{archive} holds image {held.id}, expected {wanted}: give the archive and the id that belong together")
    engine.load(archive, module.params["reference"])
    # An engine whose ids are not the configuration's has it under its name.
    for name in (held.id, module.params["reference"]):
        image = engine.image(name)
        if image and image.content == held.content:
            return image
    raise _image.ImageError(
        f"{archive} was loaded, and {engine.program} has no image {held.id} of its content: load it on this member to see more"
    )


def main() -> None:
    """Compare, load, name, prove."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "id": {"type": "str"},
            "archive": {"type": "path"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("id", "archive"))],
        supports_check_mode=True,
    )
    reference, archive = module.params["reference"], module.params["archive"]
    present = module.params["state"] == "present"
    wanted = _image.plain_id(module.params["id"] or "") if present else ""
    engine = Engine(module.params["engine"])
    actions = []
    try:
        named = engine.image(reference)
        result = named.id if named else ""
        image = named if present else None
        right = (named is not None and _image.is_wanted(named, wanted)) if present else not named
        if not right:
            # Its name may have been taken away, or given to another.
            image = engine.image(wanted) if present else None
            actions = [f"load {archive}"] if present and not image else []
            actions.append(f"name {wanted} {reference}" if present else f"remove {reference}")
            if not module.check_mode and present:
                image = image or load(engine, module, wanted)
                engine.do("image", "tag", image.id, reference)
                verdict = _image.verdict(reference, engine.image(reference), wanted)
                if verdict:
                    raise _image.ImageError(verdict)
            elif not module.check_mode:
                engine.do("image", "rm", reference)
            result = image.id if image else wanted
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    diff = _image.diff(reference, named, result if present else "")
    content = image.content if image else ""
    module.exit_json(changed=bool(actions), actions=actions, ok=present, id=result if present else "", content=content, diff=diff)


if __name__ == "__main__":
    main()
