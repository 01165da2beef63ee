# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tensors of DeepSeek V4.1 Flash's two EXL3 packs by their published shapes, file by file: synthetic headers, no weights.

Shapes: the release's config.json; names and which layers have an indexer or a compressor: public inventories of its index; bits: system A's
`expert_bits`, system B's K map. Held against published figures: system A's file sizes, system B's 47,900 packed matrices and 196 to 197 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator

Tensors = dict[str, tuple[str, tuple[int, ...]]]

HIDDEN, LAYERS, EXPERTS, WIDTH, VOCABULARY = 5120, 40, 384, 2304, 129280
HEADS, HEAD, GROUPS, Q_LORA, O_LORA = 64, 512, 8, 1280, 1024
DRAFT_LAYERS, DRAFT_EXPERTS, MARKOV = 3, 128, 256
KV_SOURCES, GATED_SOURCES, INDEX_SOURCES = (2, 8, 14, 20), (2, 8, 14), (2, 8, 14, 20, 24, 28, 32, 36)
ENGRAM = {1: 384_006_168, 14: 384_016_682}
HYPER, HYPER_ROWS = 4, 24

CONFIG = {
    "model_type": "deepseek_v41",
    "text_config": {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "o_groups": GROUPS,
        "vocab_size": VOCABULARY,
        "n_routed_experts": EXPERTS,
        "max_position_embeddings": 1_048_576,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": list(INDEX_SOURCES),
        "index_head_dim": 128,
        "head_dim": HEAD,
        "sliding_window": 128,
        "num_nextn_predict_layers": DRAFT_LAYERS,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": list(ENGRAM.values()),
        "engram_vocab_size": 16_000_000,
        "engram_n_heads": 8,
        "engram_max_ngram_size": 4,
        "engram_head_dim": 256,
    },
}


