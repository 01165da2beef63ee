# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder for PYTHONPATH with the packages of the node services as the packed file has them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(tempfile.mkdtemp(prefix="gb10-node-"))
(PACKAGES / "gb10_node").symlink_to(ROOT / "runtime" / "node" / "gb10_node")
(PACKAGES / "gb10_core").symlink_to(ROOT / "plugins" / "module_utils")
atexit.register(shutil.rmtree, PACKAGES)
