# SPDX-License-Identifier: Apache-2.0
"""Lines of this package in vLLM's log."""

from __future__ import annotations

from vllm.logger import init_logger

from gb10_vllm.levers import PREFIX

_LOGGER = init_logger("vllm.gb10")  # below vLLM's own logger, or nothing would be printed


def say(text: str) -> None:
    """One line."""
    _LOGGER.info("%s%s", PREFIX, text)
