# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the layers compute, over ranks, is what dense matrices compute in float64. On a CPU the ops are gb10_exl3's reference; on a GPU they are
its kernels, which take and give bfloat16, alone and replayed from a CUDA graph.

Attention's kernel does not run on a CPU, so its projections are taken one after the other, with nothing between them but each head's own values:
what virtual heads would add to the result, they would add here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gb10_exl3.format import moe

from tests.overlay import checkpoints as made
from tests.overlay import engine

pytestmark = pytest.mark.usefixtures("plugin")
TOKENS = 5
CPU = engine.DEVICE == "cpu"
KIND = torch.float32 if CPU else torch.bfloat16
TOLERANCE = 2e-5 if CPU else 2e-2
"""Of the largest value. On a CPU float32 in, float64 within, float32 out, and sums over ranks in another order; on a GPU each layer of a chain
rounds what it gives to 8 bits."""


def inputs() -> torch.Tensor:
    return torch.randn(TOKENS, made.HIDDEN, generator=torch.Generator().manual_seed(2)).to(KIND)


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """An id of no expert counts for nothing."""
    ids = torch.tensor([[0, 1], [3, 2], [1, 1], [2, -1], [0, 3]])
    return torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(4)), ids


def close(got: Any, wanted: np.ndarray[Any, Any], what: str) -> None:
    error = np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < TOLERANCE, f"{what}: {error:.2g} of the largest value"


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.float().cpu()
    torch.distributed.all_reduce(tensor)
    return tensor


def _beside(tensor: torch.Tensor, count: int) -> torch.Tensor:
    tensor = tensor.float().cpu()
    every = [torch.empty_like(tensor) for _rank in range(count)]
    torch.distributed.all_gather(every, tensor)
    return torch.cat(every, 1)


