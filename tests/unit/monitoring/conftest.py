# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node services are no installed package: the two that lie in the packed file, linked side by side."""

from __future__ import annotations

import sys

from tests.unit.node.packages import PACKAGES

sys.path.insert(0, str(PACKAGES))
