# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The random model: its shape cuts in three, its files agree with each other, and it is always the same."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.engine import manifest, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / tiny.NAME
    directory.mkdir()
    tiny.write(directory)
    return directory


def test_it_is_the_same_every_time(checkpoint: Path, tmp_path: Path) -> None:
    again = tmp_path / tiny.NAME
    again.mkdir()
    tiny.write(again)
    assert manifest.describe(again) == manifest.describe(checkpoint)


def test_three_ranks_get_equal_shares() -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        assert tiny.CONFIG[key] % 3 == 0, key
    assert tiny.CONFIG["vocab_size"] % 64 == 0, "vLLM pads a vocabulary to 64 rows"


def test_the_tensors_have_the_shapes_of_the_configuration_and_fill_the_file(checkpoint: Path) -> None:
    body = (checkpoint / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", body[:8])[0]
    header = json.loads(body[8 : 8 + length])
    del header["__metadata__"]
    config = json.loads((checkpoint / "config.json").read_text())
    end = 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] == end, name
        end = entry["data_offsets"][1]
        assert end - entry["data_offsets"][0] == 2 * math.prod(entry["shape"]), name
    assert 8 + length + end == len(body)
    assert length % 8 == 0
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    assert header["model.layers.0.self_attn.q_proj.weight"]["shape"] == [heads, hidden]
    assert header["model.layers.0.self_attn.o_proj.weight"]["shape"] == [hidden, heads]
    assert len({name.split(".")[2] for name in header if ".layers." in name}) == config["num_hidden_layers"]


def test_every_byte_is_a_token_and_every_row_has_a_word() -> None:
    vocabulary = tiny.tokenizer()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tiny.VOCABULARY))
    alphabet = tiny.byte_alphabet()
    assert len(set(alphabet)) == 256
    assert set(alphabet) <= set(vocabulary)
    assert alphabet[ord("A")] == "A"
    assert alphabet[ord(" ")] == "Ġ"  # what every byte-level tokenizer writes for a blank


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_bfloat16_is_within_one_unit_of_its_last_place(values: list[float]) -> None:
    halves = tiny.bfloat16(values)
    assert len(halves) == 2 * len(values)
    for value, half in zip(values, struct.iter_unpack("<2s", halves), strict=True):
        back = struct.unpack("<f", b"\0\0" + half[0])[0]
        assert abs(back) <= abs(value)
        assert abs(value - back) <= max(abs(value) * 2**-7, 2**-126)
