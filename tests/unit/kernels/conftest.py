# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernels' package is not installed: its tests find it in the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/exl3"))
