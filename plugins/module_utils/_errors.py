# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one error of the core."""

from __future__ import annotations


class PlanError(ValueError):
    """Input that no plan can be made from; the message is one sentence: what is wrong, where, and what to do."""
