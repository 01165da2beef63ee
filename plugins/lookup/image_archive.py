# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an image archive on the controller holds."""

from __future__ import annotations

DOCUMENTATION = r"""
name: image_archive
short_description: Which image an archive on the controller holds
version_added: 0.1.0
description:
  - Reads the archive's list and the image's configuration, which takes no time even of a large archive.
author: [gb10.cluster contributors (@gb10-cluster)]
options:
  _terms:
    description: Path of the archive, as C(docker save) or C(podman save) write it.
    required: true
"""

EXAMPLES = r"""
- name: Show the image's id
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.image_archive', '/srv/engine.tar').id }}"
"""

RETURN = r"""
_raw:
  description: A mapping with the image's C(id) and C(content), and the archive's C(size) in bytes.
  type: list
  elements: dict
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible_collections.gb10.cluster.plugins.module_utils import _image


class LookupModule(LookupBase):
    """Door to `_image.archive_of`."""

    def run(self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """One element per archive."""
        try:
            archives = [(path, _image.archive_of(path)) for path in terms]
        except _image.ImageError as error:
            raise AnsibleError(str(error)) from error
        return [{"id": archive.id, "content": archive.content, "size": os.path.getsize(path)} for path, archive in archives]
