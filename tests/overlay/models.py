# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints in DeepSeek V4.1's shape: the full-size configuration, and small ones with random weights (synthetic, no trained model)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.storage import shapes

# The release's own numbers (its config.json); everything that a rank's sizes follow from.
FULL_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
    "o_groups": 8, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "max_position_embeddings": 1048576, "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
    "compress_rope_theta": 160000, "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3,
    "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3, "tie_word_embeddings": False,
}  # fmt: skip
FULL_VISION = {
    "model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816,
    "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None,
}  # fmt: skip
NATIVE = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
}  # fmt: skip

# The smallest that has everything: two heads a group, so that three ranks pad 16 in 8 to 18 in 9; experts of three blocks, which two and four
# ranks have to pad; a kv source, its indexer and compressor; a table of small primes.
SMALL_TEXT = {
    **FULL_TEXT, "vocab_size": 1280, "hidden_size": 256, "moe_intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 16,
    "q_lora_rank": 128, "o_lora_rank": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "compress_ratios": [0, 0, 2, 0],
    "kv_source_layer_ids": [2], "index_source_layer_ids": [2], "index_n_heads": 4, "candidate_source_layer_id": -1, "candidate_topk_blocks": 0,
    "engram_layer_ids": [1], "engram_vocab_size": 100, "engram_compressed_vocab_size": 500, "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [0, 1, 2], "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, "dspark_markov_rank": 32,
    "max_position_embeddings": 65536, "dspark_noise_token_id": 5,
}  # fmt: skip
SMALL_VISION = {**FULL_VISION, "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}


def primes(start: int, count: int) -> list[int]:
    """The first primes from `start` on: the tables' bucket sizes."""
    found: list[int] = []
    number = start
    while len(found) < count:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


SMALL_BUCKETS = primes(100, 24)
SMALL_TEXT["engram_num_embeddings"] = [sum(SMALL_BUCKETS)]


def matrices(kind: str) -> dict[str, tuple[int, int, int]]:
    """Name to inputs, outputs and bits of the full-size kinds: `experts` as system A's pack has them, `all` as system B's."""
    files = {"experts": shapes.system_a, "all": shapes.system_b}[kind]()
    tensors = {name: shape for _file, tensors in files for name, (_dtype, shape) in tensors.items()}
    return {
        name.removesuffix(".trellis"): (16 * shape[0], 16 * shape[1], shape[2] // 16)
        for name, shape in tensors.items()
        if name.endswith(".trellis")
    }


def write_config(folder: Path, text: dict[str, Any], vision: dict[str, Any], quantization: dict[str, Any] | None, tokenizer: Path) -> None:
    """config.json, and a tokenizer that stands in for the release's."""
    config = {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 2, "image_token_id": text["vocab_size"] - 16, "text_config": text, "vision_config": vision,
    }  # fmt: skip
    if quantization:
        config["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
