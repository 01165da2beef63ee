# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each tensor of a checkpoint arrives in each rank: whole, in its part, padded where sizes do not divide. Real loaders, real ranks over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.overlay import checkpoints as made
from tests.overlay import engine, ranks

pytestmark = pytest.mark.usefixtures("plugin")
Array = np.ndarray[Any, Any]
TARGET = "language_model.model."


def parts(values: Array, count: int, dim: int) -> list[Array]:
    """Equal parts of a side that is filled with zeros up to them."""
    size = -(-values.shape[dim] // count)
    width = [(0, size * count - length if axis == dim else 0) for axis, length in enumerate(values.shape)]
    return np.split(np.pad(values, width), count, dim)


def blocks(values: Array, count: int, dim: int, unit: int) -> list[Array]:
    """The same in whole blocks of 128 elements, of which `unit` entries of this side are one."""
    per_rank = -(-values.shape[dim] // unit // count) * unit
    width = [(0, per_rank * count - length if axis == dim else 0) for axis, length in enumerate(values.shape)]
    return np.split(np.pad(values, width), count, dim)


def grouped(values: Array, count: int, dim: int, repeat: bool, zero: int = 0) -> list[Array]:
    """Parts of the output groups; those that are invented repeat the last or are `zero`."""
    group = values.shape[dim] // made.GROUPS
    more = -made.GROUPS % count
    last = np.take(values, range(values.shape[dim] - group, values.shape[dim]), dim)
    extra = [last if repeat else np.full_like(last, zero)] * more
    return np.split(np.concatenate([values, *extra], dim), count, dim)


class Expectation:
    """What the ranks must have, from the checkpoint's tensors."""

    def __init__(self, tensors: made.Tensors, count: int) -> None:
        self.tensors, self.count = tensors, count
        self.wanted: dict[str, list[Array]] = {}

    def raw(self, name: str) -> Array:
        return engine.raw(self.tensors[name])

    def same(self, parameter: str, name: str) -> None:
        self.wanted[parameter] = [self.raw(name)] * self.count

    def native_attention(self, parameter: str, name: str) -> None:
        fused = [self.raw(f"{name}.{part}.weight") for part in ("wq_a", "wkv")]
        self.wanted[f"{parameter}.fused_wqa_wkv.weight"] = [np.concatenate(fused)] * self.count
        for part, dim, repeat in (("wq_b", 0, True), ("wo_a", 0, True), ("wo_b", 1, False)):
            weight, scale = self.raw(f"{name}.{part}.weight"), self.raw(f"{name}.{part}.scale")
            self.wanted[f"{parameter}.{part}.weight"] = grouped(weight, self.count, dim, repeat)
            # vLLM keeps one scale for each row and 32 columns.
            scales = grouped(np.repeat(scale, 32, 0), self.count, dim, repeat, 127)
            self.wanted[f"{parameter}.{part}.weight_scale"] = scales

    def sinks(self, parameter: str, name: str) -> None:
        sink = self.raw(f"{name}.attn_sink")
        more = made.HEADS // made.GROUPS * (-made.GROUPS % self.count)
        each = np.split(np.concatenate([sink, np.full(more, -np.inf, np.float32)]), self.count)
        room = next(size for size in (8, 16, 32, 64, 128) if size >= len(each[0]))  # heads of the kernel
        self.wanted[f"{parameter}.attn_sink"] = [np.concatenate([one, np.full(room - len(one), -np.inf, np.float32)]) for one in each]

    def exl3(self, parameter: str, names: list[str], split: Callable[[Array, int, int], list[Array]] | None, side: str = "") -> None:
        """A linear layer of one or more matrices; `split` divides outputs or inputs (`side`) given the size of a block."""
        pieces: dict[str, list[list[Array]]] = {"trellis": [], "suh": [], "svh": []}
        for name in names:
            for part, dim, unit in (("trellis", 1 if side == "out" else 0, 8), ("suh", 0, 128), ("svh", 0, 128)):
                values = self.raw(f"{name}.{part}")
                divided = split is not None and part in ("trellis", {"out": "svh", "in": "suh"}[side])
                pieces[part].append(split(values, dim, unit) if divided and split else [values] * self.count)
        for rank in range(self.count):
            flat = np.concatenate([one[rank].reshape(-1) for one in pieces["trellis"]])
            for part, value in (
                ("trellis", flat),
                ("suh", np.stack([one[rank] for one in pieces["suh"]])),
                ("svh", np.concatenate([one[rank] for one in pieces["svh"]])),
            ):
                self.wanted.setdefault(f"{parameter}.{part}", []).append(value)

    def exl3_attention(self, parameter: str, name: str) -> None:
        self.exl3(f"{parameter}.fused_wqa_wkv", [f"{name}.wq_a", f"{name}.wkv"], None)
        self.exl3(f"{parameter}.wq_b", [f"{name}.wq_b"], lambda v, dim, _unit: grouped(v, self.count, dim, True), "out")
        self.exl3(f"{parameter}.wo_b", [f"{name}.wo_b"], lambda v, dim, _unit: grouped(v, self.count, dim, False), "in")
        for part in ("trellis", "suh", "svh"):
            stack = np.stack([self.raw(f"{name}.wo_a.slice.{index}.{part}") for index in range(made.GROUPS)])
            self.wanted[f"{parameter}.wo_a.{part}"] = grouped(stack, self.count, 0, True)

    def exl3_mlp(self, parameter: str, name: str) -> None:
        def split(values: Array, dim: int, unit: int) -> list[Array]:
            return blocks(values, self.count, dim, unit)

        self.exl3(f"{parameter}.gate_up_proj", [f"{name}.w1", f"{name}.w3"], split, "out")
        self.exl3(f"{parameter}.down_proj", [f"{name}.w2"], split, "in")

    def exl3_experts(self, parameter: str, name: str) -> None:
        for stem, parts_of, dim in (("w13", ("w1", "w3"), 1), ("w2", ("w2",), 0)):
            for part, at, unit in (("trellis", dim, 8), ("svh" if dim else "suh", 0, 128), ("suh" if dim else "svh", None, 0)):
                by_role = []
                for role in parts_of:
                    values = [self.raw(f"{name}.{expert}.{role}.{part}") for expert in range(made.EXPERTS)]
                    split = [[one] * self.count if at is None else blocks(one, self.count, at, unit) for one in values]
                    by_role.append([np.stack([one[rank] for one in split]) for rank in range(self.count)])
                each = [np.stack([role[rank] for role in by_role]) if stem == "w13" else by_role[0][rank] for rank in range(self.count)]
                self.wanted[f"{parameter}.{stem}_{part}"] = each


def check(expected: Expectation, got: list[dict[str, Array]]) -> None:
    for name, values in expected.wanted.items():
        for rank, value in enumerate(values):
            have = got[rank][name]
            assert have.shape == value.shape, f"rank {rank}: {name} is {have.shape}, not {value.shape}"
            np.testing.assert_array_equal(have, value, err_msg=f"rank {rank}: {name}")


def environment(count: int) -> dict[str, str]:
    return {"GB10_VIRTUAL_TP": str(count)} if made.GROUPS % count else {}


def target(kind: str, tensors: made.Tensors, count: int) -> Expectation:
    expected = Expectation(tensors, count)
    for layer in range(3):
        own, name = f"{TARGET}layers.{layer}", f"layers.{layer}"
        expected.sinks(f"{own}.attn", f"{name}.attn")
        if kind == "all":
            expected.exl3_attention(f"{own}.attn", f"{name}.attn")
            expected.exl3_mlp(f"{own}.ffn.shared_experts", f"{name}.ffn.shared_experts")
        else:
            expected.native_attention(f"{own}.attn", f"{name}.attn")
        if kind != "native":
            expected.exl3_experts(f"{own}.ffn.experts.routed_experts", f"{name}.ffn.experts")
        expected.same(f"{own}.ffn.gate.weight", f"{name}.ffn.gate.weight")
    engram = "layers.1.engram.wkv"
    splits = made.ENGRAM_OUT % (128 * count) == 0
    if kind == "all":
        expected.exl3(
            f"{TARGET}{engram}", [engram], (lambda v, dim, unit: blocks(v, count, dim, unit)) if splits else None, "out" if splits else ""
        )
    else:
        weight = expected.raw(f"{engram}.weight")
        expected.wanted[f"{TARGET}{engram}.weight"] = parts(weight, count, 0) if splits else [weight] * count
    return expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["native", "experts", "all"])
def test_the_target(checkpoint: Any, kind: str, count: int) -> None:
    folder, tensors = checkpoint(kind)
    got = engine.run(count, engine.loaded, folder, **environment(count))
    check(target(kind, tensors, count), got)
    vocabulary(kind, tensors, got)


def vocabulary(kind: str, tensors: made.Tensors, got: list[dict[str, Array]]) -> None:
    """Rows of embedding and head come one rank after the other; what is beyond the vocabulary is nobody's."""
    embedding = np.concatenate([one[f"{TARGET}embed_tokens.weight"] for one in got])
    np.testing.assert_array_equal(embedding[: made.VOCABULARY], engine.raw(tensors["embed.weight"]))
    if kind == "all":
        svh = np.concatenate([one["language_model.lm_head.svh"] for one in got])
        np.testing.assert_array_equal(svh[: made.VOCABULARY], engine.raw(tensors["head.svh"]))
        assert not svh[made.VOCABULARY :].any()
    else:
        head = np.concatenate([one["language_model.lm_head.weight"] for one in got])
        np.testing.assert_array_equal(head[: made.VOCABULARY], engine.raw(tensors["head.weight"]))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["native", "all"])
