# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ops against a reference in float64 on the same GPU, which itself is held against the numpy one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from gb10_exl3 import ops, selfcheck
from gb10_exl3.format import CODEBOOKS, RATES, FormatError, codebook, hadamard, ring_order, widths
from gb10_exl3.selfcheck import cuda
from torch import Tensor

OPS = torch.ops.gb10_exl3
CASES = [(bits, name) for bits, name in product(RATES, CODEBOOKS) if name == "mul1" or bits % 1 == 0]
# Inputs are rounded to half after the rotation, results to the type of the activations: half an ulp of each at most.
BOUND = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}


@dataclass
class Matrix:
    """A random layer on the GPU."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: str

    @classmethod
    def random(cls, k: int, n: int, bits: float, name: str = "mul1") -> Matrix:
        trellis = torch.randint(-32768, 32767, (k // 16, n // 16, int(16 * bits)), dtype=torch.int16, device="cuda")
        signs = [torch.sign(torch.rand(size, device="cuda") - 0.5) * (0.5 + torch.rand(size, device="cuda")) for size in (k, n)]
        return cls(trellis, (signs[0] * k**-0.5).half(), signs[1].half(), name)

    def rotated(self) -> Tensor:
        """[k, n] halves."""
        words = self.trellis.to(torch.int64) & 0xFFFF
        words = words[..., 0::2] | words[..., 1::2] << 16
        ends = torch.from_numpy(np.cumsum(widths(self.trellis.shape[2] / 16))).cuda()
        starts = (ends - 16) % (32 * words.shape[-1])
        at, shift = starts >> 5, starts & 31
        high, low = words[..., at], words[..., (at + 1) % words.shape[-1]]
        states = (
            torch.where(shift <= 16, high >> (16 - shift).clamp(0), high << (shift - 16).clamp(0) | low >> (48 - shift).clamp(0, 32))
            & 0xFFFF
        )
        table = torch.from_numpy(codebook(self.codebook)).cuda()
        tiles = torch.empty_like(states, dtype=torch.float16)
        tiles[..., torch.from_numpy(ring_order()).cuda()] = table[states]
        rows, columns = tiles.shape[:2]
        return tiles.view(rows, columns, 16, 16).permute(0, 2, 1, 3).reshape(16 * rows, 16 * columns)

    def dense(self) -> Tensor:
        """[k, n] in the original basis."""
        turn = torch.from_numpy(hadamard()).cuda()
        w = self.rotated().double()
        k, n = w.shape
        w = torch.einsum("ab,ibn->ian", turn, w.view(k // 128, 128, n)).reshape(k, n // 128, 128) @ turn
        return self.suh.double()[:, None] * w.reshape(k, n) * self.svh.double()


def linear(x: Tensor, *matrices: Matrix, bias: Tensor | None = None) -> Tensor:
    """The op."""
    lists = [[getattr(matrix, key) for matrix in matrices] for key in ("trellis", "suh", "svh")]
    result: Tensor = OPS.linear(x, *lists, [CODEBOOKS[matrix.codebook] for matrix in matrices], bias)
    return result


def assert_close(found: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    """Within the bound, row by row, so that a wrong row does not hide among right ones."""
    distance = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    assert not distance.isnan().any()
    assert distance.max().item() <= factor * BOUND[found.dtype]


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random activations."""
    return torch.randn(shape, device="cuda").to(dtype)


def test_the_reference_is_the_numpy_one() -> None:
    layer, _x, _y = selfcheck.stored_layer()
    matrix = Matrix(cuda(layer.trellis), cuda(layer.suh), cuda(layer.svh), layer.codebook)
    assert np.array_equal(matrix.rotated().cpu().numpy().view(np.uint16), layer.rotated().view(np.uint16))
    assert np.allclose(matrix.dense().cpu().numpy(), layer.dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", selfcheck.CHECKS)
def test_selfcheck(name: str) -> None:
    check, bound = selfcheck.CHECKS[name]
    assert check() <= bound


@pytest.mark.parametrize(("bits", "name"), CASES)
def test_decode_is_bit_exact(bits: float, name: str) -> None:
    matrix = Matrix.random(384, 256, bits, name)
    dense = OPS.dequant(matrix.trellis, None, None, CODEBOOKS[name], torch.float16)
    assert torch.equal(dense.view(torch.int16), matrix.rotated().view(torch.int16))


@pytest.mark.parametrize("dtype", BOUND)
def test_dense_weights(dtype: torch.dtype) -> None:
    matrix = Matrix.random(512, 640, 4)
    assert_close(OPS.dequant(matrix.trellis, matrix.suh, matrix.svh, 2, dtype), matrix.dense())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("bits", "name"), CASES)
