# SPDX-License-Identifier: Apache-2.0
"""The EXL3 format in numpy: codebooks, packing, order in a tile, rotations; and what a layer computes, in wide precision.

y = x W with W of k inputs x n outputs. W is stored rotated, in tiles of 16 x 16 weights. The 256 weights of a tile form a
ring: each contributes its own `bits` new bits to a stream, and the 16 bits of the stream that end with them are its state,
which a codebook turns into a half. Nothing here is fast; the kernels are checked against it bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 128  # size of the rotation: k and n are multiples of it, and so is every tensor parallel split
RING = 256
# Numbers of the codebooks as the kernels know them.
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
# Codebooks with a marker tensor of this value beside the trellis; 3inst is the one without.
MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


class FormatError(ValueError):
    """A tensor that is not what the format says, in one sentence that names it."""


@cache
def codebook(name: str) -> Array:
    """All 65536 halves of a codebook, by state."""
    state = np.arange(65536, dtype=np.uint64)
    multiplier = MARKERS.get(name, 89226354)
    x = (state * np.uint64(multiplier) + np.uint64(0 if name in MARKERS else 64248484)).astype(np.uint32)
    if name == "mul1":
        total = sum((x >> np.uint32(8 * i)) & np.uint32(255) for i in range(4))
        scale, offset = (np.array([word], np.uint16).view(np.float16).astype(np.float32)[0] for word in (0x1EEE, 0xC931))
        # Product and sum are exact in float32: one rounding, as in the fused operation on halves.
        return ((np.float32(1024) + np.asarray(total, np.float32)) * scale + offset).astype(np.float16)
    x = (x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    low, high = (half.astype(np.uint16).view(np.float16).astype(np.float32) for half in (x & np.uint32(0xFFFF), x >> np.uint32(16)))
    return (low + high).astype(np.float16)


def codebook_of(name: str, tensors: Collection[str], configured: str | None = None) -> str:
    """The codebook of layer `name` by the marker among the names of its tensors; it must be the configured one, if any is."""
    found = [marker for marker in MARKERS if marker in tensors]
    if len(found) > 1:
        raise FormatError(f"{name}: markers {' and '.join(found)}; a layer has one codebook")
    result = found[0] if found else "3inst"
    if configured is not None and configured != result:
        marker = f"marker {result}" if found else "no codebook marker"
        raise FormatError(f"{name}: {marker}, but the checkpoint's codebook is {configured}")
    return result


def rate_of(name: str, words: int, codebook_name: str) -> float:
    """Bits per weight from the words of a tile (last dimension of the trellis `name`)."""
    bits = words / 16
    if bits not in RATES:
        raise FormatError(f"{name}: {words} words per tile; expected 16 per bit, of {', '.join(map(str, RATES))} bits")
    if bits % 1 and codebook_name != "mul1":
        raise FormatError(f"{name}: {bits} bits exist for codebook mul1 only, not for {codebook_name}")
    return bits


@cache
def ring_order() -> Array:
    """[256] 16 * input + output of the tile's element at each ring position."""
    i = np.arange(RING)
    lane, slot = i >> 3, i & 7
    row = 2 * (lane & 3) + (slot & 1) + 8 * ((slot >> 1) & 1)
    return row * 16 + (lane >> 2) + 8 * (slot >> 2)


def widths(bits: float) -> Array:
    """[256] new bits of each ring position: half rates alternate between the two integers around them."""
    return np.where(np.arange(RING) & 1, int(np.ceil(bits)), int(bits))


