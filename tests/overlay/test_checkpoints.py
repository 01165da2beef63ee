# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints that are refused before a weight is read, each with a sentence that names the tensor; and what vLLM makes of good ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gb10_vllm.errors import OverlayError
from gb10_vllm.exl3 import checkpoint as reading

from tests.overlay import checkpoints as made
from tests.overlay import engine, ranks

NAME = "layers.1.ffn.experts.2.w2"


@pytest.fixture(scope="module")
def tensors() -> made.Tensors:
    return made.tensors_of("experts")


def _storage(bits: float) -> dict[str, Any]:
    return {"tensor_storage": {NAME: {"quant_format": "exl3", "bits_per_weight": bits}}}


def _without(tensors: made.Tensors, part: str) -> made.Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != f"{NAME}.{part}"}


def _legacy(tensors: made.Tensors) -> made.Tensors:
    tensors = _without(tensors, "suh")
    return tensors | {f"{NAME}.su": torch.zeros(made.WIDTH // 16, dtype=torch.int16)}


BAD: list[tuple[str, Callable[[made.Tensors], made.Tensors], dict[str, Any], str]] = [
    ("a ledger of another checkpoint", lambda t: t, _storage(3), rf"{NAME}\.trellis has 4 bits, the settings say 3: "),
    (
        "bits of a layer of another checkpoint",
        lambda t: t,
        {"expert_bits": {"0": {"gu": 3, "down": 4}, "1": {"gu": 4, "down": 3}, "2": {"gu": 4, "down": 3}}},
        r"layers\.1\.ffn\.experts\.\d\.w2\.trellis has 4 bits, the settings say 3 for its layer",
    ),
    (
        "bits that are none",
        lambda t: t,
        {"expert_bits": {"0": {"gu": 3, "down": 4}, "1": {"gu": "four", "down": 4}, "2": {"gu": 4, "down": 3}}},
        "'four', which is no number of bits",
    ),
    ("another codebook", lambda t: t, {"codebook": "mcg"}, r"\S+ is coded with mul1, the settings say mcg"),
    ("no marker", lambda t: _without(t, "mul1"), {}, rf"{NAME} is coded with 3inst, the settings say mul1"),
    ("a part that lacks", lambda t: _without(t, "suh"), {}, rf"{NAME} has a trellis and no suh: "),
    ("the old format", _legacy, {}, rf"{NAME} has a trellis and no suh \(it has su, of exllamav3 before 0\.0\.2\)"),
    ("a vector of another size", lambda t: t | {f"{NAME}.svh": torch.ones(128).half()}, {}, rf"{NAME}\.svh is \[128\] beside a trellis"),
    ("a vector of another type", lambda t: t | {f"{NAME}.svh": torch.ones(made.HIDDEN)}, {}, rf"{NAME}\.svh is F32, expected F16"),
    (
        "bits that do not exist",
        lambda t: t | {f"{NAME}.trellis": torch.zeros(24, 16, 72).short()},
        {},
        rf"{NAME}\.trellis: 72 words per tile",
    ),
    ("a head that is not quantized", lambda t: t, {"head_bits": 6}, "the settings say head_bits 6, but head is not quantized"),
]


@pytest.mark.parametrize(("change", "more", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_refused_by_its_headers(
    tensors: made.Tensors,
    tokenizer: Path,
    tmp_path: Path,
    change: Callable[[made.Tensors], made.Tensors],
    more: dict[str, Any],
    sentence: str,
) -> None:
    made.write(tmp_path, "experts", tokenizer, change(dict(tensors)))
    with pytest.raises(OverlayError, match=sentence):
        reading.read(tmp_path, {**made.settings_of("experts"), **more})


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="has no safetensors files"):
        reading.read(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(OverlayError, match=r"model\.safetensors (is no safetensors file|cannot be read)"):
        reading.read(tmp_path, {})


def test_two_files_that_contradict(tensors: made.Tensors, tokenizer: Path, tmp_path: Path) -> None:
    made.write(tmp_path, "experts", tokenizer, tensors)
    (tmp_path / reading.SEPARATE).write_text(json.dumps({"quant_method": "exl3", "bits": 2.9}))
    with pytest.raises(
        OverlayError, match=r"quantization_config\.json says bits 2\.9, config\.json says 4: the two are of different checkpoints"
    ):
        reading.read(tmp_path, made.settings_of("experts"))


def _configured(_rank: int, _count: int, _port: int, folder: Path, tensor_parallel: int, environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    config = engine.configured(folder, tensor_parallel)
    target, draft = config.model_config.hf_config, config.speculative_config.draft_model_config.hf_config
    quantization = config.quant_config
    return {
        "heads": [(one.num_attention_heads, one.o_groups, getattr(one, "virtual_heads_from", None)) for one in (target, draft)],
        "quantization": quantization.get_name() if quantization else None,
        "matrices": len(getattr(quantization, "matrices", ())),
        "block": getattr(quantization, "weight_block_size", None),
        "experts": target.expert_dtype if hasattr(target, "expert_dtype") else None,
    }


def configured(folder: Path, count: int, **environment: str) -> Any:
    """In a process of its own."""
    return ranks.run(1, _configured, folder, count, environment)[0]


@pytest.mark.usefixtures("plugin")
def test_both_conventions_are_read(checkpoint: Any) -> None:
    experts, everything = (configured(checkpoint(kind)[0], 3, GB10_VIRTUAL_TP="3") for kind in ("experts", "all"))
    assert experts["quantization"] == everything["quantization"] == "exl3"
    assert (experts["block"], experts["experts"]) == ([32, 32], "fp4")
    assert everything["block"] is None
    assert experts["matrices"] == 3 * 3 * made.EXPERTS
    real = {"num_attention_heads": 16, "o_groups": 8}
    assert experts["heads"] == everything["heads"] == [(18, 9, real)] * 2


@pytest.mark.usefixtures("plugin")
def test_settings_in_a_file_beside(tensors: made.Tensors, tokenizer: Path, tmp_path: Path) -> None:
    """Where config.json says nothing, the profile's `quantization: exl3` does, and the file is read."""
    made.write(tmp_path, "all", tokenizer, made.tensors_of("all"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / reading.SEPARATE).write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))

    def named(_rank: int, _count: int, _port: int) -> str:
        return engine.configured(tmp_path, 1, quantization="exl3").quant_config.get_name()

    assert ranks.run(1, named) == ["exl3"]


@pytest.mark.usefixtures("plugin")
def test_a_bad_checkpoint_ends_vllms_configuration(tensors: made.Tensors, tokenizer: Path, tmp_path: Path) -> None:
    made.write(tmp_path, "experts", tokenizer, _without(tensors, "mul1"))
    with pytest.raises(AssertionError, match=rf"{NAME} is coded with 3inst"):
        configured(tmp_path, 1)


@pytest.mark.usefixtures("plugin")
def test_without_the_variable_three_ranks_are_refused(checkpoint: Any) -> None:
    with pytest.raises(AssertionError, match=r"attention heads \(16\) must be divisible by tensor parallel size \(3\)"):
        configured(checkpoint("native")[0], 3)


@pytest.mark.usefixtures("plugin")
def test_a_padded_file_is_taken_as_it_is(checkpoint: Any, tmp_path: Path) -> None:
    from ansible_collections.gb10.cluster.plugins.module_utils import _padding

    folder, _tensors = checkpoint("native")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    numbers = {"num_attention_heads": 18, "o_groups": 9, "from": {"num_attention_heads": 16, "o_groups": 8}}
    files = _padding.padded_files(_padding.Files((folder / "config.json").read_text(), None), _padding.shape_of(numbers, 3), str(folder))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(files.config or "")
    real = {"num_attention_heads": 16, "o_groups": 8}
    for environment in ({}, {"GB10_VIRTUAL_TP": "3"}):
        assert configured(tmp_path, 3, **environment)["heads"] == [(18, 9, real)] * 2
    with pytest.raises(AssertionError, match="padded already for other ranks than the 2 of GB10_VIRTUAL_TP"):
        configured(tmp_path, 2, GB10_VIRTUAL_TP="2")


@pytest.mark.usefixtures("plugin")
def test_a_number_that_is_none(checkpoint: Any) -> None:
    with pytest.raises(AssertionError, match="GB10_VIRTUAL_TP is 'three': it must be a whole number"):
        configured(checkpoint("native")[0], 3, GB10_VIRTUAL_TP="three")
