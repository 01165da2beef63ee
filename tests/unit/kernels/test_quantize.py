# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The quantizer: states of the stored vectors, errors that the format allows, checkpoints that load again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gb10_exl3 import checkpoint, quantize
from gb10_exl3 import format as exl3

VECTORS: dict[str, Any] = json.loads(Path(exl3.__file__).with_name("vectors.json").read_text())


@pytest.mark.parametrize("case", VECTORS["quantizer"], ids=lambda case: f"{case['codebook']}-{case['K']}")
def test_search(case: dict[str, Any]) -> None:
    target = np.array(case["target_in_ring_order_f16"], np.uint16).view(np.float16).astype(np.float32)
    states = quantize.search(target, case["K"], case["codebook"])
    assert states.tolist() == case["states_float_costs"]
    assert exl3.pack(states, case["K"]).view(np.uint16).tolist() == case["trellis_u16"]


# Relative rms error of N(0, 1) weights; a wrong decoder would be at 0.2 and above whatever the rate.
@pytest.mark.parametrize(("bits", "name", "error"), [(2, "mul1", 0.2615), (3.5, "mul1", 0.0937), (4, "mcg", 0.068), (8, "3inst", 0.0050)])
def test_error_of_a_random_matrix(bits: float, name: str, error: float) -> None:
    weights = np.random.default_rng(1).normal(size=(128, 128))
    layer = quantize.quantize(weights, bits, name)
    assert (layer.bits, layer.codebook, layer.trellis.shape) == (bits, name, (8, 8, int(16 * bits)))
    assert np.sqrt(((layer.dense() - weights) ** 2).mean()) == pytest.approx(error, rel=0.06)


def test_a_column_of_zeros_stays_zero() -> None:
    weights = np.random.default_rng(2).normal(size=(128, 128))
    weights[:, 9] = 0
    layer = quantize.quantize(weights, 1)
    assert layer.svh[9] == 0
    assert (layer.dense()[:, 9] == 0).all()


def test_a_hessian_lowers_the_error_of_the_outputs() -> None:
    rng = np.random.default_rng(3)
    weights, inputs = rng.normal(size=(128, 128)), rng.normal(size=(400, 128)) * np.geomspace(1, 0.05, 128)
    hessian = inputs.T @ inputs / len(inputs)
    layers = quantize.quantize(weights, 2), quantize.quantize_hessian(weights, hessian, 2)
    plain, fed_back = (np.linalg.norm(inputs @ (layer.dense() - weights)) for layer in layers)
    assert fed_back < 0.75 * plain


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, by the command."""
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    command = [sys.executable, "-m", "gb10_exl3.checkpoint", "tiny", str(out), "--bits", "2"]
    subprocess.run(command, cwd=Path(exl3.__file__).parents[1], check=True, capture_output=True)
    return out


def test_a_tiny_checkpoint_loads_again(tiny: Path) -> None:
    tensors = checkpoint.read_tensors(tiny / "model.safetensors")
    config, listed = (json.loads((tiny / name).read_text()) for name in ("config.json", "quantization_config.json"))
    assert config["quantization_config"]["quant_method"] == "exl3"
    layers = {key: checkpoint.load_layer(key, tensors, "mul1") for key in listed["tensor_storage"]}
    assert {(key.split(".")[-1], layer.k, layer.n, layer.bits) for key, layer in layers.items()} == {
        *((f"{p}_proj", 128, 128, 2) for p in "qkvo"), ("gate_proj", 128, 256, 2), ("up_proj", 128, 256, 2), ("down_proj", 256, 128, 2)
    }  # fmt: skip
    for key, entry in listed["tensor_storage"].items():
        for name, stored in entry["stored_tensors"].items():
            assert stored["shape"] == list(tensors[name][1].shape), key
    assert tensors["model.embed_tokens.weight"][0] == "BF16"


def test_its_layers_are_the_weights_it_was_made_from(tiny: Path, tmp_path: Path) -> None:
    checkpoint.write_random(tmp_path)
    dtype, wanted = checkpoint.read_tensors(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    layer = checkpoint.load_layer("model.layers.0.self_attn.q_proj", checkpoint.read_tensors(tiny / "model.safetensors"))
    dense = (wanted.astype(np.uint32) << 16).view(np.float32).T
    assert dtype == "BF16"
    assert np.linalg.norm(layer.dense() - dense) / np.linalg.norm(dense) == pytest.approx(0.2615, rel=0.06)


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.write_random(tmp_path)
    with pytest.raises(exl3.FormatError, match=r"norm.weight has shape \[128\]; expected two multiples of 128"):
        checkpoint.convert(tmp_path, tmp_path / "out", 2, "mul1", "norm")
    with pytest.raises(exl3.FormatError, match="no tensor's name matches 'nothing'"):
        checkpoint.convert(tmp_path, tmp_path / "out", 2, "mul1", "nothing")
    with pytest.raises(exl3.FormatError, match="q: no tensor trellis; a layer has trellis, suh and svh"):
        checkpoint.load_layer("q", {})