def pack(states: Array, bits: float) -> Array:
    """[..., 256] states -> [..., 16 * bits] int16. Stored are the new bits of each, most significant first.

    The stream is cut into 32-bit words from their upper end; words are little endian.
    """
    states = np.asarray(states).astype(np.int64)
    columns = [(states[..., i] >> bit) & 1 for i, width in enumerate(widths(bits)) for bit in range(width - 1, -1, -1)]
    stream = np.stack(columns, -1).astype(np.uint32)
    stream = stream.reshape(*states.shape[:-1], -1, 32)
    words = (stream << np.arange(31, -1, -1, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(words.astype("<u4")).view("<i2")


def unpack(trellis: Array) -> Array:
    """[..., 16 * bits] int16 -> [..., 256] uint16 states: the 16 bits of the ring that end with each position's own."""
    words = np.ascontiguousarray(trellis).view("<u4").astype(np.uint64)
    count = words.shape[-1]
    starts = (np.cumsum(widths(trellis.shape[-1] / 16)) - 16) % (32 * count)
    pair = (words[..., starts >> 5] << np.uint64(32)) | words[..., ((starts >> 5) + 1) % count]
    return ((pair >> (48 - (starts & 31)).astype(np.uint64)) & np.uint64(0xFFFF)).astype(np.uint16)


def to_rings(weights: Array) -> Array:
    """[k, n] -> [k/16, n/16, 256] in ring order."""
    k, n = weights.shape
    return weights.reshape(k // 16, 16, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, n // 16, RING)[..., ring_order()]


def from_rings(rings: Array) -> Array:
    """[k/16, n/16, 256] in ring order -> [k, n]."""
    rows, columns, _ring = rings.shape
    tiles = np.empty_like(rings)
    tiles[..., ring_order()] = rings
    return tiles.reshape(rows, columns, 16, 16).transpose(0, 2, 1, 3).reshape(rows * 16, columns * 16)


@cache
def hadamard(size: int = BLOCK) -> Array:
    """[size, size] float64, natural order, symmetric and its own inverse."""
    result = np.ones((1, 1))
    while len(result) < size:
        result = np.block([[result, result], [result, -result]])
    return result / np.sqrt(size)


def rotate(x: Array) -> Array:
    """The transform of each aligned block of 128 of the last axis."""
    return (x.reshape(-1, BLOCK) @ hadamard().astype(x.dtype)).reshape(x.shape)


@dataclass(frozen=True)
class Layer:
    """One quantized matrix: trellis [k/16, n/16, 16 * bits] int16, suh [k] and svh [n] half, bias [n] or None."""

    trellis: Array
    suh: Array
    svh: Array
    codebook: str = "mul1"
    bias: Array | None = None
    name: str = "layer"

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise FormatError(f"{self.name}: codebook {self.codebook!r}; expected one of {', '.join(CODEBOOKS)}")
        if self.trellis.ndim != 3 or self.trellis.dtype not in (np.int16, np.uint16):
            raise FormatError(
                f"{self.name}.trellis: {self.trellis.dtype} {list(self.trellis.shape)}; expected 16-bit words of three dimensions"
            )
        rate_of(f"{self.name}.trellis", self.trellis.shape[2], self.codebook)
        for key, size in (("suh", self.k), ("svh", self.n)):
            vector: Array = getattr(self, key)
            if size % BLOCK:
                raise FormatError(f"{self.name}.trellis: {size} {'inputs' if key == 'suh' else 'outputs'}; expected a multiple of {BLOCK}")
            if vector.shape != (size,) or vector.dtype != np.float16:
                raise FormatError(f"{self.name}.{key}: {vector.dtype} {list(vector.shape)}; expected float16 [{size}]")

    @property
    def k(self) -> int:
        """Inputs."""
        return 16 * self.trellis.shape[0]

    @property
    def n(self) -> int:
        """Outputs."""
        return 16 * self.trellis.shape[1]

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return self.trellis.shape[2] / 16

    def rotated(self) -> Array:
        """[k, n] halves in the rotated basis: what the trellis says and nothing else."""
        return from_rings(codebook(self.codebook)[unpack(self.trellis)])

    def dense(self) -> Array:
        """[k, n] float64 in the original basis."""
        left = rotate(np.ascontiguousarray(self.rotated().astype(np.float64).T)).T * self.suh.astype(np.float64)[:, None]
        return rotate(np.ascontiguousarray(left)) * self.svh.astype(np.float64)

    def linear(self, x: Array) -> Array:
        """[m, k] -> [m, n] float64."""
        rotated = rotate(x.astype(np.float64) * self.suh.astype(np.float64))
        y = rotate(rotated @ self.rotated().astype(np.float64)) * self.svh.astype(np.float64)
        return y if self.bias is None else y + self.bias.astype(np.float64)


def moe(x: Array, ids: Array, weights: Array, experts: Sequence[tuple[Layer, Layer, Layer]], limit: float = 0.0) -> Array:
    """[m, hidden] float64: each token through its experts (gate, up, down). Ids outside of the experts count for nothing.

    With a limit, gate is cut from above and up on both sides, before the activation (DeepSeek V4.1).
    """
    out = np.zeros(x.shape, np.float64)
    for token, slot in np.argwhere((ids >= 0) & (ids < len(experts))):
        gate, up, down = experts[ids[token, slot]]
        g, u = gate.linear(x[token : token + 1]), up.linear(x[token : token + 1])
        if limit:
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        out[token] += weights[token, slot] * down.linear(g / (1 + np.exp(-g)) * u)[0]
    return out


def engram_rows(weight: Array, scale: Array) -> Array:
    """fp8 rows (e4m3fn bytes [r, width]) and their scales (e8m0 bytes [r, width/32]) -> float32 [r, width]."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = np.where((byte & 127) == 127, np.nan, value) * np.where(byte >> 7, -1, 1)
    power = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
    return (value[weight] * np.repeat(power, 32, axis=1)).astype(np.float32)
