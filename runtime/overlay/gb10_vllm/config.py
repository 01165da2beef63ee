# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1's configuration with heads that divide by the ranks.

vLLM reads the configuration of target and drafter through this class; `--hf-overrides` would reach the target alone. A config.json that a
tool has padded already, and that says so in `virtual_heads_from`, is taken as it is.
"""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

from gb10_vllm.errors import OverlayError
from gb10_vllm.geometry import padded_groups
from gb10_vllm.levers import VIRTUAL_HEADS

HEADS, GROUPS, FROM = "num_attention_heads", "o_groups", "virtual_heads_from"


def virtual_ranks() -> int:
    """The ranks to pad for; 0 when off. Raises OverlayError."""
    return VIRTUAL_HEADS.amount()


class Gb10DeepseekV41Config(DeepseekV41Config):
    """Reports padded heads and groups, and the real ones in `virtual_heads_from`."""

    def __init__(self, text_config: dict[str, Any] | None = None, vision_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(text_config=text_config, vision_config=vision_config, **kwargs)
        # An EXL3 checkpoint says in its original's settings how the experts that it left alone are stored.
        original = (getattr(self, "quantization_config", None) or {}).get("original_quantization_config") or {}
        if not hasattr(self, "expert_dtype") and "expert_dtype" in original:
            self.expert_dtype = original["expert_dtype"]
        ranks = virtual_ranks()
        groups = getattr(self, GROUPS, 0)
        if ranks < 2 or not groups or groups % ranks == 0:
            return
        real = {HEADS: getattr(self, HEADS), GROUPS: groups}
        if getattr(self, FROM, None):
            raise OverlayError(
                f"config.json has {real[HEADS]} heads in {groups} groups, padded already for other ranks than the {ranks} of "
                f"{VIRTUAL_HEADS.variable}: put its original back"
            )
        heads, groups = padded_groups(real[HEADS], groups, ranks)
        setattr(self, HEADS, heads)
        setattr(self, GROUPS, groups)
        setattr(self, FROM, real)
