# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
