# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A random llama of a few megabytes, made from nothing: the shape of a real checkpoint without a download.

Its words are noise, but always the same noise: weights come from one seed, tokens are bytes. Every dimension that tensor parallelism
cuts divides by 3 (six heads, three key-value heads), and the vocabulary by 3 and by the 64 rows that vLLM pads it to.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = "tiny-llama"
SEED = 20
VOCABULARY = 384  # 3 special tokens, 256 bytes, the rest unused; a multiple of 192 = 3 x 64
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KEY_VALUE_HEADS, HEAD = 192, 384, 6, 6, 3, 32
SPECIAL = ("<s>", "</s>", "<pad>")
# Wide enough that the most likely token stands clear of the second: the order of a sum must not change a greedy answer.
SPREAD = 0.25
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant> "

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_VALUE_HEADS, "head_dim": HEAD,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "vocab_size": VOCABULARY,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def write(directory: Path) -> None:
    """Write the whole checkpoint into a directory that is there and empty."""
    _write_json(directory / "config.json", CONFIG)
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    _write_json(directory / "tokenizer.json", tokenizer())
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "pad_token": SPECIAL[2],
        "model_max_length": 2048, "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    write_safetensors(directory / "model.safetensors", weights())


def tokenizer() -> dict[str, object]:
    """A byte-level BPE without merges, as tokenizer.json: every byte is a token."""
    words = [*SPECIAL, *byte_alphabet()]
    words += [f"<unused{number}>" for number in range(VOCABULARY - len(words))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": number, "content": word, **special} for number, word in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "vocab": {word: number for number, word in enumerate(words)}, "merges": [],
        },
    }  # fmt: skip


def byte_alphabet() -> list[str]:
    """The printable sign of each byte in byte-level tokenizers (GPT-2): itself where it prints, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def weights() -> Iterator[tuple[str, Sequence[int], bytes]]:
    """(name, shape, bfloat16 bytes) of every tensor; uniform numbers, since those are the same on every machine."""
    source = random.Random(SEED)
    queries, keys = HEADS * HEAD, KEY_VALUE_HEADS * HEAD
    matrices = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = ["model.norm"]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attention = {"q_proj": (queries, HIDDEN), "k_proj": (keys, HIDDEN), "v_proj": (keys, HIDDEN), "o_proj": (HIDDEN, queries)}
        mlp = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
        matrices |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        matrices |= {f"{layer}.mlp.{name}": shape for name, shape in mlp.items()}
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    for name, (rows, columns) in matrices.items():
        yield f"{name}.weight", (rows, columns), bfloat16([SPREAD * (2 * source.random() - 1) for _weight in range(rows * columns)])
    for name in norms:
        yield f"{name}.weight", (HIDDEN,), bfloat16([1.0] * HIDDEN)


def bfloat16(values: Sequence[float]) -> bytes:
    """The upper halves of the numbers as float32 (cut, not rounded: noise needs no better), little-endian."""
    whole = struct.pack(f"<{len(values)}f", *values)
    halves = bytearray(len(values) * 2)
    halves[0::2], halves[1::2] = whole[2::4], whole[3::4]
    return bytes(halves)


def write_safetensors(path: Path, tensors: Iterator[tuple[str, Sequence[int], bytes]]) -> None:
    """The safetensors format: length of the header, header (JSON), the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    bodies: list[bytes] = []
    offset = 0
    for name, shape, body in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(body)]}
        offset += len(body)
        bodies.append(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bodies))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
