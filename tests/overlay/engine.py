# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank does: vLLM's own configuration, process groups, model and weight loaders, with the plugin that is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# Ranks are forked: their parent must not begin with CUDA.
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_TARGET_DEVICE="cpu", VLLM_USE_V2_MODEL_RUNNER="1", PYTORCH_NVML_BASED_CUDA_CHECK="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), TOKENIZERS_PARALLELISM="false",
    **({} if os.environ.get("GB10_TEST_DEVICE") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
)  # fmt: skip

import torch

torch.set_num_threads(1)

from tests.overlay import gb10, models, ranks  # noqa: E402

DEVICE = os.environ.get("GB10_TEST_DEVICE", "cpu")
"""Where layers are and compute: `cuda` for the kernels themselves, all ranks on one GPU (tests/gpu/overlay.sh)."""
if DEVICE == "cuda":
    from vllm.platforms import current_platform

    type(current_platform).dispatch_key = "CUDA"  # whose vLLM's own operators are, from their import on
SPECULATION = {"method": "dspark", "num_speculative_tokens": 5}


def configured(folder: Path, ranks: int, **more: Any) -> Any:
    """vLLM's configuration of a folder."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "speculative_config": dict(SPECULATION)}
    arguments |= {"engram_config": {"cpu_offload": False}, **more}  # there is no memory to pin here
    return EngineArgs(model=str(folder), tensor_parallel_size=ranks, **arguments).create_engine_config()


def run(count: int, function: Callable[..., Any], folder: Path, *arguments: Any, **environment: str) -> list[Any]:
    """`function(rank, count, port, config, *arguments)` in each rank. The configuration, the same for all, is made once, as ranks would make it."""
    with mock.patch.dict(os.environ, environment):
        return ranks.run(count, function, configured(folder, count), *arguments)


def quantized(kind: str, native: Any) -> Any:
    """vLLM's quantization of the full-size model of a kind, without its files; `native` is that of the layers that are not EXL3."""
    from gb10_vllm.exl3.checkpoint import Matrix
    from gb10_vllm.exl3.config import Exl3Config

    quantization = Exl3Config({"quant_method": "exl3", "bits": 4})
    quantization.matrices = {name: Matrix(name, *sizes, "mul1") for name, sizes in models.matrices(kind).items()}
    quantization.names = {name: name for name in quantization.matrices}
    quantization.v41_layers = models.FULL_TEXT["num_hidden_layers"]
    if kind == "experts":
        quantization.native = native
        quantization.weight_block_size = [32, 32]
    return quantization


class Rank:
    """A rank from its configuration on; `with Rank(...) as rank` has its process groups, and a GB10."""

    def __init__(self, rank: int, count: int, port: int, config: Any) -> None:
        self.place, self.count, self.port, self.config = rank, count, port, config
        self.config.parallel_config.rank = rank

    def __enter__(self) -> Rank:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state

        self._current = set_current_vllm_config(self.config)
        self._current.__enter__()
        parallel_state.init_distributed_environment(self.count, self.place, f"tcp://127.0.0.1:{self.port}", 0, "gloo")
        parallel_state.initialize_model_parallel(self.count, 1, backend="gloo")
        text = self.config.model_config.hf_config
        gb10.pretend(text.vocab_size, text.engram_compressed_vocab_size, DEVICE)
        self.config.kernel_config.enable_jit_warmup = False
        if self.config.quant_config is None or self.config.quant_config.get_name() == "fp8":
            # On a CPU vLLM takes the generic FP8; a GB10 would get DeepSeek's.
            from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

            self.config.quant_config = DeepseekV4FP8Config.from_config(text.quantization_config)
        return self

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)

    def build(self, draft: bool = False, device: str = DEVICE) -> torch.nn.Module:
        """The target, or the drafter."""
        from vllm.model_executor.models import ModelRegistry

        config = self.config.speculative_config.draft_model_config if draft else self.config.model_config
        model, _architecture = ModelRegistry.resolve_model_cls(config.architectures, config)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                return model(vllm_config=self.config, prefix="")
        finally:
            torch.set_default_dtype(torch.float32)

    def load(self, model: torch.nn.Module) -> set[str]:
        """Through vLLM's filter of files and its iterator, as its loader does."""
        from vllm.model_executor.model_loader import weight_utils

        folder = Path(self.config.model_config.model)
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        if hasattr(model, "is_unused_checkpoint_weight"):
            files = weight_utils.filter_safetensors_files_by_weight_name(files, model.is_unused_checkpoint_weight)
        self.opened = [Path(file).name for file in files]
        return model.load_weights(weight_utils.safetensors_weights_iterator(files, False))

    def finished(self) -> torch.nn.Module:
        """The target with its weights, as vLLM leaves it."""
        model = self.build()
        self.load(model)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if type(method).__name__.startswith("Exl3"):
                method.process_weights_after_loading(module)
        return model


def raw(tensor: torch.Tensor) -> Any:
    """A tensor as numpy, types that numpy lacks as their bytes."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy()
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def loaded(rank: int, count: int, port: int, config: Any, draft: bool = False) -> dict[str, Any]:
    """Every parameter of a rank after loading."""
    with Rank(rank, count, port, config) as one:
        model = one.build(draft)
        one.load(model)
        return {name: raw(parameter) for name, parameter in model.named_parameters() if "vision" not in name and "aligner" not in name}
