# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside the engine's tree: one rank, no server, the greedy continuation of a prompt.

usage: generate.py MODEL_DIRECTORY RESULT.json PROMPT TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

model, result, prompt, tokens = sys.argv[1:]
engine = LLM(model=model, dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_num_seqs=1)
greedy = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True)
[answer] = engine.generate([prompt], greedy, use_tqdm=False)
Path(result).write_text(json.dumps({"token_ids": list(answer.outputs[0].token_ids), "text": answer.outputs[0].text}))
