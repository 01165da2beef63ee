# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A GB10 where there is none: enough of one for vLLM's NVIDIA classes to be built and loaded on a CPU, or on another GPU.

What vLLM asks of the platform is answered for capability 12.1; on a CPU streams and events do nothing; operators of extensions that cannot be
loaded here exist and refuse to run. Config and process groups are made before, as on a CPU.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class _Nothing:
    """A stream, an event, or a device's context."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_args: object) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


class _Operator:
    """An operator of an extension that is not here."""

    def __init__(self, name: str) -> None:
        self._op = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{self._op} does not run on a CPU")

    def __getattr__(self, name: str) -> _Operator:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Operator(f"{self._op}.{name}")


def _no_gpu() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc]
    torch.cuda.current_stream = lambda *_a, **_k: _Nothing()  # type: ignore[assignment]
    torch.cuda.stream = lambda *_a, **_k: _Nothing()  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    properties = types.SimpleNamespace(multi_processor_count=48, name="NVIDIA GB10", total_memory=128 << 30, major=12, minor=1)
    torch.cuda.get_device_properties = lambda *_a, **_k: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_a, **_k: (12, 1)
    torch.accelerator.current_device_index = lambda *_a, **_k: 0


def pretend(vocabulary: int, compressed: int, device: str) -> None:
    """In a process that ends with its test."""
    import vllm._custom_ops
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    from vllm import platforms
    from vllm.models.deepseek_v41.common import engram
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.utils import flashinfer

    if device == "cpu":
        _no_gpu()

    found = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name in ("_C", "_moe_C", "_C_cache_ops", "_deepselect_C", "_flashmla_C") and not name.startswith("__"):
                return _Operator(f"{self.name}::{name}")
            raise

    torch._ops._OpNamespace.__getattr__ = operator  # type: ignore[method-assign]

    platform = platforms.current_platform

    class Gb10(type(platform)):  # type: ignore[misc]
        _enum = PlatformEnum.CUDA
        device_name = "cuda"
        supported_quantization: tuple[str, ...] = ()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(12, 1)

        def is_cuda(self) -> bool:
            return True

        is_cuda_alike = is_cuda

        def is_cpu(self) -> bool:
            return False

    platform.__class__ = Gb10
    flashinfer.has_flashinfer_sparse_mla_sm120_config = lambda *_a, **_k: True
    for name in ("has_deep_gemm", "is_deep_gemm_supported"):
        if hasattr(indexer, name):
            setattr(indexer, name, lambda *_a, **_k: True)
    engram.is_uva_available = lambda: True
    # The map is the real tokenizer's, which is not here.
    engram.build_compressed_token_map = lambda _tokenizer: ([0] * vocabulary, compressed)
    assert vllm._custom_ops
