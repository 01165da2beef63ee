# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all unit tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# A loaded machine is slow, not wrong: no test here asserts a time, so no example has a deadline either. A run has the same examples each time, so that
# what passed passes; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("project", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))
