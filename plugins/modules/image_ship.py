#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image, loaded from an archive that lies on this member."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_ship
short_description: Load a container image from an archive and prove which image it is
version_added: 0.1.0
description:
  - Loads the image unless the engine has it, gives it its name, and proves that the name leads to the expected id.
  - An archive of another image is refused before it is loaded.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
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
    description: The image's id, the SHA-256 of its configuration, in hex.
    type: str
  archive:
    description: Path of the archive on this member, as C(docker save) or C(podman save) write it.
    type: path
  state:
    description: V(present) loads the image, V(absent) takes the name away, and the image where it has no other.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gb10.cluster.image_info
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
  description: The image's id, in hex; empty for O(state=absent).
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _image

LOAD_TIMEOUT_S = 3600
"""22 GB of layers to a disk that writes 10 MB/s."""


class Engine:
    """The engine's commands; one that fails ends the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self._program = module.params["engine"]

    def image(self, name: str) -> _image.Image | None:
        """The image of this reference or id."""
        try:
            return _image.inspected(self._program, _host.run(_image.inspect_argv(self._program, name)))
        except _image.ImageError as error:
            self._module.fail_json(msg=str(error))

    def load(self, archive: str, wanted: str) -> None:
        """Load an archive that holds the wanted image."""
        try:
            held = _image.archive_id(archive)
        except _image.ImageError as error:
            self._module.fail_json(msg=str(error))
        if held != wanted:
            self._module.fail_json(msg=f"{archive} holds image {held}, expected {wanted}: give the archive and the id that belong together")
        self.do("load", "--input", archive)

    def do(self, *arguments: str) -> None:
        """Run a command that changes something."""
        done = _host.run([self._program, *arguments], timeout=LOAD_TIMEOUT_S)
        if done.status:
            command = f"{self._program} {' '.join(arguments)}"
            self._module.fail_json(msg=f"{command} failed ({done.message}): run it on this member to see more")


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
    engine = Engine(module)
    named = engine.image(reference)
    before = named.id if named else ""
    actions = []
    if before != wanted:
        must_load = present and not engine.image(wanted)
        actions = [f"load {archive}"] if must_load else []
        actions.append(f"name {wanted} {reference}" if present else f"remove {reference}")
        if not module.check_mode:
            if must_load:
                engine.load(archive, wanted)
            engine.do("image", *(("tag", wanted, reference) if present else ("rm", reference)))
            verdict = _image.verdict(reference, engine.image(reference), wanted)
            if present and verdict:
                module.fail_json(msg=verdict)
    diff = {"before": f"{reference} {before}\n", "after": f"{reference} {wanted}\n"}
    module.exit_json(changed=bool(actions), actions=actions, ok=present, id=wanted, diff=diff)


if __name__ == "__main__":
    main()
