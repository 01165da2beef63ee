# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin. This module imports nothing, so that it cannot fail.

vLLM logs and ignores what a plugin raises while it is imported; what its function raises ends the process. So every check is in there.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, in some more than once."""
    from gb10_vllm import plugin

    plugin.register()
