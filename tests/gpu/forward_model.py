# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model of tests/gpu/forward.py: the release's sizes, but few layers and experts, and random weights.

Kinds of it: `exl3`; `dense`, the same weights decoded to bfloat16; `rounded`, the same with each rounded up or down by chance; `wrong`, `exl3` with
another matrix in one place.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.overlay import models

LAYERS, BUCKETS = 7, models.primes(10007, 24)
TEXT: dict[str, Any] = {
    **models.FULL_TEXT, "num_hidden_layers": LAYERS, "n_routed_experts": 16, "moe_intermediate_size": 1152,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0], "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6], "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 128, "engram_layer_ids": [1], "engram_vocab_size": 10007, "engram_num_embeddings": [sum(BUCKETS)],
    "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [4, 5, 6], "dspark_n_routed_experts": 16,
}  # fmt: skip
"""One layer of each sort: sliding window alone, with Engram, ratio 2 with an indexer and without, ratio 1 as source of candidates and with them."""
EXPERT_BITS = ((3, 4), (4, 4), (4, 3))
WRONG = "layers.3.ffn.shared_experts.w2"


class Maker:
    """Tensors of a checkpoint. A tensor's seed is its name, so kinds agree in all that is not of their kind."""

    def __init__(self, kind: str, text: dict[str, Any], device: str) -> None:
        self.kind, self.text, self.device = kind, text, device

    def random(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))

    def normal(self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        return {name: (torch.randn(*shape, generator=self.random(name), device=self.device) * scale + mean).to(dtype)}

    def bytes(self, name: str, *shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.random(name), device=self.device)

    def matrix(self, name: str, outputs: int, inputs: int, bits: float, gain: float = 1.0) -> dict[str, Any]:
        """Of variance gain² / inputs, so that what comes out is as large as what goes in; in EXL3 or decoded."""
        from gb10_exl3.format import CODEBOOKS, MARKERS

        seed = name + " wrong" if self.kind == "wrong" and name == WRONG else name
        words = (inputs // 16, outputs // 16, int(16 * bits))
        trellis = torch.randint(-32768, 32768, words, dtype=torch.int16, generator=self.random(seed), device=self.device)
        parts = {}
        for part, size, scale in (("suh", inputs, 1.0), ("svh", outputs, gain / inputs**0.5)):
            random = self.random(f"{name}.{part}")
            signs = torch.randint(0, 2, (size,), generator=random, device=self.device) * 2 - 1
            parts[part] = (signs * scale * (0.7 + 0.6 * torch.rand(size, generator=random, device=self.device))).half()
        if self.kind in ("exl3", "wrong"):
            marker = torch.tensor(MARKERS["mul1"] - (1 << 32), dtype=torch.int32)
            return {f"{name}.trellis": trellis, f"{name}.mul1": marker} | {f"{name}.{part}": one for part, one in parts.items()}
        decode = torch.ops.gb10_exl3.dequant
        weight = decode(trellis, parts["suh"], parts["svh"], CODEBOOKS["mul1"], torch.float16).t().contiguous()
        if self.kind == "rounded":
            # Up or down by chance, with the chance of the distance: another bfloat16 of the same matrix.
            noise = torch.randint(0, 1 << 16, weight.shape, dtype=torch.int32, generator=self.random(name + " noise"), device=self.device)
            weight = ((weight.float().view(torch.int32) + noise) & -65536).view(torch.float32)
        return {f"{name}.weight": weight.to(torch.bfloat16)}

    def block(self, name: str, layer: int) -> dict[str, Any]:
        """One decoder layer, of the target or of the drafter."""
        text, draft = self.text, name.startswith("mtp")
        bits = 4 if draft else 5
        hidden, width, heads, head = (text[key] for key in ("hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim"))
        ranks, groups, out = text["q_lora_rank"], text["o_groups"], text["o_lora_rank"]
        tensors: dict[str, Any] = {}
        for part, outputs, inputs, gain in (
            ("wq_a", ranks, hidden, 1), ("wkv", head, hidden, 1), ("wq_b", heads * head, ranks, 1), ("wo_b", hidden, groups * out, 1),
        ):  # fmt: skip
            tensors |= self.matrix(f"{name}.attn.{part}", outputs, inputs, 4 if draft else 6 if part == "wkv" else bits, gain)
        slices = [self.matrix(f"{name}.attn.wo_a.slice.{group}", out, heads // groups * head, bits) for group in range(groups)]
        if self.kind in ("exl3", "wrong"):
            tensors |= {key: tensor for one in slices for key, tensor in one.items()}
        else:
            tensors[f"{name}.attn.wo_a.weight"] = torch.cat([tensor for one in slices for tensor in one.values()])
        experts = text["dspark_n_routed_experts"] if draft else text["n_routed_experts"]
        rates = (4, 4) if draft else EXPERT_BITS[layer % 3]
        for part, outputs, inputs in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
            tensors |= self.matrix(f"{name}.ffn.shared_experts.{part}", outputs, inputs, 4 if draft or part == "w2" else 5)
            for expert in range(experts):
                tensors |= self.matrix(f"{name}.ffn.experts.{expert}.{part}", outputs, inputs, rates[part == "w2"])
        tensors |= self.normal(f"{name}.ffn.gate.weight", experts, hidden, scale=4 / hidden**0.5)
        for part in ("bias", "bias_vl"):
            tensors |= self.normal(f"{name}.ffn.gate.{part}", experts, scale=0.01, dtype=torch.float32)
        tensors |= self.normal(f"{name}.attn.attn_sink", heads, dtype=torch.float32)
        for part, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn.q_norm", ranks), ("attn.kv_norm", head)):
            tensors |= self.normal(f"{name}.{part}.weight", size, scale=0.1, mean=1.0)
        copies = text["hc_mult"]
        mixes = copies * (copies + 2)
        for part in ("hc_attn", "hc_ffn"):
            tensors |= self.normal(f"{name}.{part}_fn", mixes, copies * hidden, scale=(copies * hidden) ** -0.5, dtype=torch.float32)
            tensors |= self.normal(f"{name}.{part}_base", mixes, scale=0.5, dtype=torch.float32)
            tensors |= self.normal(f"{name}.{part}_scale", 3, scale=0.1, mean=1.0, dtype=torch.float32)
        return tensors

    def sparse(self, layer: int) -> dict[str, Any]:
        """Compressor, indexer and Engram of a layer, if it has them."""
        text, name = self.text, f"layers.{layer}"
        hidden, head, index = text["hidden_size"], text["head_dim"], text["index_head_dim"]
        tensors: dict[str, Any] = {}
        if layer in text["kv_source_layer_ids"]:
            for part in ("wkv", "wgate")[: text["compress_ratios"][layer]]:
                tensors |= self.matrix(f"{name}.attn.compressor.{part}", head, hidden, 5)
            tensors |= self.normal(f"{name}.attn.compressor.norm.weight", head, scale=0.1, mean=1.0)
            tensors |= self.matrix(f"{name}.attn.indexer.wk", index, head, 8)
            tensors |= self.normal(f"{name}.attn.indexer.k_norm.weight", index, scale=0.1, mean=1.0)
        if layer in text["index_source_layer_ids"]:
            tensors |= self.matrix(f"{name}.attn.indexer.wq_b", text["index_n_heads"] * index, text["q_lora_rank"], 5)
            tensors |= self.normal(f"{name}.attn.indexer.weights_proj.weight", text["index_n_heads"], hidden, scale=hidden**-0.5)
        if layer in text["engram_layer_ids"]:
            copies, rows = text["hc_mult"], text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
            tensors |= self.matrix(f"{name}.engram.wkv", (copies + 1) * hidden, 24 * 256, 5)
            for part in ("q_weight", "k_weight"):
                tensors |= self.normal(f"{name}.engram.{part}", copies, hidden, scale=0.1, mean=1.0)
            weight, scale = f"{name}.engram.embed.weight", f"{name}.engram.embed.scale"
            tensors[weight] = self.bytes(weight, rows, 256, low=0, high=120).view(torch.float8_e4m3fn)
            tensors[scale] = self.bytes(scale, rows, 8, low=118, high=122).view(torch.float8_e8m0fnu)
        return tensors

    def ends(self) -> Iterable[dict[str, Any]]:
        """What is not of a decoder layer of the target."""
        text = self.text
        hidden, vocabulary, rank = text["hidden_size"], text["vocab_size"], text["dspark_markov_rank"]
        yield self.normal("embed.weight", vocabulary, hidden) | self.normal("norm.weight", hidden, scale=0.1, mean=1.0)
        yield self.matrix("head", vocabulary, hidden, 6, gain=4.0)
        images = (self.normal(f"image_{part}", hidden, dtype=torch.float32) for part in ("start", "end", "newline"))
        yield {name: tensor for one in images for name, tensor in one.items()}
        tensors = self.block("mtp.0", 0) | self.matrix("mtp.0.main_proj", hidden, hidden * len(text["dspark_target_layer_ids"]), 4)
        for part in ("main_norm", "norm"):
            tensors |= self.normal(f"mtp.0.{part}.weight", hidden, scale=0.1, mean=1.0)
        tensors |= self.normal("mtp.0.markov_head.embed.weight", vocabulary, rank)
        tensors |= self.normal("mtp.0.markov_head.head.weight", vocabulary, rank, scale=rank**-0.5)
        yield tensors | self.normal("mtp.0.confidence_head.proj.weight", 1, hidden + rank, scale=0.01, dtype=torch.float32)


def write_tokenizer(folder: Path, vocabulary: int) -> int:
    """As many words as the model has tokens, each of its own; returns how many ids Engram's map has."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from vllm.models.deepseek_v41.common import engram, mm_preprocess

    words = ["<s>", "</s>", "<pad>", *(f"w{number}" for number in range(3, vocabulary))]
    if vocabulary > mm_preprocess.IMAGE_SENTINEL_BASE_ID:
        words[mm_preprocess.IMAGE_SENTINEL_BASE_ID] = mm_preprocess.IMAGE_PLACEHOLDER
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    from transformers import AutoTokenizer

    return engram.build_compressed_token_map(AutoTokenizer.from_pretrained(str(folder)))[1]


def write(folder: Path, kind: str, text: dict[str, Any], tokenizer: Path, device: str = "cuda") -> None:
    """A checkpoint; the Engram table lies in a file of its own, as the release's do."""
    from safetensors.torch import save_file

    settings = {"quant_method": "exl3", "version": "1.6.5", "bits": 2.9, "head_bits": 6, "mtp_bits": 4, "codebook": "mul1"}
    vision = {**models.FULL_VISION, "num_hidden_layers": 1}
    models.write_config(folder, text, vision, settings if kind in ("exl3", "wrong") else None, tokenizer)
    make, weight_map = Maker(kind, text, device), {}
    layers = (make.block(f"layers.{layer}", layer) | make.sparse(layer) for layer in range(text["num_hidden_layers"]))
    for number, tensors in enumerate((*layers, *make.ends())):
        tables = {name: tensor for name, tensor in tensors.items() if ".engram.embed." in name}
        for file, own in ((f"model-{number}.safetensors", tensors.keys() - tables.keys()), (f"table-{number}.safetensors", tables.keys())):
            if own:
                save_file({name: tensors[name].contiguous().cpu() for name in sorted(own)}, folder / file)
                weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