def test_linear_at_every_rate(bits: float, name: str, dtype: torch.dtype) -> None:
    matrix = Matrix.random(1152, 384, bits, name)
    dense = matrix.dense()
    for m in (1, 8, 11, 16, 27, 64):
        x = normal(m, 1152, dtype=dtype)
        assert_close(linear(x, matrix), x.double() @ dense)


@pytest.mark.parametrize("m", [0, 1, 2, 7, 9, 17, 33, 63, 65, 100, 1024, 4096])
def test_linear_with_any_number_of_rows(m: int) -> None:
    matrix, x, bias = Matrix.random(640, 256, 3), normal(m, 640), normal(256)
    found = linear(x, matrix, bias=bias)
    assert found.shape == (m, 256)
    if m:
        # Above 64 rows the weights themselves are rounded to half, and with a bias the sum once more.
        assert_close(found, x.double() @ matrix.dense() + bias.double(), factor=2)


@pytest.mark.parametrize("seed", range(20))
def test_linear_of_random_shapes_and_shards(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, m = 128 * int(rng.integers(1, 45)), int(rng.integers(1, 80))
    picks = [CASES[rng.integers(len(CASES))] for _shard in range(rng.integers(1, 9))]
    shards = [Matrix.random(k, 128 * int(rng.integers(1, 9)), *pick) for pick in picks]
    x = normal(m, k + 64, dtype=[torch.float16, torch.bfloat16][seed % 2])[:, 64:]  # rows apart
    assert_close(linear(x, *shards), x.double() @ torch.cat([shard.dense() for shard in shards], 1), factor=2)


def test_linear_writes_all_of_its_output_and_nothing_beside_it() -> None:
    matrix = Matrix.random(384, 256, 3)
    for m in (1, 13, 40, 70):
        x, around = normal(m, 384), torch.full((m, 384), torch.nan, device="cuda", dtype=torch.float16)
        workspace = torch.empty(ops.linear_workspace(m, 384, 256), dtype=torch.uint8, device="cuda")
        OPS.linear_out(x, [matrix.trellis], [matrix.suh], [matrix.svh], [2], None, workspace, around[:, 64:320])
        assert_close(around[:, 64:320], x.double() @ matrix.dense(), factor=2)
        assert around[:, :64].isnan().all()
        assert around[:, 320:].isnan().all()


def test_slices_of_tensor_parallelism() -> None:
    whole, x = Matrix.random(768, 512, 3), normal(5, 768)
    y = x.double() @ whole.dense()
    outputs = [
        Matrix(whole.trellis[:, a // 16 : b // 16].contiguous(), whole.suh, whole.svh[a:b], "mul1") for a, b in ((0, 384), (384, 512))
    ]
    assert_close(torch.cat([linear(x, part) for part in outputs], 1), y)
    inputs = [(x[:, a:b], Matrix(whole.trellis[a // 16 : b // 16], whole.suh[a:b], whole.svh, "mul1")) for a, b in ((0, 256), (256, 768))]
    assert_close((linear(*inputs[0]).float() + linear(*inputs[1]).float()).half(), y, factor=2)


def test_a_column_of_zeros_stays_zero() -> None:
    matrix = Matrix.random(256, 128, 3)
    matrix.svh[5] = 0
    assert (linear(normal(3, 256), matrix)[:, 5] == 0).all()


@pytest.mark.parametrize("m", [1, 2, 6, 12])
@pytest.mark.parametrize(("k", "n"), [(5120, 1536), (768, 5120), (1280, 24576), (5120, 4608)])
def test_the_same_call_gives_the_same_bits(k: int, n: int, m: int) -> None:
    """Many calls, one close on the other: what a race would change."""
    matrix, x = Matrix.random(k, n, 3), normal(m, k)
    first = linear(x, matrix)
    assert_close(first, x.double() @ matrix.dense())
    outs = torch.empty(100, m, n, dtype=torch.float16, device="cuda")
    nothing = torch.empty(0, dtype=torch.uint8, device="cuda")
    for out in outs:
        OPS.linear_out(x, [matrix.trellis], [matrix.suh], [matrix.svh], [2], None, nothing, out)
    assert (outs.view(torch.int16) == first.view(torch.int16)).all()


@pytest.mark.parametrize("m", [1, 2, 6, 12])
def test_more_inputs_than_shared_memory_holds_at_once(m: int) -> None:
    """Strips for every multiprocessor, so that few blocks share the inputs: each rotates its own in pieces."""
    matrix, x = Matrix.random(8960, 16896, 3), normal(m, 8960)
    assert_close(linear(x, matrix), x.double() @ matrix.dense())


@pytest.mark.parametrize("tokens", [1, 7, 60, 300])
def test_the_same_experts_give_the_same_bits(tokens: int) -> None:
    layer, x, weights = Moe(24, 512, 384), normal(tokens, 512), torch.rand(tokens, 6, device="cuda")
    ids = torch.rand(tokens, 24, device="cuda").topk(6).indices.contiguous()
    first = layer(x, ids, weights, 10.0)
    assert all(torch.equal(first, layer(x, ids, weights, 10.0)) for _call in range(50))


def test_bias_at_the_limits() -> None:
    """Added after everything, in single precision: as large as halves go, not-a-number only where it is."""
    matrix, x = Matrix.random(256, 256, 4), normal(5, 256)
    bias = torch.zeros(256, device="cuda", dtype=torch.float16)
    bias[0], bias[1], bias[2], bias[3] = 65504, -65504, torch.inf, torch.nan
    plain, found = linear(x, matrix), linear(x, matrix, bias=bias)
    assert torch.equal(found[:, 4:], plain[:, 4:])
    assert (found[:, 2] == torch.inf).all()
    assert found[:, 3].isnan().all()
    wanted = (x.double() @ matrix.dense())[:, :2] + bias[:2].double()
    assert torch.allclose(found[:, :2].double(), wanted, rtol=2.0**-10)
    with pytest.raises(FormatError, match=re.escape("bias: float32 [256] on cuda; expected float16 [256] on cuda")):
        linear(x, matrix, bias=bias.float())
    with pytest.raises(FormatError, match=re.escape("bias: float16 [128] on cuda; expected float16 [256] on cuda")):
        linear(x, matrix, bias=bias[:128])


class Moe:
    """A random MoE layer and its reference."""

    def __init__(self, experts: int, hidden: int, inter: int, bits: tuple[float, float, float] = (3, 3, 4), name: str = "mul1") -> None:
        shapes = [(hidden, inter), (hidden, inter), (inter, hidden)]
        self.experts = [[Matrix.random(*shape, rate, name) for shape, rate in zip(shapes, bits, strict=True)] for _expert in range(experts)]
        self.stacks = [[torch.stack([getattr(e[i], key) for e in self.experts]) for key in ("trellis", "suh", "svh")] for i in range(3)]
        self.codebooks = [CODEBOOKS[name]] * 3

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor, limit: float) -> Tensor:
        """Float64, token by token."""
        out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for expert, matrices in enumerate(self.experts):
            gate, up, down = [matrix.dense() for matrix in matrices]
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            rows = x[token].double()
            g, u = rows @ gate, rows @ up
            if limit:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            out.index_add_(0, token, weights[token, slot, None].double() * ((torch.nn.functional.silu(g) * u) @ down))
        return out

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, limit: float, expert_map: Tensor | None = None) -> Tensor:
        result: Tensor = OPS.moe(x, weights, ids, *self.stacks, self.codebooks, limit, expert_map)
        return result


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("bits", "name"), [((3, 3, 4), "mul1"), ((2, 4, 3), "mul1"), ((2.5, 2.5, 3.5), "mul1"), ((4, 4, 5), "mcg"), ((8, 8, 6), "3inst")]
)
def test_moe(bits: tuple[float, float, float], name: str, dtype: torch.dtype) -> None:
    layer = Moe(16, 640, 384, bits, name)
    for tokens, limit in ((1, 0.0), (2, 10.0), (6, 0.5), (16, 10.0), (66, 10.0), (150, 10.0)):
        x, weights = normal(tokens, 640, dtype=dtype), torch.rand(tokens, 4, device="cuda")
        ids = torch.rand(tokens, 16, device="cuda").topk(4).indices
        assert_close(layer(x, ids.contiguous(), weights, limit), layer.reference(x, ids, weights, limit), factor=2)


def test_moe_with_experts_of_other_ranks_padding_and_imbalance() -> None:
    layer = Moe(4, 256, 256)
    x, weights = normal(40, 256), torch.rand(40, 3, device="cuda")
    ids = torch.randint(0, 12, (40, 3), device="cuda", dtype=torch.int32)
    ids[:, 0] = 9  # everybody's
    ids[7] = -1  # a token of padding
    ids[8, 1] = 4000
    local = torch.full((12,), -1, device="cuda", dtype=torch.int32)
    local[8:] = torch.arange(4, device="cuda", dtype=torch.int32)
    mapped = torch.where((ids >= 8) & (ids < 12), ids - 8, -1)
    found = layer(x, ids, weights, 10.0, local)
    assert (found[7] == 0).all()
    assert_close(found, layer.reference(x, mapped, weights, 10.0), factor=2)
    assert layer(x[:0], ids[:0], weights[:0], 10.0).shape == (0, 256)


def test_moe_writes_all_of_its_output() -> None:
    layer, x, weights = Moe(8, 256, 128), normal(9, 256), torch.rand(9, 2, device="cuda")
    ids = torch.rand(9, 8, device="cuda").topk(2).indices
    out = torch.full_like(x, torch.nan)
    workspace = torch.full((ops.moe_workspace(9, 2, 256, 128),), 255, dtype=torch.uint8, device="cuda")  # halves and floats of NaN
    OPS.moe_out(x, weights, ids, *layer.stacks, layer.codebooks, 0.0, None, workspace, out)
    assert_close(out, layer.reference(x, ids, weights, 0.0), factor=2)


def test_graph_replay_reads_what_is_there_then() -> None:
    layer, matrix = Moe(8, 256, 128), Matrix.random(256, 256, 3)
    x, weights, ids = normal(6, 256), torch.rand(6, 2, device="cuda"), torch.rand(6, 8, device="cuda").topk(2).indices
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layer(linear(x, matrix), ids, weights, 10.0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            hidden = linear(x, matrix)
            out = layer(hidden, ids, weights, 10.0)
    for _replay in range(5):
        x.copy_(normal(6, 256))
        ids.copy_(torch.rand(6, 8, device="cuda").topk(2).indices)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(hidden, x.double() @ matrix.dense())
        assert_close(out, layer.reference(hidden, ids, weights, 10.0), factor=2)


def test_two_streams_at_once() -> None:
    matrices, xs = [Matrix.random(5120, 1280, bits) for bits in (3, 4)], [normal(m, 5120) for m in (1, 12)]
    wanted = [linear(x, matrix) for x, matrix in zip(xs, matrices, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _stream in range(2)]
    found: list[list[Tensor]] = [[], []]
    for _call in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(linear(xs[i], matrices[i]))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[i]) for i in range(2) for out in found[i])


def test_engram_rows_of_this_rank_and_of_others() -> None:
    weight, scale = torch.randint(0, 255, (300, 256), device="cuda"), torch.randint(60, 190, (300, 8), device="cuda")
    weight[(weight & 127) == 127] = 0
    table = weight.to(torch.uint8).view(torch.float8_e4m3fn), scale.to(torch.uint8).view(torch.float8_e8m0fnu)
    ids = torch.randint(900, 1500, (77,), device="cuda")
    found = OPS.engram_gather(*table, ids, 1000)
    rows = ids - 1000
    values = table[0].double() * 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    wanted = torch.where(((rows >= 0) & (rows < 300))[:, None], values[rows.clamp(0, 299)], 0.0)
    assert torch.equal(found, wanted.bfloat16())
    assert OPS.engram_gather(*table, ids[:0], 1000).shape == (0, 256)


def test_shapes_without_a_gpu() -> None:
    """What torch.compile sees."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        trellis, vectors = (
            torch.empty(16, 24, 48, dtype=torch.int16, device="cuda"),
            [torch.empty(s, dtype=torch.float16, device="cuda") for s in (256, 384)],
        )
        x = torch.empty(5, 256, dtype=torch.bfloat16, device="cuda")
        assert OPS.linear(x, [trellis], [vectors[0]], [vectors[1]], [2], None).shape == (5, 384)


def _good() -> dict[str, Any]:
    matrix = Matrix.random(256, 384, 3)
    return {"x": normal(4, 256), "trellis": matrix.trellis, "suh": matrix.suh, "svh": matrix.svh, "codebook": 2}


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("x", lambda g: g["x"].float(), "x: float32 [4, 256] on cuda; expected float16 or bfloat16 [*, 256] on cuda"),
    ("x", lambda g: g["x"].cpu(), "x: float16 [4, 256] on cpu; expected"),
    ("x", lambda g: normal(4, 257)[:, 1:], "x: rows begin at"),
    ("x", lambda g: normal(256, 4).t(), "x: strides [1, 4]; expected a contiguous tensor"),
    ("x", lambda g: normal(4, 128), "x: float16 [4, 128] on cuda; expected"),
    ("trellis", lambda g: g["trellis"].cpu(), "shard 0.trellis: int16 [16, 24, 48] on cpu; expected"),
    ("trellis", lambda g: g["trellis"].int(), "shard 0.trellis: int32 [16, 24, 48] on cuda; expected int16 or uint16"),
    ("trellis", lambda g: g["trellis"][:, :20].contiguous(), "shard 0.trellis: 320 outputs; expected a multiple of 128"),
    (
        "trellis",
        lambda g: g["trellis"][..., :40].contiguous()[..., :36].contiguous(),
        "shard 0.trellis: 36 words per tile; expected 16 per bit",
    ),
    ("suh", lambda g: g["suh"][:128], "shard 0.suh: float16 [128] on cuda; expected float16 [256] on cuda"),
    ("svh", lambda g: g["svh"].float(), "shard 0.svh: float32 [384] on cuda; expected float16 [384] on cuda"),
    ("codebook", lambda g: 3, "shard 0.codebook: 3; expected one of"),
]


@pytest.mark.parametrize(("key", "change", "message"), BAD)
def test_bad_input_is_refused_by_name(key: str, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    arguments = _good()
    arguments[key] = change(arguments)
    with pytest.raises(FormatError, match=re.escape(message)):
        OPS.linear(arguments["x"], [arguments["trellis"]], [arguments["suh"]], [arguments["svh"]], [arguments["codebook"]], None)


def test_half_rates_are_for_one_codebook() -> None:
    matrix = Matrix.random(128, 128, 2.5)
    with pytest.raises(FormatError, match=re.escape("weight.trellis: 2.5 bits exist for codebook mul1 only, not for mcg")):
        OPS.dequant(matrix.trellis, None, None, CODEBOOKS["mcg"], torch.float16)


def test_a_workspace_too_small_is_refused() -> None:
    layer, x, matrix = Moe(4, 256, 128), normal(100, 256), Matrix.random(256, 128, 3)
    small = torch.empty(16, dtype=torch.uint8, device="cuda")
    with pytest.raises(FormatError, match=r"workspace: 16 bytes on cuda; expected 65536"):
        OPS.linear_out(x, [matrix.trellis], [matrix.suh], [matrix.svh], [2], None, small, normal(100, 128))
    with pytest.raises(FormatError, match=r"workspace: 16 bytes; expected 2596 for 1 tokens"):
        OPS.moe_out(
            x[:1],
            torch.ones(1, 2, device="cuda"),
            torch.zeros(1, 2, device="cuda", dtype=torch.int64),
            *layer.stacks,
            layer.codebooks,
            0.0,
            None,
            small,
            x[:1].clone(),
        )


def test_engram_takes_typed_rows_only() -> None:
    rows, ids = torch.zeros(4, 256, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    scale = torch.zeros(4, 8, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    with pytest.raises(FormatError, match=re.escape("weight: uint8 [4, 256] on cuda; expected float8_e4m3fn")):
        OPS.engram_gather(rows, scale, ids, 0)
    with pytest.raises(FormatError, match=re.escape("scale: uint8 [4, 8] on cuda; expected float8_e8m0fnu")):
        OPS.engram_gather(rows.view(torch.float8_e4m3fn), scale.view(torch.uint8), ids, 0)
