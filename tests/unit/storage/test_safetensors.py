# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Headers, the index and the quantization settings of real files, and every way in which they can be wrong."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _quantization, _safetensors, _survey
from ansible_collections.gb10.cluster.plugins.module_utils._safetensors import FormatError
from hypothesis import given
from hypothesis import strategies as st

TENSORS = {"a.weight": ("BF16", (4, 8)), "b.weight": ("F8_E4M3", (3, 5)), "b.scale": ("F8_E8M0", (1,)), "empty": ("F32", (0, 4))}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def encode(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_gives_every_tensors_place(tmp_path: Path, write_tensors: Callable[..., Path]) -> None:
    path = write_tensors(tmp_path / "m.safetensors", TENSORS)
    tensors = _survey.read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == TENSORS
    assert [tensor.size for tensor in tensors.values()] == [64, 15, 1, 0]
    assert max(tensor.end for tensor in tensors.values()) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
        (b"", "is cut before its header"),
        (b"\x10\0\0", "is cut before its header"),
        ((2**40).to_bytes(8, "little") + b"{}", "is no tensor file"),
        (encode({"t": entry()}, 4)[:20], "is cut in its header"),
        (encode(b"{broken"), "a damaged header"),
        (encode(b"[" * 100_000), "a damaged header"),
        (encode([1]), "no mapping"),
        (encode(b'{"t": 1, "t": 2}'), "occurs twice"),
        (encode({"t": {"dtype": "U8"}}), "t has no dtype, shape and data_offsets"),
        (encode({"t": entry(shape="4")}), "t has no dtype, shape"),
        (encode({"t": entry(offsets=[0])}), "t has no dtype, shape"),
        (encode({"t": entry(offsets=[-4, 0])}), "t has no dtype, shape"),
        (encode({"t": entry(offsets=[True, 4])}), "t has no dtype, shape"),
        (encode({"t": entry("U9")}, 4), "unknown type 'U9'"),
        (encode({"t": entry("F16")}, 4), "takes 4 bytes"),
        (encode({"t": entry(offsets=[2, 6])}, 6), "does not begin where"),
        (encode({"t": entry(), "u": entry()}, 4), "does not begin where"),
        (encode({"t": entry()}, 4 - 1), "is short"),
        (encode({"t": entry()}, 4 + 781), "is too long"),
    ],
)
def test_every_broken_file_has_its_own_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=words):
        _survey.read_header(path)


@given(st.binary(max_size=64), st.integers(0, 80))
def test_no_bytes_are_more_than_refused(header: bytes, size: int) -> None:
    """Whatever lies on the disk: tensors inside the file, or FormatError."""
    try:
        tensors = _safetensors.parse_header(header, size)
    except FormatError:
        return
    assert all(len(header) <= tensor.begin <= tensor.end <= size for tensor in tensors.values())


@given(st.data())
def test_a_cut_anywhere_is_noticed(data: st.DataObject) -> None:
    whole = encode({"t": entry(), "u": entry(offsets=(4, 8))}, 8)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(FormatError):
        _safetensors.parse_header(cut[8 : 8 + _safetensors.header_length(cut[:8], len(cut))], len(cut))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}', '{"weight_map": 1']
)
def test_a_damaged_index_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="no index"):
        _safetensors.parse_index(text)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin"])
def test_an_index_stays_in_its_directory(file: str) -> None:
    with pytest.raises(FormatError, match="no tensor file beside it"):
        _safetensors.parse_index(json.dumps({"weight_map": {"t": file}}))


