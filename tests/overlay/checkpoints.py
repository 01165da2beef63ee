# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small checkpoints in the release's names, with random weights (synthetic): native, experts in EXL3, or everything in EXL3.

Any bits are a valid trellis, so nothing has to be quantized for a matrix to be one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gb10_exl3.format import MARKERS, Layer
from safetensors.torch import save_file

from tests.overlay import models

TEXT = models.SMALL_TEXT
HIDDEN, WIDTH, HEADS, GROUPS = TEXT["hidden_size"], TEXT["moe_intermediate_size"], TEXT["num_attention_heads"], TEXT["o_groups"]
HEAD, Q_RANK, O_RANK, VOCABULARY = TEXT["head_dim"], TEXT["q_lora_rank"], TEXT["o_lora_rank"], TEXT["vocab_size"]
EXPERTS = TEXT["n_routed_experts"]
ENGRAM_IN, ENGRAM_OUT = 24 * 256, 5 * HIDDEN
ROWS = TEXT["engram_num_embeddings"][0]

# Bits of routed experts, gate and up, then down, by layer: no two layers alike, as in the published ones.
EXPERT_BITS = {0: (3, 4), 1: (4, 4), 2: (4, 3)}
Tensors = dict[str, torch.Tensor]


class Maker:
    """Tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def bytes(self, *shape: int, low: int = 0, high: int = 120) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.random)

    def fp8(self, name: str, outputs: int, inputs: int) -> Tensors:
        return {
            f"{name}.weight": self.bytes(outputs, inputs).view(torch.float8_e4m3fn),
            f"{name}.scale": self.bytes(outputs // 32, inputs // 32, low=110, high=130).view(torch.float8_e8m0fnu),
        }

    def fp4(self, name: str, outputs: int, inputs: int) -> Tensors:
        return {
            f"{name}.weight": self.bytes(outputs, inputs // 2, high=255).view(torch.int8),
            f"{name}.scale": self.bytes(outputs, inputs // 32, low=110, high=130).view(torch.float8_e8m0fnu),
        }

    def dense(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        return {name: torch.randn(*shape, generator=self.random).to(dtype)}

    def exl3(self, name: str, outputs: int, inputs: int, bits: float, codebook: str = "mul1") -> Tensors:
        words = (inputs // 16, outputs // 16, int(16 * bits))
        tensors = {"trellis": torch.randint(-32768, 32768, words, dtype=torch.int16, generator=self.random)}
        for part, size in (("suh", inputs), ("svh", outputs)):
            signs = torch.randint(0, 2, (size,), generator=self.random) * 2 - 1
            tensors[part] = (signs * (0.02 + torch.rand(size, generator=self.random) * 0.05)).to(torch.float16)
        if codebook in MARKERS:
            tensors[codebook] = torch.tensor(MARKERS[codebook] - (1 << 32), dtype=torch.int32)
        return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def layer_of(tensors: Tensors, name: str) -> Layer:
    """The reference's view of a matrix."""
    return Layer(*(tensors[f"{name}.{part}"].numpy() for part in ("trellis", "suh", "svh")), "mul1", name=name)


def dense(tensors: Tensors, name: str) -> Any:
    """A matrix by the reference, [inputs, outputs] float64."""
    return layer_of(tensors, name).dense()


