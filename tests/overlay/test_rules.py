# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules that exist twice, because the container has no Ansible: the plugin's and the collection's core say the same of the same input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _engram, _padding, _quantization
from gb10_vllm import geometry
from gb10_vllm.engram import source
from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3 import checkpoint
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 24), st.integers(1, 16), st.integers(1, 12))
def test_padded_groups(groups: int, per_group: int, ranks: int) -> None:
    heads = groups * per_group
    try:
        expected: Any = _padding.padded_groups(heads, groups, ranks)
    except _padding.PaddingError:
        expected = None
    try:
        found: Any = geometry.padded_groups(heads, groups, ranks)
    except OverlayError:
        found = None
    assert found == expected


@given(st.integers(1, 300000), st.integers(1, 12), st.sampled_from([64, 128]))
def test_padded_vocabulary(size: int, ranks: int, granule: int) -> None:
    assert geometry.up(size, geometry.vocabulary_step(ranks, granule)) == _padding.padded_vocabulary(size, ranks, granule)


@given(st.integers(1, 64), st.integers(1, 12))
def test_padded_width(blocks: int, ranks: int) -> None:
    width = blocks * 128
    assert geometry.share(width, ranks) * ranks == _padding.padded_width(width, ranks)


def test_the_published_sizes() -> None:
    assert geometry.padded_groups(64, 8, 3) == (72, 9)
    assert geometry.up(129280, geometry.vocabulary_step(3, 64)) == 129408
    assert geometry.share(2304, 4) == 640


SETTINGS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    # Cases C31 and C32: the settings in one file or in two, fractions of bits, versions as free text, heads of 16 bits.
    ({}, {"quant_method": "exl3", "version": "1.4.2", "bits": 3.0, "head_bits": 4, "mtp_bits": 3, "codebook": "mul1"}, {"lm_head.trellis"}),
    ({"quant_method": "exl3", "bits": 3.0, "head_bits": 6}, {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}, {"lm_head.trellis"}),
    ({"quant_method": "exl3", "version": "mix-route-3p5", "bits": 4, "head_bits": 16, "codebook": "mul1"}, {}, {"lm_head.weight"}),
    ({"quant_method": "exl3", "bits": 3.0, "head_bits": 6, "codebook": "mul1"}, {}, {"lm_head.weight"}),
    ({"quant_method": "exl3", "bits": 3.0, "codebook": "mul1"}, {"codebook": "mcg"}, {"head.trellis"}),
    ({"quant_method": "exl3", "bits": "many"}, {}, set()),
]


@pytest.mark.parametrize(("inside", "beside", "names"), SETTINGS)
def test_what_contradicts(inside: dict[str, Any], beside: dict[str, Any], names: set[str]) -> None:
    settings, problems = _quantization.read({"quantization_config": inside} if inside else {}, beside)
    core = not problems and settings is not None and not _quantization.head_problem(settings, names)
    try:
        said = checkpoint.settings(inside, beside)
        checkpoint.check({}, names, said)
        checkpoint.bits_of(said.get("bits"), "bits")
        overlay = True
    except OverlayError:
        overlay = False
    assert overlay == core


def test_bits_of_a_layer() -> None:
    """C31: layer 15 has 3 and 3, layer 20 3 and 4, a layer that is not listed the default 4."""
    said = {"quant_method": "exl3", "bits": 4, "head_bits": 16, "expert_bits": {"15": {"gu": 3, "down": 3}, "20": {"gu": 3, "down": 4}}}
    settings, _problems = _quantization.read({"quantization_config": said}, {})
    assert settings
    for layer, role, side in ((15, "w1", 0), (15, "w2", 1), (20, "w3", 0), (20, "w2", 1), (3, "w1", 0)):
        name = f"layers.{layer}.ffn.experts.7.{role}"
        bits = settings.of_layer(layer)[side]
        checkpoint.check({name: checkpoint.Matrix(name, 128, 128, bits, "mul1")}, set(), said)
        with pytest.raises(OverlayError, match=rf"{name}\.trellis has 8 bits, the settings say {bits:g}"):
            checkpoint.check({name: checkpoint.Matrix(name, 128, 128, 8, "mul1")}, set(), said)


LAYOUT = _engram.layouts(
    {
        "engram_layer_ids": [1], "engram_num_embeddings": [sum(p for p in [
            101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199, 211, 223, 227])],
        "engram_vocab_size": 100, "engram_n_heads": 8, "engram_max_ngram_size": 4, "engram_head_dim": 256,
    }
)[0]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_packed_files(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        packed = _engram.Packed(LAYOUT, rank, ranks)
        rows = packed.rows
        (tmp_path / packed.name).write_bytes(packed.header() + bytes(len(rows) * _engram.ROW))
        found = source.find(tmp_path, 1, rank, ranks, rows.start, rows.stop, LAYOUT.rows)
        assert (found.path.name, found.packed) == (packed.name, True)
        for row in (rows.start, rows.stop - 1):
            assert found.weights + row * found.weight_stride == packed.offset(row)
            assert found.scales + row * found.scale_stride == packed.offset(row) + _engram.WIDTH


def _shard(folder: Path, **change: Any) -> None:
    names = _engram.tensor_names(1)
    header = {
        names[0]: {"dtype": "F8_E4M3", "shape": [LAYOUT.rows, 256], "data_offsets": [0, LAYOUT.rows * 256]},
        names[1]: {"dtype": "F8_E8M0", "shape": [LAYOUT.rows, 8], "data_offsets": [LAYOUT.rows * 256, LAYOUT.rows * 264]},
    }
    header[names[0]] |= change
    text = json.dumps(header).encode()
    (folder / "table.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(LAYOUT.rows * 264))
    (folder / source.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "table.safetensors")}))


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    rows = _engram.Packed(LAYOUT, 0, 2).rows

    def find() -> source.Rows:
        return source.find(tmp_path, 1, 0, 2, rows.start, rows.stop, LAYOUT.rows)

    with pytest.raises(OverlayError, match="neither packed rows of layer 1 nor its table"):
        find()
    other = _engram.Packed(LAYOUT, 1, 2)
    (tmp_path / other.name).write_bytes(other.header() + bytes(len(other.rows) * _engram.ROW))
    with pytest.raises(OverlayError, match=r"has engram-l1-r1of2\.bin and no engram-l1-r0of2\.bin"):
        find()
    mine = tmp_path / _engram.Packed(LAYOUT, 0, 2).name
    mine.write_bytes(other.header() + bytes(len(rows) * _engram.ROW))
    with pytest.raises(OverlayError, match="another layer, rank or table"):
        find()
    mine.write_bytes(_engram.Packed(LAYOUT, 0, 2).header() + bytes(len(rows) * _engram.ROW - 1))
    with pytest.raises(OverlayError, match=r"has \d+ bytes instead of \d+"):
        find()
    for path in (mine, tmp_path / other.name):
        path.unlink()
    _shard(tmp_path)
    assert not find().packed
    _shard(tmp_path, dtype="U8")
    with pytest.raises(OverlayError, match="is U8 "):
        find()
    _shard(tmp_path)
    (tmp_path / "table.safetensors").write_bytes((tmp_path / "table.safetensors").read_bytes()[:-1])
    with pytest.raises(OverlayError, match="ends within"):
        find()