def exl3(name: str, inputs: int, outputs: int, bits: int) -> Tensors:
    """A quantized matrix."""
    return {
        f"{name}.trellis": ("I16", (inputs // 16, outputs // 16, 16 * bits)),
        f"{name}.suh": ("F16", (inputs,)),
        f"{name}.svh": ("F16", (outputs,)),
        f"{name}.mul1": ("I32", ()),
    }


def fp8(name: str, inputs: int, outputs: int) -> Tensors:
    """A matrix of the release: e4m3 with a scale for 32 by 32."""
    return {f"{name}.weight": ("F8_E4M3", (outputs, inputs)), f"{name}.scale": ("F8_E8M0", (outputs // 32, inputs // 32))}


def fp4(name: str, inputs: int, outputs: int) -> Tensors:
    """An expert's matrix of the release: two numbers in a byte, a scale for 32."""
    return {f"{name}.weight": ("I8", (outputs, inputs // 2)), f"{name}.scale": ("F8_E8M0", (outputs, inputs // 32))}


def norms(prefix: str) -> Tensors:
    """What every layer has besides its matrices."""
    hyper = {
        f"{prefix}.hc_{part}_{name}": ("F32", shape)
        for part in ("attn", "ffn")
        for name, shape in (("fn", (HYPER_ROWS, HYPER * HIDDEN)), ("base", (HYPER_ROWS,)), ("scale", (3,)))
    }
    return {
        f"{prefix}.attn_norm.weight": ("BF16", (HIDDEN,)),
        f"{prefix}.ffn_norm.weight": ("BF16", (HIDDEN,)),
        f"{prefix}.attn.q_norm.weight": ("BF16", (Q_LORA,)),
        f"{prefix}.attn.kv_norm.weight": ("BF16", (HEAD,)),
        f"{prefix}.attn.attn_sink": ("F32", (HEADS,)),
        **hyper,
    }


def router(prefix: str, experts: int) -> Tensors:
    """The router."""
    return {
        f"{prefix}.ffn.gate.weight": ("BF16", (experts, HIDDEN)),
        f"{prefix}.ffn.gate.bias": ("F32", (experts,)),
        f"{prefix}.ffn.gate.bias_vl": ("F32", (experts,)),
    }


def vision() -> Tensors:
    """The vision tower and its way into the text model."""
    tensors: Tensors = {"vision.patch_embed.weight": ("BF16", (1024, 3 * 14 * 14))}
    for layer in range(32):
        prefix = f"vision.blocks.{layer}"
        tensors[f"{prefix}.attn.qkv.weight"] = ("BF16", (3072, 1024))
        tensors[f"{prefix}.attn.proj.weight"] = ("BF16", (1024, 1024))
        for name, shape in (("w1", (2816, 1024)), ("w3", (2816, 1024)), ("w2", (1024, 2816))):
            tensors[f"{prefix}.mlp.{name}.weight"] = ("BF16", shape)
    return {**tensors, "aligner.w1.weight": ("BF16", (HIDDEN, 9 * 1024)), "aligner.w2.weight": ("BF16", (HIDDEN, HIDDEN))}


def experts(prefix: str, count: int, bits: tuple[int, int] | None) -> Tensors:
    """Routed experts, quantized (gate and up, down) or as released."""
    tensors: Tensors = {}
    for expert in range(count):
        for name, inputs, outputs in (("w1", HIDDEN, WIDTH), ("w3", HIDDEN, WIDTH), ("w2", WIDTH, HIDDEN)):
            key = f"{prefix}.ffn.experts.{expert}.{name}"
            tensors |= exl3(key, inputs, outputs, bits[name == "w2"]) if bits else fp4(key, inputs, outputs)
    return tensors


def attention(prefix: str) -> list[tuple[str, int, int]]:
    """An attention's matrices: name, inputs, outputs."""
    return [
        (f"{prefix}.attn.wq_a", HIDDEN, Q_LORA),
        (f"{prefix}.attn.wq_b", Q_LORA, HEADS * HEAD),
        (f"{prefix}.attn.wkv", HIDDEN, HEAD),
        (f"{prefix}.attn.wo_b", GROUPS * O_LORA, HIDDEN),
    ]


def shared(prefix: str) -> list[tuple[str, int, int]]:
    """The shared expert's matrices."""
    prefix = f"{prefix}.ffn.shared_experts"
    return [(f"{prefix}.w1", HIDDEN, WIDTH), (f"{prefix}.w3", HIDDEN, WIDTH), (f"{prefix}.w2", WIDTH, HIDDEN)]


def draft_extras(layer: int) -> Tensors:
    """What single layers of the drafter have."""
    if layer == 0:
        return {"mtp.0.main_norm.weight": ("BF16", (HIDDEN,))}
    if layer < DRAFT_LAYERS - 1:
        return {}
    last = f"mtp.{layer}"
    return {
        f"{last}.norm.weight": ("BF16", (HIDDEN,)),
        f"{last}.markov_head.embed.weight": ("BF16", (VOCABULARY, MARKOV)),
        f"{last}.markov_head.head.weight": ("BF16", (VOCABULARY, MARKOV)),
        f"{last}.confidence_head.proj.weight": ("BF16", (1, HIDDEN + MARKOV)),
    }


def a_bits(layer: int) -> tuple[int, int]:
    """System A's bits of a layer's routed experts: gate and up, down (its config.json)."""
    if layer < 15 or layer in (16, 17, 18, 21):
        return 4, 4
    return 3, 4 if layer in (20, 22, 24) else 3


def system_a() -> Iterator[tuple[str, Tensors]]:
    """bot-lab-21's 3.5-bit pack: only the routed experts are quantized. Files 1 to 48 as released."""

    def native(prefix: str) -> Tensors:
        matrices = [*attention(prefix), (f"{prefix}.attn.wo_a", HEADS * HEAD // GROUPS, GROUPS * O_LORA), *shared(prefix)]
        return {name: tensor for matrix in matrices for name, tensor in fp8(*matrix).items()}

    yield "model-00001-of-00048.safetensors", vision()
    yield "model-00002-of-00048.safetensors", {"embed.weight": ("BF16", (VOCABULARY, HIDDEN))}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        tensors = {**native(prefix), **norms(prefix), **router(prefix, EXPERTS), **experts(prefix, EXPERTS, a_bits(layer))}
        if layer in INDEX_SOURCES:
            tensors |= fp8(f"{prefix}.attn.indexer.wq_b", Q_LORA, 32 * 128)
            tensors[f"{prefix}.attn.indexer.weights_proj.weight"] = ("BF16", (32, HIDDEN))
        if layer in KV_SOURCES:
            tensors[f"{prefix}.attn.indexer.wk.weight"] = ("BF16", (128, HEAD))
            tensors[f"{prefix}.attn.indexer.k_norm.weight"] = ("BF16", (128,))
            tensors[f"{prefix}.attn.compressor.wkv.weight"] = ("BF16", (HEAD, HIDDEN))
            tensors[f"{prefix}.attn.compressor.norm.weight"] = ("BF16", (HEAD,))
        if layer in GATED_SOURCES:
            tensors[f"{prefix}.attn.compressor.wgate.weight"] = ("BF16", (HEAD, HIDDEN))
        yield f"model-{layer + 3:05d}-of-00048.safetensors", tensors
    yield "model-00043-of-00048.safetensors", {"head.weight": ("BF16", (VOCABULARY, HIDDEN)), "norm.weight": ("BF16", (HIDDEN,))}
    for layer in range(DRAFT_LAYERS):
        prefix = f"mtp.{layer}"
        tensors = {**native(prefix), **norms(prefix), **router(prefix, DRAFT_EXPERTS), **experts(prefix, DRAFT_EXPERTS, None)}
        if layer == 0:
            tensors |= fp8("mtp.0.main_proj", 3 * HIDDEN, HIDDEN)
        yield f"model-{layer + 44:05d}-of-00048.safetensors", {**tensors, **draft_extras(layer)}
    for number, (layer, rows) in enumerate(ENGRAM.items()):
        prefix = f"layers.{layer}.engram"
        yield (
            f"model-{number + 47:05d}-of-00048.safetensors",
            {
                f"{prefix}.embed.weight": ("F8_E4M3", (rows, 256)),
                f"{prefix}.embed.scale": ("F8_E8M0", (rows, 8)),
                **fp8(f"{prefix}.wkv", 24 * 256, 5 * HIDDEN),
                f"{prefix}.k_weight": ("BF16", (HYPER, HIDDEN)),
                f"{prefix}.q_weight": ("BF16", (HYPER, HIDDEN)),
            },
        )


def system_b() -> Iterator[tuple[str, Tensors]]:
    """MiaAI-Lab's 2.9-bit pack: every matrix but the embedding is quantized. How its 39 files divide the tensors is not published."""

    def packed(prefix: str, bits: int, shared_bits: int) -> Tensors:
        tensors: Tensors = {}
        for matrix in attention(prefix):
            tensors |= exl3(*matrix, bits)
        for group in range(GROUPS):
            tensors |= exl3(f"{prefix}.attn.wo_a.slice.{group}", HEADS * HEAD // GROUPS, O_LORA, bits)
        for matrix in shared(prefix):
            tensors |= exl3(*matrix, shared_bits)
        return tensors

    yield "first.safetensors", {**vision(), "embed.weight": ("BF16", (VOCABULARY, HIDDEN)), "norm.weight": ("BF16", (HIDDEN,))}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        bits = 2 if 18 <= layer <= 22 else 3
        tensors = {
            **packed(prefix, 5, 4 if 11 <= layer <= 29 else 5),
            **norms(prefix),
            **router(prefix, EXPERTS),
            **experts(prefix, EXPERTS, (bits, bits)),
        }
        if layer == 29:
            tensors |= exl3(f"{prefix}.ffn.shared_experts.w2", WIDTH, HIDDEN, 5)  # by its trellis, whatever the map says
        if layer in INDEX_SOURCES:
            tensors |= exl3(f"{prefix}.attn.indexer.wq_b", Q_LORA, 32 * 128, 5)
            tensors[f"{prefix}.attn.indexer.weights_proj.weight"] = ("BF16", (32, HIDDEN))
        if layer in KV_SOURCES:
            tensors |= exl3(f"{prefix}.attn.indexer.wk", HEAD, 128, 8)
            tensors |= exl3(f"{prefix}.attn.compressor.wkv", HIDDEN, HEAD, 5)
            tensors[f"{prefix}.attn.indexer.k_norm.weight"] = ("BF16", (128,))
            tensors[f"{prefix}.attn.compressor.norm.weight"] = ("BF16", (HEAD,))
        if layer in GATED_SOURCES:
            tensors |= exl3(f"{prefix}.attn.compressor.wgate", HIDDEN, HEAD, 5)
        if layer in ENGRAM:
            tensors |= exl3(f"{prefix}.engram.wkv", 24 * 256, 5 * HIDDEN, 5 if layer == 1 else 4)
            tensors |= {f"{prefix}.engram.{name}_weight": ("BF16", (HYPER, HIDDEN)) for name in ("k", "q")}
        yield f"layer-{layer}.safetensors", tensors
    for layer in range(DRAFT_LAYERS):
        prefix = f"mtp.{layer}"
        tensors = {**packed(prefix, 4, 4), **norms(prefix), **router(prefix, DRAFT_EXPERTS), **experts(prefix, DRAFT_EXPERTS, (4, 4))}
        if layer == 0:
            tensors |= exl3("mtp.0.main_proj", 3 * HIDDEN, HIDDEN, 4)
        yield f"draft-{layer}.safetensors", {**tensors, **draft_extras(layer)}
    yield "head.safetensors", exl3("head", HIDDEN, VOCABULARY, 6)