def _block(make: Maker, name: str, layer: int, kind: str) -> Tensors:
    """One decoder layer, of the target or of the drafter."""
    bits = 4 if name.startswith("mtp") else 5

    def linear(part: str, outputs: int, inputs: int, rate: float = bits) -> Tensors:
        return make.exl3(f"{name}.{part}", outputs, inputs, rate) if kind == "all" else make.fp8(f"{name}.{part}", outputs, inputs)

    tensors: Tensors = {}
    for part, outputs, inputs in (
        ("attn.wq_a", Q_RANK, HIDDEN),
        ("attn.wkv", HEAD, HIDDEN),
        ("attn.wq_b", HEADS * HEAD, Q_RANK),
        ("attn.wo_b", HIDDEN, GROUPS * O_RANK),
    ):
        # Shards of one fused layer that differ in bits.
        tensors |= linear(part, outputs, inputs, 6 if part == "attn.wkv" else bits)
    group = HEADS // GROUPS * HEAD
    if kind == "all":
        for index in range(GROUPS):
            tensors |= make.exl3(f"{name}.attn.wo_a.slice.{index}", O_RANK, group, bits)
    else:
        tensors |= linear("attn.wo_a", GROUPS * O_RANK, group)
    tensors |= make.dense(f"{name}.attn.attn_sink", HEADS, dtype=torch.float32)
    for part, outputs, inputs in (("w1", WIDTH, HIDDEN), ("w3", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
        tensors |= linear(f"ffn.shared_experts.{part}", outputs, inputs, 4 if part == "w2" else 5)
        for expert in range(EXPERTS):
            key = f"{name}.ffn.experts.{expert}.{part}"
            if kind == "native" or (kind == "experts" and name.startswith("mtp")):
                tensors |= make.fp4(key, outputs, inputs)
            else:
                rates = (4, 4) if name.startswith("mtp") else EXPERT_BITS[layer]
                tensors |= make.exl3(key, outputs, inputs, rates[part == "w2"])
    return tensors | make.dense(f"{name}.ffn.gate.weight", EXPERTS, HIDDEN)


def tensors_of(kind: str) -> Tensors:
    """All that the tests look at. `kind`: native, experts or all."""
    make = Maker(11)
    tensors = make.dense("embed.weight", VOCABULARY, HIDDEN)
    tensors |= make.exl3("head", VOCABULARY, HIDDEN, 6) if kind == "all" else make.dense("head.weight", VOCABULARY, HIDDEN)
    for layer in range(TEXT["num_hidden_layers"]):
        tensors |= _block(make, f"layers.{layer}", layer, kind)
    tensors |= _block(make, "mtp.0", 0, kind)
    wide = 3 * HIDDEN
    tensors |= make.exl3("mtp.0.main_proj", HIDDEN, wide, 4) if kind == "all" else make.fp8("mtp.0.main_proj", HIDDEN, wide)
    # The kv source: what vLLM keeps dense, whatever the checkpoint has.
    for part, outputs, inputs, bits in (
        ("compressor.wkv", HEAD, HIDDEN, 5),
        ("compressor.wgate", HEAD, HIDDEN, 5),
        ("indexer.wk", 128, HEAD, 8),
    ):
        name = f"layers.2.attn.{part}"
        tensors |= make.exl3(name, outputs, inputs, bits) if kind == "all" else make.dense(f"{name}.weight", outputs, inputs)
    indexer = ("layers.2.attn.indexer.wq_b", 4 * 128, Q_RANK)
    tensors |= make.exl3(*indexer, 5) if kind == "all" else make.fp8(*indexer)
    engram = ("layers.1.engram.wkv", ENGRAM_OUT, ENGRAM_IN)
    tensors |= make.exl3(*engram, 5) if kind == "all" else make.fp8(*engram)
    tensors["layers.1.engram.embed.weight"] = make.bytes(ROWS, 256).view(torch.float8_e4m3fn)
    tensors["layers.1.engram.embed.scale"] = make.bytes(ROWS, 8, low=118, high=132).view(torch.float8_e8m0fnu)
    return tensors


def settings_of(kind: str) -> dict[str, Any]:
    """`quantization_config` as the two published kinds have it."""
    if kind == "native":
        return models.NATIVE
    if kind == "experts":
        bits = {str(layer): {"gu": gate, "down": down} for layer, (gate, down) in EXPERT_BITS.items()}
        return {
            "quant_method": "exl3", "version": "mix-route-3p5", "bits": 4, "head_bits": 16, "codebook": "mul1", "out_scales": "always",
            "expert_bits": bits, "original_quantization_config": models.NATIVE,
        }  # fmt: skip
    return {"quant_method": "exl3", "version": "1.6.5", "bits": 2.9, "head_bits": 6, "mtp_bits": 4, "codebook": "mul1"}


def write(folder: Path, kind: str, tokenizer: Path, tensors: Tensors | None = None) -> Tensors:
    """A folder as vLLM takes it; the Engram tables lie in a file of their own."""
    tensors = tensors_of(kind) if tensors is None else tensors
    models.write_config(folder, TEXT, models.SMALL_VISION, settings_of(kind), tokenizer)
    files = {
        name: "model-00002-of-00002.safetensors" if ".engram.embed." in name else "model-00001-of-00002.safetensors" for name in tensors
    }
    for file in sorted(set(files.values())):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors
