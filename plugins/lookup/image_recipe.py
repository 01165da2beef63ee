# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recipe of an image, as module image_build takes it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: image_recipe
short_description: The recipe of the serving image, with its stamp
version_added: 0.1.0
description:
  - Packs C(runtime/image), C(runtime/overlay) and C(kernels/exl3) of the collection, or of another folder with the same layout, for
    M(gb10.cluster.image_build). Files that do not go into the image are left out, and change no stamp.
  - Fails where the lock does not pin everything that the build fetches, and tells the command that looks it up.
author: [gb10.cluster contributors (@gb10-cluster)]
options:
  _terms:
    description: The folder; the collection's own unless given, or where its name is given, V(gb10.cluster).
"""

EXAMPLES = r"""
- name: Show the stamp
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.image_recipe').stamp }}"
"""

RETURN = r"""
_raw:
  description: A mapping with C(stamp), C(platform), C(arguments), C(containerfile) and C(context).
  type: list
  elements: dict
"""

import base64
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible_collections.gb10.cluster.plugins.module_utils import _recipe
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
OWN = "gb10.cluster"


def files(root: Path) -> dict[str, _recipe.File]:
    """All files of the folders that are looked through."""
    paths = [path for folder in _recipe.FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): _recipe.File(path.read_bytes(), path.stat().st_mode & 0o100 > 0) for path in paths}


@functools.cache
def recipe(root: Path) -> dict[str, Any]:
    """The recipe below a folder. Raises PlanError."""
    context = _recipe.context(files(root))
    lock, stamp = _recipe.lock(context), _recipe.stamp(context)
    return {
        "stamp": stamp,
        "platform": lock["platform"],
        "arguments": _recipe.arguments(lock, stamp),
        "containerfile": _recipe.CONTAINERFILE,
        "context": base64.b64encode(_recipe.archive(context)).decode("ascii"),
    }


class LookupModule(LookupBase):
    """Door to `recipe`."""

    def run(self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        """One element: the recipe."""
        try:
            return [recipe(Path(terms[0]) if terms and terms[0] != OWN else ROOT)]
        except PlanError as error:
            raise AnsibleError(str(error)) from error
