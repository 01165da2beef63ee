# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one rank alone answers: the tokens that a group of ranks must give as well, or its sums are wrong.

Both compute in float32, where a different order of additions is far too small to change the most likely token.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .. import cache
from . import base, image, sandbox, tree

PROMPT = "The capital of France is"
TOKENS = 16
_GENERATE = Path(__file__).with_name("generate.py")


def reference(checkpoint: Path, prompt: str = PROMPT) -> Path:
    """`<checkpoint>.reference.json` in the cache, computed in some 20 s the first time.

    {"prompt", "token_ids": the first TOKENS greedy tokens, "text", "max_tokens", "image_id",
    "checkpoint_sha256": SHA-256 of the checkpoint's manifest file}
    """
    manifest = checkpoint.with_name(f"{checkpoint.name}.manifest.json")
    facts = {
        "prompt": prompt, "max_tokens": TOKENS, "image_id": image.image_id(image.engine_image()),
        "checkpoint_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest(),
    }  # fmt: skip
    name = f"{checkpoint.name}.reference.json"

    def build(destination: Path) -> None:
        sandbox.run(
            [base.base_tree(), tree.engine_tree()],
            [f"/usr/bin/{base.PYTHON}", "/models/bin/generate.py", f"/models/{checkpoint.name}", "/models/out/answer.json", prompt, str(TOKENS)],
            title=f"reference: {checkpoint.name}, one rank",
            environment={
                **tree.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
            },
            folders={"bin": _GENERATE.parent, checkpoint.name: checkpoint, "out": destination},
        )  # fmt: skip
        answer = destination / "answer.json"
        (destination / name).write_text(json.dumps({**facts, **json.loads(answer.read_text())}, indent=2) + "\n")
        answer.unlink()

    return cache.build("reference", {**facts, "generate": _GENERATE}, build) / name
