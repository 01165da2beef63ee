# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node services as one file."""

from __future__ import annotations

DOCUMENTATION = r"""
name: node_package
short_description: The node services of the collection, packed into one file
version_added: 0.1.0
description:
  - Packs C(runtime/node/gb10_node), and the modules of the core whose rules it shares, into a zip archive that Python runs as it is. The same
    sources give the same bytes on every controller.
author: [gb10.cluster contributors (@gb10-cluster)]
options: {}
"""

EXAMPLES = r"""
- name: Show the size of the package
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.node_package') | length }}"
"""

RETURN = r"""
_raw:
  description: The archive, base64 encoded.
  type: list
  elements: str
"""

import base64
import functools
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.plugins.lookup import LookupBase

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "runtime" / "node"
CORE = ("_errors", "_gate_pass", "_host", "_image", "_padding", "_proof", "_roce", "_sockets", "_start", "_tls")
"""What the node services import from `gb10_core`, which is `plugins/module_utils` here."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest time that a zip archive can name: an archive's bytes follow from its sources alone."""


@functools.cache
def package() -> str:
    """The archive in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        entry = "import runpy\n\nrunpy.run_module('gb10_node', run_name='__main__')\n"
        files = {"__main__.py": entry.encode()} | {
            str(path.relative_to(SOURCES)): path.read_bytes() for path in (SOURCES / "gb10_node").glob("**/*.py")
        }
        # A folder in an archive is no package without this file.
        files |= {"gb10_core/__init__.py": b""} | {
            f"gb10_core/{name}.py": (ROOT / "plugins" / "module_utils" / f"{name}.py").read_bytes() for name in CORE
        }
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content, compress_type=zipfile.ZIP_DEFLATED)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class LookupModule(LookupBase):
    """Door to `package`."""

    def run(self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """One element: the archive."""
        return [package()]