def _run(method: Any, layer: Any, x: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
    """A layer's method; on a GPU also from a graph, captured with other inputs: what it gives must be the same to the bit."""
    x = x.to(engine.DEVICE)
    result = method(layer, x, *more)
    if not CPU:
        place, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = method(layer, place, *more)
        place.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(again, result), f"{layer.prefix}: a graph's result is another"
    return result


def _computed(rank: int, count: int, port: int, config: Any, kind: str) -> dict[str, Any]:
    with engine.Rank(rank, count, port, config) as one:
        model = one.finished()
        layer = model.language_model.model.layers[2]

        def run(linear: Any, x: torch.Tensor) -> torch.Tensor:
            return _run(linear.quant_method.apply, linear, x)

        x, result = inputs(), {}
        if kind == "all":
            attention = layer.attn
            fused = run(attention.fused_wqa_wkv, x)
            heads = run(attention.wq_b, fused[:, : made.Q_RANK])
            grouped = run(attention.wo_a, heads.view(TOKENS, attention.n_local_groups, -1))
            result["fused"], result["attention"] = fused.float().cpu(), _summed(run(attention.wo_b, grouped.flatten(1)))
            shared = layer.ffn.shared_experts
            gate, up = run(shared.gate_up_proj, x).chunk(2, -1)
            result["shared"] = _summed(run(shared.down_proj, torch.nn.functional.silu(gate) * up))
            result["logits"] = _beside(run(model.language_model.lm_head, x), count)
            wkv = model.language_model.model.layers[1].engram.wkv
            part = run(wkv, x.repeat(1, made.ENGRAM_IN // made.HIDDEN))
            result["engram"] = _beside(part, count)[:, : wkv.tp_size * part.shape[1]]
        experts = layer.ffn.experts.routed_experts
        weights, ids = (tensor.to(engine.DEVICE) for tensor in routing())
        result["experts"] = _summed(_run(experts.quant_method.apply, experts, x, weights, ids, None, None))
        assert experts.swiglu_limit == 10.0
        return {name: value.numpy() for name, value in result.items()}


def expected(tensors: made.Tensors, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    x, name = inputs().double().numpy(), "layers.2"
    weights, ids = routing()
    experts = [
        tuple(made.layer_of(tensors, f"{name}.ffn.experts.{expert}.{role}") for role in ("w1", "w3", "w2"))
        for expert in range(made.EXPERTS)
    ]
    result = {"experts": moe(x, ids.numpy(), weights.double().numpy(), experts, 10.0)}
    if kind != "all":
        return result
    result["fused"] = np.concatenate([x @ made.dense(tensors, f"{name}.attn.{part}") for part in ("wq_a", "wkv")], 1)
    heads = result["fused"][:, : made.Q_RANK] @ made.dense(tensors, f"{name}.attn.wq_b")
    heads = heads.reshape(TOKENS, made.GROUPS, -1)
    slices = [heads[:, group] @ made.dense(tensors, f"{name}.attn.wo_a.slice.{group}") for group in range(made.GROUPS)]
    result["attention"] = np.concatenate(slices, 1) @ made.dense(tensors, f"{name}.attn.wo_b")
    gate, up = (x @ made.dense(tensors, f"{name}.ffn.shared_experts.{part}") for part in ("w1", "w3"))
    result["shared"] = (gate / (1 + np.exp(-gate)) * up) @ made.dense(tensors, f"{name}.ffn.shared_experts.w2")
    result["logits"] = x @ made.dense(tensors, "head")
    result["engram"] = np.tile(x, made.ENGRAM_IN // made.HIDDEN) @ made.dense(tensors, "layers.1.engram.wkv")
    return result


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["experts", "all"])
def test_layers(checkpoint: Any, kind: str, count: int) -> None:
    folder, tensors = checkpoint(kind)
    environment = {"GB10_VIRTUAL_TP": str(count)} if made.GROUPS % count else {}
    got = engine.run(count, _computed, folder, kind, **environment)
    for name, wanted in expected(tensors, kind).items():
        for rank, one in enumerate(got):
            have = one[name][:, : wanted.shape[1]] if name == "logits" else one[name]
            close(have, wanted, f"{name}, rank {rank} of {count}")


@pytest.mark.parametrize("count", [3])
def test_native_projections_with_virtual_heads(checkpoint: Any, count: int) -> None:
    """FP8 layers have no kernel here: their loaded parameters are multiplied as plain matrices, and come to what the checkpoint's do."""
    folder, tensors = checkpoint("native")
    got = engine.run(count, engine.loaded, folder, GB10_VIRTUAL_TP=str(count))

    def plain(weight: Any, scale: Any, rows: int) -> np.ndarray[Any, Any]:
        values = torch.as_tensor(weight).view(torch.float8_e4m3fn).double()
        powers = torch.exp2(torch.as_tensor(scale).double() - 127).repeat_interleave(32, 1).repeat_interleave(rows, 0)
        return (values * powers).numpy()

    name, x = "layers.0.attn", torch.randn(TOKENS, made.Q_RANK, generator=torch.Generator().manual_seed(6)).double().numpy()

    def project(wq_b: Any, wo_a: Any, wo_b: Any) -> np.ndarray[Any, Any]:
        groups = wo_a.shape[0] // made.O_RANK
        heads = (x @ wq_b.T).reshape(TOKENS, groups, -1)
        per_group = wo_a.reshape(groups, made.O_RANK, -1)
        grouped = np.concatenate([heads[:, group] @ per_group[group].T for group in range(groups)], 1)
        return grouped @ wo_b.T

    own = [
        plain(engine.raw(tensors[f"{name}.{part}.weight"]), engine.raw(tensors[f"{name}.{part}.scale"]), 32)
        for part in ("wq_b", "wo_a", "wo_b")
    ]
    wanted = project(*own)
    prefix = f"language_model.model.{name}"
    parts = [
        [plain(one[f"{prefix}.{part}.weight"], one[f"{prefix}.{part}.weight_scale"], 1) for part in ("wq_b", "wo_a", "wo_b")] for one in got
    ]
    close(sum(project(*part) for part in parts), wanted, "projections")


def _qkv(rank: int, count: int, port: int, config: Any, folder: Path) -> Any:
    with engine.Rank(rank, count, port, config):
        from gb10_vllm.exl3.config import Exl3Config
        from vllm.model_executor.layers.linear import QKVParallelLinear

        quantization = Exl3Config({"quant_method": "exl3", "bits": 4})
        quantization.maybe_update_config(str(folder))
        quantization.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        with torch.device(engine.DEVICE):
            layer = QKVParallelLinear(256, 128, 4, 1, bias=False, quant_config=quantization, prefix="model.layers.0.self_attn.qkv_proj")
        from safetensors.torch import load_file

        for name, tensor in load_file(folder / "model.safetensors").items():
            shard, part = name.removeprefix("model.layers.0.self_attn.").split(".")
            parameter = getattr(layer, part)
            parameter.weight_loader(parameter, tensor, shard[0])
        layer.quant_method.process_weights_after_loading(layer)
        return _run(layer.quant_method.apply, layer, inputs()).float().cpu().numpy()


@pytest.mark.parametrize("count", [1, 2])
def test_heads_of_keys_that_ranks_share(checkpoint: Any, tmp_path: Path, count: int) -> None:
    """Four heads of queries and one of keys: q is split, k and v are whole in each rank; each of other bits and codebook."""
    from safetensors.torch import save_file

    make, tensors = made.Maker(8), {}
    for part, outputs, bits in (("q", 512, 4), ("k", 128, 5), ("v", 128, 2.5)):
        tensors |= make.exl3(f"model.layers.0.self_attn.{part}_proj", outputs, 256, bits)
    save_file(tensors, tmp_path / "model.safetensors")
    x = inputs().double().numpy()
    q, k, v = (x @ made.dense(tensors, f"model.layers.0.self_attn.{part}_proj") for part in "qkv")
    outer, _tensors = checkpoint("native")
    for rank, got in enumerate(engine.run(count, _qkv, outer, tmp_path)):
        wanted = np.concatenate([np.split(q, count, 1)[rank], k, v], 1)
        close(got, wanted, f"rank {rank}")


def _lacking(rank: int, count: int, port: int, config: Any, name: str) -> str:
    with engine.Rank(rank, count, port, config) as one:
        from vllm.model_executor.model_loader import weight_utils

        read = weight_utils.safetensors_weights_iterator
        weight_utils.safetensors_weights_iterator = lambda *given: (item for item in read(*given) if item[0] != name)
        try:
            one.finished()
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("all", "layers.1.attn.wq_b.suh", r"layers\.1\.attn\.wq_b: \(0, 'suh'\) was in no file"),
        ("experts", "layers.2.ffn.experts.3.w3.trellis", r"layers\.2\.ffn\.experts: \(3, 'w3', 'trellis'\) was in no file"),
        ("experts", "layers.1.engram.embed.weight", r"has \S+layers\.1\.engram\.embed_tokens\.weight: set GB10_ENGRAM_DIR to the folder"),
        ("all", "layers.0.attn.wo_a.slice.4.svh", r"layers\.0\.attn\.wo_a\.svh is not whole in the checkpoint's files"),
    ],
)
def test_a_tensor_that_never_comes_is_no_memory_of_something_else(checkpoint: Any, kind: str, name: str, sentence: str) -> None:
    folder, _tensors = checkpoint(kind)
    (said,) = engine.run(1, _lacking, folder, name)
    assert re.search(sentence, said), said
