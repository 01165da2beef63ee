# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all unit tests share."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine is slow, not wrong: no test here asserts a time, so no example has a deadline either.
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")
