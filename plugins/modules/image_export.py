#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An image of this member, laid out as files for other members."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_export
short_description: Lay a container image out as files, so that only layers which other members lack travel to them
version_added: 0.1.0
description:
  - Saves the image and keeps its configuration and the layers named, one file each, with an index. M(gb10.cluster.image_ship) loads such a folder
    where the engine has the other layers.
  - What an earlier export left in the folder is replaced. The same image gives the same files.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.ENGINE]
attributes:
  check_mode:
    support: full
    details:
      - Returns no manifest.
  diff_mode:
    support: N/A
    details:
      - The files are a copy of what the engine has.
  idempotent:
    support: none
    details:
      - It exports whenever it is asked to.
options:
  id:
    description: The engine's id of the image.
    type: str
    required: true
  layers:
    description: The layers to keep, by the SHA-256 of their unpacked content.
    type: list
    elements: str
    required: true
  directory:
    description: The folder.
    type: path
    required: true
seealso:
  - module: gb10.cluster.image_info
  - module: gb10.cluster.image_ship
"""

EXAMPLES = r"""
- name: Lay the image out for members that have its base
  gb10.cluster.image_export:
    engine: docker
    id: 0f3e62b0c2b7a4a0e0d6d4a0c7a6f7f4f37d2a5f2c1d8c3c1c1b0a9f8e7d6c5b
    layers: [5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef]
    directory: /var/lib/gb10/images/engine
"""

RETURN = r"""
manifest:
  description: The files with size and SHA-256, as for M(gb10.cluster.checkpoint_verify).
  returned: success, unless in check mode
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils._checkpoint import shortage
from ..module_utils._engine import Engine
from ..module_utils._image import ImageError
from ..module_utils._survey import free_bytes, read_file


def main() -> None:
    """See that it fits, export, hash."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "id": {"type": "str", "required": True},
            "layers": {"type": "list", "elements": "str", "required": True},
            "directory": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=True)
    engine, folder = Engine(module.params["engine"]), Path(module.params["directory"])
    try:
        image = engine.image(module.params["id"])
        lack = shortage(str(folder), image.size if image else 0, free_bytes(folder))
        if lack:
            raise ImageError(lack)
        engine.export(module.params["id"], folder, module.params["layers"])
    except ImageError as error:
        module.fail_json(msg=str(error))
    found = [(path.name, read_file(path)[0]) for path in sorted(folder.iterdir())]
    files = [{"path": name, "size": each.size, "sha256": each.sha256} for name, each in found]
    module.exit_json(changed=True, manifest={"version": 1, "files": files})


if __name__ == "__main__":
    main()
