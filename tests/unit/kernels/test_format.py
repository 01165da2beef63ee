# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference against stored vectors, and against the format's definition."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gb10_exl3 import format as exl3
from gb10_exl3.format import FormatError, Layer
from hypothesis import given
from hypothesis import strategies as st

VECTORS: dict[str, Any] = json.loads(Path(exl3.__file__).with_name("vectors.json").read_text())
SHAPED = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def halves(values: list[int]) -> Any:
    """Bit patterns to halves."""
    return np.array(values, np.uint16).view(np.float16)


def words(values: list[int]) -> Any:
    """A tile's words as checkpoints store them."""
    return np.array(values, np.uint16).view(np.int16)


def stored_layer() -> Layer:
    """The layer of the vectors."""
    entry = VECTORS["layer"]
    trellis = words(entry["trellis_u16"]).reshape(entry["trellis_u16_shape"])
    return Layer(trellis, halves(entry["suh"]), halves(entry["svh"]), entry["codebook"], halves(entry["bias"]))


@pytest.mark.parametrize("name", exl3.CODEBOOKS)
def test_codebook(name: str) -> None:
    entry, table = VECTORS["codebook"], exl3.codebook(name)
    assert table.view(np.uint16)[entry["states"]].tolist() == entry[name]
    assert hashlib.sha256(table.astype("<f2").tobytes()).hexdigest() == entry[f"{name}_sha256_of_all_65536_u16_little_endian"]


@pytest.mark.parametrize("tile", VECTORS["tiles"], ids=lambda tile: str(tile["K"]))
def test_tile(tile: dict[str, Any]) -> None:
    trellis = words(tile["trellis_u16"])
    states = exl3.unpack(trellis)
    assert states.tolist() == tile["states_in_ring_order"]
    assert exl3.pack(states, tile["K"]).tolist() == trellis.tolist()
    for name, decoded in tile["decoded_rowmajor"].items():
        assert exl3.from_rings(exl3.codebook(name)[states][None, None]).view(np.uint16).ravel().tolist() == decoded


@given(SHAPED, st.sampled_from(exl3.RATES))
def test_a_state_is_the_sixteen_bits_that_end_with_its_own(rng: Any, bits: float) -> None:
    """Any words are a ring; what its states pack to is the words again, by the definition in single bits."""
    trellis = rng.integers(-32768, 32768, int(16 * bits), np.int16)
    states = exl3.unpack(trellis)
    assert exl3.pack(states, bits).tolist() == trellis.tolist()
    stream = "".join(f"{int(state) & (1 << width) - 1:0{width}b}" for state, width in zip(states, exl3.widths(bits), strict=True))
    ends = np.cumsum(exl3.widths(bits))
    assert [int((stream + stream)[len(stream) + end - 16 : len(stream) + end], 2) for end in ends[:128]] == states[:128].tolist()


def test_rings_are_the_tiles_in_another_order() -> None:
    weights = np.arange(32 * 48).reshape(32, 48)
    assert exl3.ring_order().tolist() == VECTORS["ring_to_rowmajor"]
    assert (exl3.from_rings(exl3.to_rings(weights)) == weights).all()


def test_rotation() -> None:
    entry = VECTORS["hadamard128"]
    x = np.array(entry["x_f"])
    assert np.allclose(exl3.rotate(x) * 128**0.5, entry["y_times_sqrt128_f"], atol=1e-12)
    assert np.allclose(exl3.rotate(exl3.rotate(x)), x, atol=1e-12)


def test_layer() -> None:
    entry, layer = VECTORS["layer"], stored_layer()
    x = halves(entry["x"]).reshape(entry["x_shape"])
    assert np.allclose(layer.linear(x).ravel(), entry["y_f"], atol=1e-6)
    assert np.allclose(x.astype(np.float64) @ layer.dense() + layer.bias.astype(np.float64), layer.linear(x), atol=1e-12)
    for key, value in entry["dense_entries_f"].items():
        row, column = map(int, key.split(","))
        assert layer.dense()[row, column] == pytest.approx(value, abs=1e-7)
    assert (layer.dense()[:, layer.svh == 0] == 0).all()


def test_experts_that_are_elsewhere_count_for_nothing() -> None:
    layer = stored_layer()
    square = Layer(layer.trellis[:, :8], layer.suh, layer.svh[:128])
    x = np.random.default_rng(0).normal(size=(2, 128))
    out = exl3.moe(x, np.array([[0, -1], [7, -1]]), np.ones((2, 2)), [(square, square, square)], limit=0.5)
    gate = np.minimum(square.linear(x[:1]), 0.5)
    assert np.allclose(out[0], square.linear(gate / (1 + np.exp(-gate)) * np.clip(square.linear(x[:1]), -0.5, 0.5))[0])
    assert (out[1] == 0).all()


def test_engram_row() -> None:
    entry = VECTORS["engram_fp8_row"]
    row = exl3.engram_rows(np.array([entry["weight_u8"]], np.uint8), np.array([entry["scale_e8m0_u8"]], np.uint8))
    assert row[0].tolist() == entry["row_f"]


BAD = [
    ({"codebook": "mul2"}, "q: codebook 'mul2'; expected one of 3inst, mcg, mul1"),
    ({"trellis": np.zeros((8, 8, 48), np.int32)}, "q.trellis: int32 [8, 8, 48]; expected 16-bit words of three dimensions"),
    ({"trellis": np.zeros((8, 8, 36), np.int16)}, "q.trellis: 36 words per tile; expected 16 per bit"),
    ({"trellis": np.zeros((8, 8, 40), np.int16), "codebook": "mcg"}, "q.trellis: 2.5 bits exist for codebook mul1 only, not for mcg"),
    ({"trellis": np.zeros((4, 8, 48), np.int16)}, "q.trellis: 64 inputs; expected a multiple of 128"),
    ({"suh": np.zeros(64, np.float16)}, "q.suh: float16 [64]; expected float16 [128]"),
    ({"svh": np.zeros(128, np.float32)}, "q.svh: float32 [128]; expected float16 [128]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_layer_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    parts = {
        "trellis": np.zeros((8, 8, 48), np.int16),
        "suh": np.ones(128, np.float16),
        "svh": np.ones(128, np.float16),
        "codebook": "mul1",
    }
    with pytest.raises(FormatError) as failure:
        Layer(**(parts | change), name="q")
    assert str(failure.value).startswith(message)


@pytest.mark.parametrize(
    ("tensors", "configured", "message"),
    [
        ({"trellis", "mcg", "mul1"}, None, "q: markers mcg and mul1; a layer has one codebook"),
        ({"trellis"}, "mul1", "q: no codebook marker, but the checkpoint's codebook is mul1"),
        ({"trellis", "mcg"}, "mul1", "q: marker mcg, but the checkpoint's codebook is mul1"),
    ],
)
def test_markers(tensors: set[str], configured: str | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        exl3.codebook_of("q", tensors, configured)


def test_markers_name_the_codebook() -> None:
    names = [
        (exl3.codebook_of("q", {"trellis", name} if name in exl3.MARKERS else {"trellis"}, used), name)
        for name, used in product(exl3.CODEBOOKS, [None])
    ]
    assert all(found == name for found, name in names)
