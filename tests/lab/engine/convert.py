# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside the engine's tree: a GGUF file becomes a checkpoint as vLLM serves it (configuration, safetensors, tokenizer).

usage: convert.py MODEL.gguf DIRECTORY

transformers reads the GGUF, undoes its quantization and its order of the query and key rows, and rebuilds the tokenizer. It refuses to
save a model that came from a GGUF, so the tensors are written here; bfloat16 loses nothing that 4 bits had, and halves the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

# The output head is the embedding (tied): one copy in the file.
tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
(target / "model.safetensors").chmod(0o644)

config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key != "quantization_config"}
config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True}
(target / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
(target / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
tokenizer.save_pretrained(target)