class Checkpoint:
    """Two shards and their index, each tensor once."""

    def __init__(self, directory: Path, write: Callable[..., Path]) -> None:
        self.directory, self.write = directory, write
        write(directory / SHARDS[0], {"a": ("U8", (4,)), "b": ("U8", (4,))})
        write(directory / SHARDS[1], {"c": ("U8", (4,))})
        self.index = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
        self.write_index()

    def write_index(self, **metadata: Any) -> None:
        (self.directory / _safetensors.INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": self.index}))

    def manifest(self) -> dict[str, Any]:
        """Of the directory as it is: every difference that is told comes from the headers."""
        files = [path for path in sorted(self.directory.iterdir()) if path.is_file()]
        entries = [{"path": f.name, "size": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files]
        return {"version": 1, "files": entries}


@pytest.fixture
def checkpoint(tmp_path: Path, write_tensors: Callable[..., Path]) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint", write_tensors)


def test_a_whole_checkpoint_is_sound(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=checkpoint.manifest())
    assert (result["ok"], result["tensors"], result["quantization"]) == (True, 3, {})


def test_tensors_that_lack_or_come_twice_are_told(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    checkpoint.write(checkpoint.directory / SHARDS[1], {"b": ("U8", (4,)), "extra": ("U8", (1,))})
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=checkpoint.manifest())
    assert result["problems"] == [
        f"{SHARDS[1]} lacks the tensor c, which {_safetensors.INDEX} places there",
        f"{SHARDS[1]} holds the tensor b once more; {_safetensors.INDEX} places it in {SHARDS[0]}",
        f"{SHARDS[1]} holds the tensor extra, which {_safetensors.INDEX} does not name",
    ]
    assert result["corrupt"] == [SHARDS[1]] * 3


def test_a_missing_shard_is_told_with_how_many_are_there(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    for shard in SHARDS:
        (checkpoint.directory / shard).unlink()
    manifest = checkpoint.manifest()
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=manifest, must_match=True)
    assert f"{SHARDS[0]} is missing (0 of the 2 files that {_safetensors.INDEX} names are there)" in result["msg"]


def test_a_chosen_part_needs_no_other_shards(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    (checkpoint.directory / SHARDS[0]).unlink()
    assert run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=checkpoint.manifest(), subset=True)["ok"]


def test_an_index_of_some_tensors_says_so_itself(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    del checkpoint.index["b"]
    checkpoint.write_index()
    options = {"check": True, "path": checkpoint.directory}
    assert not run_module("checkpoint_verify", manifest=checkpoint.manifest(), **options)["ok"]
    checkpoint.write_index(**{_safetensors.SUBSET_KEY: "engram"})
    assert run_module("checkpoint_verify", manifest=checkpoint.manifest(), **options)["ok"]


@pytest.mark.parametrize(("change", "words"), [(781, "is too long"), (-1, "is short")])
def test_a_learned_checkpoint_is_held_against_its_own_headers(
    checkpoint: Checkpoint, run_module: Callable[..., Any], change: int, words: str
) -> None:
    """On a first fetch there may be no hash: a file of another length is found by its header, and nothing is pinned."""
    path = checkpoint.directory / SHARDS[1]
    os.truncate(path, path.stat().st_size + change)
    gaps = {"version": 1, "complete": False, "files": [{"path": SHARDS[1], "size": None, "sha256": None}]}
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=gaps)
    assert not result["ok"]
    assert "manifest" not in result
    assert words in result["verdict"]


def test_a_loop_of_links_ends(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    manifest = checkpoint.manifest()
    (checkpoint.directory / "loop").symlink_to(checkpoint.directory)
    (checkpoint.directory / "self").symlink_to("self")
    (checkpoint.directory / SHARDS[0]).unlink()
    (checkpoint.directory / SHARDS[0]).symlink_to(SHARDS[0])
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=manifest)
    assert (result["corrupt"], result["extra"]) == ([SHARDS[0]], ["loop", "self"])


SETTINGS = {
    "quant_method": "exl3",
    "version": "mix-route-3p5",
    "bits": 4,
    "head_bits": 16,
    "codebook": "mul1",
    "expert_bits": {"0": {"gu": 4, "down": 4}, "15": {"gu": 3, "down": 3}, "20": {"gu": 3, "down": 4}},
    "original_quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}


def test_bits_may_differ_by_layer_and_projection() -> None:
    settings, problems = _quantization.read({"quantization_config": SETTINGS}, {})
    assert settings is not None
    assert problems == []
    assert [settings.of_layer(layer) for layer in (15, 20, 7)] == [(3, 3), (3, 4), (4, 4)]
    assert (settings.version, settings.original_block) == ("mix-route-3p5", (32, 32))
    assert _quantization.head_problem(settings, {"lm_head.weight"}) == ""


def test_settings_may_lie_in_a_file_of_their_own() -> None:
    separate = {"quant_method": "exl3", "version": "1.4.2", "bits": 3.0, "head_bits": 4, "mtp_bits": 3, "codebook": "mul1"}
    settings, problems = _quantization.read({}, separate)
    assert (settings and (settings.bits, settings.head_bits), problems) == ((3.0, 4.0), [])
    _settings, problems = _quantization.read({"quantization_config": {**separate, "bits": 3.5}}, separate)
    assert problems == ["says bits 3.0, config.json says 3.5: the two are of different checkpoints"]


@pytest.mark.parametrize("broken", [{"bits": "many"}, {"expert_bits": [4]}, {"expert_bits": {"x": {"gu": 1, "down": 1}}}, {"bits": None}])
def test_settings_that_cannot_be_read_are_told(broken: dict[str, Any]) -> None:
    settings, problems = _quantization.read({"quantization_config": {**SETTINGS, **broken}}, {})
    assert settings is None
    assert "cannot be read" in problems[0]


def test_a_head_that_is_not_as_its_bits_say_is_told(checkpoint: Checkpoint, run_module: Callable[..., Any]) -> None:
    checkpoint.write(checkpoint.directory / SHARDS[1], {"c": ("U8", (4,)), "lm_head.weight": ("BF16", (4, 4))})
    checkpoint.index["lm_head.weight"] = SHARDS[1]
    checkpoint.write_index()
    (checkpoint.directory / "config.json").write_text(json.dumps({"quantization_config": {**SETTINGS, "head_bits": 6}}))
    result = run_module("checkpoint_verify", check=True, path=checkpoint.directory, manifest=checkpoint.manifest())
    assert result["verdict"].startswith(f"{checkpoint.directory}/config.json says head_bits 6, but lm_head is not quantized")
    assert result["quantization"]["bits"] == 4
