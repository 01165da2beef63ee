# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: python -m gb10_exl3.checkpoint convert SOURCE OUT | tiny OUT

`convert` quantizes the matrices of a dense checkpoint on the CPU (seconds per million weights: for small models); `tiny`
writes a dense one with random weights and converts that, for tests that need a whole checkpoint.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .format import BLOCK, CODEBOOKS, MARKERS, RATES, Array, FormatError, Layer, codebook_of
from .quantize import BEST_RMS, quantize

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "I8": "|i1"}
EVERY_PROJECTION = r"\.(self_attn|mlp)\..*proj\.weight$"
VERSION = "gb10-exl3 0.1"


def read_tensors(path: Path) -> dict[str, tuple[str, Array]]:
    """Tensors of a safetensors file by name, each with its stored type; bfloat16 stays as its 16-bit patterns."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    result = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise FormatError(f"{path.name}: {name} has dtype {entry['dtype']}; expected one of {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(content[8 + size + begin : 8 + size + end], DTYPES[entry["dtype"]])
        result[name] = entry["dtype"], flat.reshape(entry["shape"])
    return result


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """The reverse; data in the order of the names."""
    header, offset = {}, 0
    for name in sorted(tensors):
        dtype, array = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name][1]).tobytes())


def _floats(dtype: str, array: Array) -> Array:
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def layer_tensors(layer: Layer) -> dict[str, tuple[str, Array]]:
    """The tensors that a checkpoint keeps for a layer, by the last part of their names."""
    tensors = {"trellis": ("I16", layer.trellis.view("<i2")), "suh": ("F16", layer.suh), "svh": ("F16", layer.svh)}
    if layer.codebook in MARKERS:
        tensors[layer.codebook] = "I32", np.array(MARKERS[layer.codebook], np.uint32).view(np.int32)
    if layer.bias is not None:
        tensors["bias"] = "F16", layer.bias
    return tensors


def load_layer(name: str, tensors: Mapping[str, tuple[str, Array]], configured: str | None = None) -> Layer:
    """Layer `name` from the tensors of a checkpoint."""
    own = {key.removeprefix(f"{name}."): array for key, (_dtype, array) in tensors.items() if key.startswith(f"{name}.")}
    missing = [key for key in ("trellis", "suh", "svh") if key not in own]
    if missing:
        raise FormatError(f"{name}: no tensor {missing[0]}; a layer has trellis, suh and svh")
    return Layer(own["trellis"], own["suh"], own["svh"], codebook_of(name, own, configured), own.get("bias"), name)


def convert(source: Path, out: Path, bits: float, codebook: str, select: str) -> int:
    """Quantizes the matrices whose names `select` finds (stored as outputs x inputs); copies the rest. Returns how many."""
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, tuple[str, Array]] = {}
    storage: dict[str, Any] = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, (dtype, array) in read_tensors(path).items():
            if not re.search(select, name):
                tensors[name] = dtype, array
                continue
            if array.ndim != 2 or array.shape[0] % BLOCK or array.shape[1] % BLOCK:
                raise FormatError(f"{path.name}: {name} has shape {list(array.shape)}; expected two multiples of {BLOCK}")
            key = name.removesuffix(".weight")
            stored = layer_tensors(quantize(_floats(dtype, array).T, bits, codebook, seed=len(storage)))
            tensors |= {f"{key}.{part}": value for part, value in stored.items()}
            shapes = {f"{key}.{part}": {"shape": list(a.shape), "n_bytes": a.nbytes, "dtype": d} for part, (d, a) in stored.items()}
            storage[key] = {"stored_tensors": shapes, "quant_format": "exl3", "bits_per_weight": bits}
            if codebook in MARKERS:
                storage[key][f"{codebook}_multiplier"] = MARKERS[codebook]
    if not storage:
        raise FormatError(f"{source}: no tensor's name matches {select!r}")
    quantization = {
        "quant_method": "exl3",
        "version": VERSION,
        "bits": float(bits),
        "head_bits": 16,
        "codebook": codebook,
        "out_scales": "always",
    }
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}, indent=2) + "\n")
    (out / "quantization_config.json").write_text(json.dumps(quantization | {"tensor_storage": storage}, indent=2) + "\n")
    return len(storage)


def write_random(out: Path, seed: int = 0) -> None:
    """A Llama of one layer with random weights in bfloat16: hidden 128, intermediate 256, 256 tokens."""
    hidden, inter, vocabulary = 128, 256, 256
    rng = np.random.default_rng(seed)
    attention = {f"self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
    mlp = {"mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter)}
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}.weight": shape for name, shape in (attention | mlp).items()}
    shapes |= {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    values = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    values |= {
        f"model.{name}.weight": np.ones(hidden) for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    }
    tensors = {name: ("BF16", (value.astype(np.float32).view(np.uint32) >> 16).astype("<u2")) for name, value in values.items()}
    write_tensors(out / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("convert", "tiny"))
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--bits", type=float, default=3, choices=RATES)
    parser.add_argument("--codebook", default="mul1", choices=sorted(CODEBOOKS))
    parser.add_argument("--select", default=EVERY_PROJECTION, help="regular expression for the names of the matrices to quantize")
    options = parser.parse_args()
    if len(options.folders) != {"convert": 2, "tiny": 1}[options.action]:
        parser.error("convert takes SOURCE and OUT, tiny takes OUT")
    if options.bits not in BEST_RMS[options.codebook]:
        parser.error(f"{options.bits} bits exist for codebook mul1 only")
    with tempfile.TemporaryDirectory() as folder:
        source = options.folders[0] if options.action == "convert" else Path(folder)
        if options.action == "tiny":
            write_random(source)
        count = convert(source, options.folders[-1], options.bits, options.codebook, options.select)
    print(f"{options.folders[-1]}: {count} matrices at {options.bits:g} bits")


if __name__ == "__main__":
    main()