def test_the_drafter(checkpoint: Any, kind: str, count: int) -> None:
    folder, tensors = checkpoint(kind)
    got = engine.run(count, engine.loaded, folder, True, **environment(count))
    expected = Expectation(tensors, count)
    own, name = "model.layers.0", "mtp.0"
    expected.sinks(f"{own}.attn", f"{name}.attn")
    if kind == "all":
        expected.exl3_attention(f"{own}.attn", f"{name}.attn")
        expected.exl3_mlp(f"{own}.ffn.shared_experts", f"{name}.ffn.shared_experts")
        expected.exl3_experts(f"{own}.ffn.experts.routed_experts", f"{name}.ffn.experts")
        expected.exl3("model.main_proj", ["mtp.0.main_proj"], None)
    else:
        expected.native_attention(f"{own}.attn", f"{name}.attn")
        expected.same("model.main_proj.weight", "mtp.0.main_proj.weight")
    check(expected, got)


def test_what_vllm_keeps_dense_is_decoded(checkpoint: Any) -> None:
    folder, tensors = checkpoint("all")
    (got,) = engine.run(1, engine.loaded, folder)
    fused = np.concatenate([made.layer_of(tensors, f"layers.2.attn.compressor.{part}").dense().T for part in ("wkv", "wgate")])
    for name, dense in (
        ("compressor.fused_wkv_wgate", fused),
        ("indexer.wk", made.layer_of(tensors, "layers.2.attn.indexer.wk").dense().T),
    ):
        have, wanted = (
            torch.from_numpy(got[f"{TARGET}layers.2.attn.{name}.weight"]).view(torch.bfloat16),
            torch.from_numpy(dense).bfloat16(),
        )
        if engine.DEVICE == "cpu":
            assert torch.equal(have, wanted), name
        else:  # the kernel rotates in half precision
            torch.testing.assert_close(have, wanted, rtol=2**-6, atol=2**-9 * float(wanted.abs().max()))


def _keys(rank: int, count: int, port: int, config: Any) -> Any:
    with engine.Rank(rank, count, port, config) as one:
        model = one.build()
        one.load(model)
        return engine.raw(model.get_parameter(f"{TARGET}layers.2.attn.indexer.wk.weight"))


def test_a_server_without_images_decodes_it_too(checkpoint: Any) -> None:
    """Where images are turned off, what they need comes first among the parameters, and has no memory."""
    folder, tensors = checkpoint("all")
    (got,) = ranks.run(1, _keys, engine.configured(folder, 1, limit_mm_per_prompt={"image": 0}))
    wanted = torch.from_numpy(made.layer_of(tensors, "layers.2.attn.indexer.wk").dense().T).bfloat16()
    torch.testing.assert_close(torch.from_numpy(got).view(torch.bfloat16), wanted, rtol=2**-6, atol=2**-9 * float(wanted.abs().max()))
