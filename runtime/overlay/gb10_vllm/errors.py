# SPDX-License-Identifier: Apache-2.0
"""What ends the engine on purpose."""

from __future__ import annotations


class OverlayError(RuntimeError):
    """One sentence: what is wrong, where, what to do."""
