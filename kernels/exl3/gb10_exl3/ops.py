# SPDX-License-Identifier: Apache-2.0
"""PyTorch ops in namespace gb10_exl3. Each has a variant that returns its result and one that writes to `out`.

Importing this module registers them. All launch on the current stream, keep nothing between calls, allocate nothing in
their out variants and may be captured in a CUDA graph. Bad input is refused before a launch, by the tensor's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .format import BLOCK, CODEBOOKS, FormatError, rate_of

# Above this, decoding the whole matrix once and multiplying it with a library is faster than decoding it per 64 rows.
DENSE_ROWS = 64
_NAMES = {number: name for name, number in CODEBOOKS.items()}
_FLOATS = (torch.float16, torch.bfloat16)


def _check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], align: int = 16) -> Tensor:
    """The tensor, if it is a dense CUDA tensor of one of the types and of the shape (None: any size)."""
    wanted = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} [{', '.join('*' if s is None else str(s) for s in shape)}]"
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}"
    fits = tensor.dim() == len(shape) and all(s is None or s == size for s, size in zip(shape, tensor.shape, strict=True))
    if not tensor.is_cuda or tensor.dtype not in dtypes or not fits:
        raise FormatError(f"{name}: {found}; expected {wanted} on cuda")
    if not tensor.is_contiguous():
        raise FormatError(f"{name}: strides {list(tensor.stride())}; expected a contiguous tensor")
    if tensor.numel() and tensor.data_ptr() % align:
        raise FormatError(f"{name}: begins at {tensor.data_ptr():#x}; expected a multiple of {align}")
    return tensor


def _rows(name: str, x: Tensor, width: int | None, like: Tensor | None = None) -> Tensor:
    """[m, width] activations; rows may be apart, elements of a row may not."""
    dtypes = _FLOATS if like is None else (like.dtype,)
    if x.dim() == 2 and x.is_cuda and x.dtype in dtypes and width in (None, x.shape[1]) and x.stride(1) == 1:
        if not x.numel() or (x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0):
            return x
        raise FormatError(f"{name}: rows begin at {x.data_ptr():#x} + {x.element_size() * x.stride(0)} i; expected multiples of 16 bytes")
    return _check(name, x, dtypes, (None, width))


def _matrix(
    name: str, trellis: Tensor, suh: Tensor | None, svh: Tensor | None, codebook: int, lead: Sequence[int] = ()
) -> tuple[int, int, int]:
    """(k, n, half bits per weight) of a matrix, or of a stack of them with leading dimension `lead`."""
    if codebook not in _NAMES:
        raise FormatError(f"{name}.codebook: {codebook}; expected one of {_NAMES}")
    _check(f"{name}.trellis", trellis, (torch.int16, torch.uint16), (*lead, None, None, None))
    rows, columns, words = trellis.shape[-3:]
    bits = rate_of(f"{name}.trellis", words, _NAMES[codebook])
    for what, size in (("inputs", 16 * rows), ("outputs", 16 * columns)):
        if size % BLOCK or not size:
            raise FormatError(f"{name}.trellis: {size} {what}; expected a multiple of {BLOCK}")
    for key, vector, size in (("suh", suh, 16 * rows), ("svh", svh, 16 * columns)):
        if vector is not None:
            _check(f"{name}.{key}", vector, (torch.float16,), (*lead, size))
    return 16 * rows, 16 * columns, int(2 * bits)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def dequant_out(trellis: Tensor, suh: Tensor | None, svh: Tensor | None, codebook: int, out: Tensor) -> None:
    """Dense [k, n]. With suh and svh in the original basis; without both in the rotated one, exactly as stored."""
    if (suh is None) != (svh is None):
        raise FormatError(f"{'suh' if suh is None else 'svh'}: missing; expected both of suh and svh, or neither")
    k, n, k2 = _matrix("weight", trellis, suh, svh, codebook)
    _check("out", out, _FLOATS, (k, n))
    pointers = [0 if vector is None else vector.data_ptr() for vector in (suh, svh)]
    args = native.DenseArgs(trellis.data_ptr(), *pointers, out.data_ptr(), k, n, k2, codebook, out.dtype == torch.bfloat16)
    with torch.cuda.device(out.device):
        native.call("exl3_dequant", args, _stream(out))


def dequant(trellis: Tensor, suh: Tensor | None, svh: Tensor | None, codebook: int, dtype: torch.dtype) -> Tensor:
    """See dequant_out."""
    out = trellis.new_empty((16 * trellis.shape[0], 16 * trellis.shape[1]), dtype=dtype)
    dequant_out(trellis, suh, svh, codebook, out)
    return out


def linear_workspace(rows: int, k: int, widest: int) -> int:
    """Bytes that linear_out needs for so many rows; widest = outputs of the widest shard."""
    return 2 * k * widest if rows > DENSE_ROWS else 0


def linear_out(
    x: Tensor,
    trellis: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    codebooks: list[int],
    bias: Tensor | None,
    workspace: Tensor,
    out: Tensor,
) -> None:
    """out [m, n of all shards] = x [m, k] times each shard, side by side. Shards may differ in all but k."""
    count = len(trellis)
    if not 1 <= count <= native.MAX_SHARDS or {len(suh), len(svh), len(codebooks)} != {count}:
        raise FormatError(
            f"trellis: {count} shards, suh {len(suh)}, svh {len(svh)}, codebooks {len(codebooks)}; expected 1 to {native.MAX_SHARDS} of each"
        )
    sizes = [_matrix(f"shard {i}", *shard) for i, shard in enumerate(zip(trellis, suh, svh, codebooks, strict=True))]
    k, widths = sizes[0][0], [n for _k, n, _k2 in sizes]
    for i, (inputs, _n, _k2) in enumerate(sizes):
        if inputs != k:
            raise FormatError(f"shard {i}.trellis: {inputs} inputs; expected {k}, those of shard 0")
    x = _rows("x", x, k)
    m = x.shape[0]
    out = _rows("out", out, sum(widths), like=x)
    if out.shape[0] != m:
        raise FormatError(f"out: {out.shape[0]} rows; expected {m}, those of x")
    if bias is not None:
        _check("bias", bias, (torch.float16,), (sum(widths),), align=8)
    needed = linear_workspace(m, k, max(widths))
    if needed and (not workspace.is_cuda or workspace.numel() * workspace.element_size() < needed):
        raise FormatError(
            f"workspace: {workspace.numel() * workspace.element_size()} bytes on {workspace.device.type}; expected {needed} on cuda"
        )
    if not m:
        return
    if m > DENSE_ROWS:
        begin = 0
        for i, n in enumerate(widths):
            dense = workspace.view(-1).view(torch.uint8)[: 2 * k * n].view(x.dtype).view(k, n)
            dequant_out(trellis[i], suh[i], svh[i], codebooks[i], dense)
            torch.mm(x, dense, out=out[:, begin : begin + n])
            begin += n
        if bias is not None:
            out += bias
        return
    bf16 = x.dtype == torch.bfloat16
    args = native.LinearArgs(
        x.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(), x.stride(0), out.stride(0), m, k, bf16, count
    )
    strip = 0
    for i, (_k, n, k2) in enumerate(sizes):
        args.shard[i] = native.Shard(trellis[i].data_ptr(), suh[i].data_ptr(), svh[i].data_ptr(), k2, codebooks[i], strip, n // BLOCK)
        strip += n // BLOCK
    with torch.cuda.device(x.device):
        native.call("exl3_linear", args, _stream(x))


def linear(x: Tensor, trellis: list[Tensor], suh: list[Tensor], svh: list[Tensor], codebooks: list[int], bias: Tensor | None) -> Tensor:
    """See linear_out."""
    widths = [16 * t.shape[1] for t in trellis]
    needed = linear_workspace(x.shape[0], x.shape[1], max(widths))
    out = x.new_empty((x.shape[0], sum(widths)))
    linear_out(x, trellis, suh, svh, codebooks, bias, x.new_empty(needed, dtype=torch.uint8), out)
    return out


def moe_workspace(tokens: int, top: int, hidden: int, inter: int) -> int:
    """Bytes that moe_out needs: of each pair its halves and floats on the way, and four numbers to sort it by (plus one)."""
    return min(tokens * top, native.MAX_PAIRS // top * top) * (2 * inter + 4 * hidden + 16) + 4


def moe_out(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor], codebooks: list[int],
    limit: float, expert_map: Tensor | None, workspace: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """out [m, hidden] = each row of x through its experts; gate, up and down are trellis, suh and svh with a leading [experts].

    Ids that are negative, map to -1 or lie beyond the experts count for nothing. Many tokens go in pieces of 8192 pairs.
    """
    experts = gate[0].shape[0]
    (hidden, inter, gate_k2), (_k, _n, up_k2), (_i, _h, down_k2) = sizes = [
        _matrix(name, *tensors, codebook, lead=(experts,))
        for name, tensors, codebook in zip(("gate", "up", "down"), (gate, up, down), codebooks, strict=True)
    ]
    for name, size, wanted in (("up", sizes[1][:2], (hidden, inter)), ("down", sizes[2][:2], (inter, hidden))):
        if size != wanted:
            raise FormatError(f"{name}.trellis: {size[0]} x {size[1]}; expected {wanted[0]} x {wanted[1]}, as gate is {hidden} x {inter}")
    x = _rows("x", x, hidden)
    tokens, out = x.shape[0], _rows("out", out, hidden, like=x)
    _check("topk_ids", topk_ids, (torch.int32, torch.int64), (tokens, None), align=4)
    top = topk_ids.shape[1]
    _check("topk_weights", topk_weights, (torch.float32,), (tokens, top), align=4)
    if experts > native.MAX_EXPERTS:
        raise FormatError(f"gate.trellis: {experts} experts; expected at most {native.MAX_EXPERTS}")
    if not 1 <= top <= native.MAX_PAIRS:
        raise FormatError(f"topk_ids: {top} experts per token; expected 1 to {native.MAX_PAIRS}")
    if out.shape[0] != tokens:
        raise FormatError(f"out: {out.shape[0]} rows; expected {tokens}, those of x")
    if expert_map is not None:
        _check("expert_map", expert_map, (torch.int32,), (None,), align=4)
    needed = moe_workspace(tokens, top, hidden, inter)
    _check("workspace", workspace, (torch.uint8,), (None,))
    if workspace.numel() < needed:
        raise FormatError(f"workspace: {workspace.numel()} bytes; expected {needed} for {tokens} tokens")
    tensors = [
        native.Experts(*(t.data_ptr() for t in matrix), k2, codebook)
        for matrix, k2, codebook in zip((gate, up, down), (gate_k2, up_k2, down_k2), codebooks, strict=True)
    ]
    piece = native.MAX_PAIRS // top
    with torch.cuda.device(x.device):
        for first in range(0, tokens, piece):
            rows = slice(first, min(first + piece, tokens))
            pairs, base = (rows.stop - first) * top, workspace.data_ptr()
            args = native.MoeArgs(
                x[rows].data_ptr(), out[rows].data_ptr(), topk_ids[rows].data_ptr(), topk_weights[rows].data_ptr(),
                0 if expert_map is None else expert_map.data_ptr(), base + 4 * pairs * hidden, base, base + pairs * (4 * hidden + 2 * inter),
                x.stride(0), out.stride(0), rows.stop - first, top, experts, 0 if expert_map is None else expert_map.numel(),
                hidden, inter, x.dtype == torch.bfloat16, topk_ids.dtype == torch.int64, limit, *tensors,
            )  # fmt: skip
            native.call("exl3_moe", args, _stream(x))


def moe(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor], codebooks: list[int],
    limit: float, expert_map: Tensor | None,
) -> Tensor:  # fmt: skip
    """See moe_out."""
    needed = moe_workspace(x.shape[0], max(1, topk_ids.shape[1]), x.shape[1], 16 * gate[0].shape[2])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    moe_out(x, topk_weights, topk_ids, gate, up, down, codebooks, limit, expert_map, x.new_empty(needed, dtype=torch.uint8), out)
    return out


def engram_gather_out(weight: Tensor, scale: Tensor, ids: Tensor, offset: int, out: Tensor) -> None:
    """out [r, width] bfloat16 = rows ids - offset of an fp8 table with a scale per 32 values; rows of other ranks are zeros."""
    _check("weight", weight, (torch.float8_e4m3fn,), (None, None))
    rows, width = weight.shape
    if width % 32:
        raise FormatError(f"weight: rows of {width}; expected a multiple of 32")
    _check("scale", scale, (torch.float8_e8m0fnu,), (rows, width // 32), align=1)
    _check("ids", ids, (torch.int64,), (None,), align=8)
    _check("out", out, (torch.bfloat16,), (ids.shape[0], width))
    if ids.shape[0]:
        args = native.EngramArgs(weight.data_ptr(), scale.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.shape[0], rows, offset, width)
        with torch.cuda.device(out.device):
            native.call("engram_gather", args, _stream(out))


def engram_gather(weight: Tensor, scale: Tensor, ids: Tensor, offset: int) -> Tensor:
    """See engram_gather_out."""
    out = torch.empty((ids.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=weight.device)
    engram_gather_out(weight, scale, ids, offset, out)
    return out


_MATRICES = "Tensor[] gate, Tensor[] up, Tensor[] down, int[] codebooks"
_SCHEMAS = {
    dequant: "Tensor trellis, Tensor? suh, Tensor? svh, int codebook, ScalarType dtype",
    linear: "Tensor x, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int[] codebooks, Tensor? bias",
    moe: f"Tensor x, Tensor topk_weights, Tensor topk_ids, {_MATRICES}, float limit, Tensor? expert_map",
    engram_gather: "Tensor weight, Tensor scale, Tensor ids, int offset",
}
_OUT = {dequant_out: "", linear_out: "Tensor(a!) workspace, ", moe_out: "Tensor(a!) workspace, ", engram_gather_out: ""}
_FAKES = {
    dequant: lambda trellis, suh, svh, codebook, dtype: trellis.new_empty((16 * trellis.shape[0], 16 * trellis.shape[1]), dtype=dtype),
    linear: lambda x, trellis, suh, svh, codebooks, bias: x.new_empty((x.shape[0], sum(16 * t.shape[1] for t in trellis))),
    moe: lambda x, *others: torch.empty_like(x, memory_format=torch.contiguous_format),
    engram_gather: lambda weight, scale, ids, offset: weight.new_empty((ids.shape[0], weight.shape[1]), dtype=torch.bfloat16),
}
_LIBRARY = torch.library.Library("gb10_exl3", "DEF")
for (_op, _schema), (_into, _extra) in zip(_SCHEMAS.items(), _OUT.items(), strict=True):
    _LIBRARY.define(f"{_op.__name__}({_schema}) -> Tensor")
    _LIBRARY.define(f"{_into.__name__}({_schema.replace(', ScalarType dtype', '')}, {_extra}Tensor(b!) out) -> ()")
    # One implementation for every device: what is not on CUDA is refused by name, not by the dispatcher.
    for _function in (_op, _into):
        _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gb10_exl3::{_op.__name__}", _FAKES[_op], lib=_LIBRARY)
    torch.library.register_fake(f"gb10_exl3::{_into.__name__}", lambda *arguments: None, lib=_LIBRARY)
