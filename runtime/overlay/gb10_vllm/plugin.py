# SPDX-License-Identifier: Apache-2.0
"""What `register()` does: check vLLM, then put this package's names where vLLM looks names up.

Nothing happens for a model that none of these names belongs to: classes of layers, which are replaced by name, are replaced when the class of
DeepSeek V4.1 is built, and not before.
"""

from __future__ import annotations

from gb10_vllm import qualification

MODEL_TYPE = "deepseek_v41"
ARCHITECTURES = {
    "DeepseekV41ForCausalLM": "gb10_vllm.model:Gb10DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "gb10_vllm.model:Gb10DSparkDeepseekV4ForCausalLM",
}

_registered = False


def register() -> None:
    """Raises OverlayError, which ends the process, for a vLLM or a setting that this package cannot stand for."""
    global _registered
    if _registered:
        return
    version, folder = qualification.installed()
    qualification.check(version, folder, qualification.table())

    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.transformers_utils import config as configs

    from gb10_vllm.config import Gb10DeepseekV41Config, virtual_ranks
    from gb10_vllm.exl3.config import Exl3Config

    virtual_ranks()
    if current_platform.is_cpu():
        import gb10_vllm.reference  # noqa: F401
    configs._CONFIG_REGISTRY[MODEL_TYPE] = Gb10DeepseekV41Config
    register_quantization_config("exl3")(Exl3Config)
    for architecture, path in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, path)
    _registered = True
