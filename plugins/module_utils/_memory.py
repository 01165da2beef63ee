# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank will need of its member's memory, line by line, whether the member has it, and the longest context for which it has.

On a GB10 one memory serves processor and GPU. The lines and their sources: weights from the headers (`_weights`); the KV cache as pinned, or as
the share of memory that the engine takes; NCCL's buffers, the indexer's workspace; what is left of the 5 to 7 GiB that MiaAI-Lab's kit measured
for context, NCCL, workspaces and graphs; the engine's processes; the step of a long prefill; and what must stay free. With system B's numbers
they come to the 12 GiB beside the weights that its own preflight asks for, and 2 for the prefill that it leaves to the reserve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _levers
from ._checkpoint import size_text
from ._weights import Model

GIB = 2**30

NCCL_BUFFERS = 19.2
"""NCCL buffers of NCCL_BUFFSIZE a channel. LLMKube: 4 channels more of 4 MiB took 0.3 GiB. It also gives the kit's 4.7 GiB by default and 0.14 for 8
channels of 1 MiB."""
NCCL_BUFFSIZE, NCCL_CHANNELS = 4 * 2**20, 64
"""NCCL's defaults: bytes of a buffer, and the most channels."""
ENGINE = int(5.75 * GIB)
"""CUDA context, graphs and workspaces: the middle of the kit's 5 to 7 GiB, without the NCCL buffers and the indexer's workspace of its settings."""
PROCESSES = 2 * GIB
"""The engine's processes: the kit's 9 GiB of processes and system, without the 7 that a Spark uses at rest (MemFree 114.6 of 121.7, bot-lab-21)."""
PREFILL, PREFILL_PER_TOKEN = int(1.8 * GIB), int(0.2 * GIB) // 1024
"""The step of a long prefill, a line through two measurements: 2 GiB at 1024 batched tokens (the kit), 3.4 at 8192 (bot-lab-21, LLMKube)."""
RESERVE = int(1.5 * GIB)
"""What must stay free: below it the kit's guard stops the engine."""
SHARE_RESERVE = GIB
"""What must be free beside the share that the engine itself asks for at its start."""
INDEXER_ENTRY, INDEXER_FACTOR = 132, 40
"""Bytes of the indexer's workspace per token of context, and how many times it is taken, in the published images unless there are fewer sequences."""
INDEXER_SHORT, INDEXER_LONG_FACTOR = 256 * 1024, 16
"""vLLM 0.33.0, which the overlay goes with, takes it 16 times for contexts beyond so many tokens, whatever the sequences."""
BATCHED_TOKENS, SEQUENCES = 8192, 256
"""vLLM's defaults of --max-num-batched-tokens and --max-num-seqs."""
KV_RECORD, INDEX_RECORD = 584, 132
"""Bytes of a compressed token on SM120: fp8_ds_mla, and the indexer's key with its scale."""


@dataclass(frozen=True)
class Launch:
    """What a rank's container is told that decides about memory."""

    ranks: int
    context: int
    sequences: int
    batched_tokens: int
    kv_bytes: int | None
    share: float | None
    draft: bool
    vision: bool
    expert_parallel: bool
    tables_on_disk: bool
    gpu: bool
    limit: int
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """A member's memory in bytes: all, free, and free with the page cache given back."""

    total: int
    free: int
    available: int


@dataclass(frozen=True)
class Verdict:
    """Whether a rank fits. `sentence` says why not, or what to watch; `context`: the longest that fits, 0 for none."""

    fits: bool
    need: int
    context: int
    drop_caches: bool
    sentence: str


def parse_meminfo(text: str) -> Memory:
    """The three lines of /proc/meminfo that count."""
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return Memory(*(int(lines.get(name, 0)) * 1024 for name in ("MemTotal", "MemFree", "MemAvailable")))


def launch_of(config: Mapping[str, Any]) -> Launch:
    """From a rank's part of the plan: what is read is what will run."""
    container = config["container"]
    options = _options(container["command"])
    variables = container["environment"]
    kv, share = options.get("kv-cache-memory-bytes"), options.get("gpu-memory-utilization")
    return Launch(
        ranks=config["world_size"],
        context=int(options.get("max-model-len", 0)),
        sequences=int(options.get("max-num-seqs", SEQUENCES)),
        batched_tokens=int(options.get("max-num-batched-tokens", BATCHED_TOKENS)),
        kv_bytes=None if kv is None else int(kv),
        share=None if share is None else float(share),
        draft="speculative-config" in options,
        vision="language-model-only" not in options,
        expert_parallel="enable-expert-parallel" in options,
        # System A's, system B's and our own image read the tables from files; vLLM itself keeps them in memory, pinned or not.
        tables_on_disk=variables.get("DSV41_ENGRAM_DISK") == "1" or "DSV41_SOURCE" in variables or bool(variables.get("GB10_ENGRAM_DIR")),
        gpu=container["gpus"],
        limit=container["memory_mib"] * 2**20,
        variables=variables,
    )


def kv_bytes_per_token(config: Mapping[str, Any]) -> float:
    """Bytes of KV cache that a rank keeps per token, by layer types; 0 where the model's layers are of no known type.

    DeepSeek V4.1: only the source layers keep compressed tokens and indexer keys, one for `compress_ratios` tokens each; sliding windows are
    constant. It is the least: an engine's pages of unlike layers cost up to twice as much, so the measured number of an image goes before it.
    """
    text = Model(config).text
    sources, ratios = text.get("kv_source_layer_ids"), text.get("compress_ratios")
    if sources and ratios:
        return sum((KV_RECORD + INDEX_RECORD) / ratios[layer] for layer in sources if ratios[layer])
    return 0.0


def parts(weights: Mapping[str, int], config: Mapping[str, Any], launch: Launch) -> dict[str, int]:
    """Bytes of a rank by line, without a KV cache that only a share of memory bounds."""
    lines = {"weights": sum(weights.values()), "KV cache": launch.kv_bytes or 0}
    if not launch.gpu:
        # Without a GPU all of a rank is inside its container, and the container's limit is what it may take.
        return {**lines, "rest of the container": max(0, launch.limit - sum(lines.values()))}
    variables = launch.variables
    channels = int(variables.get("NCCL_MAX_NCHANNELS", NCCL_CHANNELS))
    lines["NCCL buffers"] = int(NCCL_BUFFERS * channels * int(variables.get("NCCL_BUFFSIZE", NCCL_BUFFSIZE)))
    if Model(config).text.get("index_source_layer_ids"):
        given = variables.get("GB10_INDEXER_FACTOR") or variables.get("DSV41_INDEXER_PREFILL_FACTOR")
        released = INDEXER_FACTOR if launch.context <= INDEXER_SHORT else INDEXER_LONG_FACTOR
        factor = int(given or 0) or (released if _levers.loaded(variables) else min(INDEXER_FACTOR, launch.sequences))
        lines["indexer workspace"] = launch.context * factor * INDEXER_ENTRY
    lines["context, graphs, workspaces"] = ENGINE
    lines["processes"] = PROCESSES
    lines["long prefill"] = PREFILL + PREFILL_PER_TOKEN * launch.batched_tokens
    lines["reserve"] = RESERVE
    return lines


def verdict(member: str, lines: Mapping[str, int], launch: Launch, memory: Memory, per_token: float) -> Verdict:
    """Hold the lines against a member's memory. `per_token`: bytes of KV cache per token, 0 where nobody knows."""
    need, kv = sum(lines.values()), lines["KV cache"]
    drop = need > memory.free
    room = memory.available - (need - kv)
    # What an engine that takes a share of memory leaves for the cache; its processes and the reserve lie outside of the share.
    inside = need - kv - lines.get("processes", 0) - lines.get("reserve", 0)
    pool = kv if launch.kv_bytes is not None else int((launch.share or 0) * memory.total) - inside
    context = int(max(0, min(room, pool)) // per_token) if per_token else launch.context * (room >= kv)
    sums = " + ".join(f"{name} {size / GIB:.1f}" for name, size in lines.items() if size >= GIB / 20)
    held = f"{member} has {memory.available / GIB:.2f} GiB of memory available and a rank needs {need / GIB:.2f} ({sums})"
    if not launch.gpu and need > launch.limit:
        sentence = f"a rank needs {size_text(need)} and its container may take {size_text(launch.limit)}: raise memory.container_limit_mib"
        return Verdict(False, need, 0, drop, sentence)
    if need > memory.available:
        return Verdict(False, need, context, drop, f"{held}, {_gib(need - memory.available)} too much: {_cure(kv, room, context, launch)}")
    if launch.kv_bytes is None and launch.share is not None and launch.gpu:
        wrong = share_problem(memory, launch.share)
        if wrong:
            return Verdict(False, need, context, drop, f"{member}: {wrong}")
    if launch.kv_bytes is not None and context < launch.context:
        sentence = (
            f"a KV cache of {_gib(kv)} holds {context} tokens and serving.max_model_len is {launch.context}: "
            f"lower it to {context} or raise memory.kv_cache_bytes to {int(launch.context * per_token) + 1}"
        )
        return Verdict(False, need, context, drop, sentence)
    sentence = f"{held}, but only {_gib(memory.free)} are free: give the page cache back before the start" if drop else ""
    return Verdict(True, need, context, drop, sentence)


def share_problem(memory: Memory, share: float) -> str:
    """Whether an engine that takes a share of all memory finds it free, once caches are given back; empty when it does.

    A cause is not guessed: a driver, or a process that crashed and kept its memory, may hold some.
    """
    need, free = memory.total * share, memory.available - SHARE_RESERVE
    if need <= free:
        return ""
    highest = int(100 * free / memory.total) / 100
    return (
        f"memory.gpu_memory_utilization {share:g} needs {need / GIB:.2f} GiB, have {memory.available / GIB:.2f}, of which "
        f"{SHARE_RESERVE / GIB:.0f} must stay free: the highest share that passes is {highest:.2f}"
    )


def _cure(kv: int, room: int, context: int, launch: Launch) -> str:
    if launch.kv_bytes is None or room <= 0 or not context:
        return "no context fits; use more ranks, a smaller checkpoint, or tables on disk" if room <= 0 else "free memory on this member"
    shorter = min(context, launch.context)
    return f"the longest context that fits is {shorter} tokens with memory.kv_cache_bytes {min(kv, room)}, or free memory on this member"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _options(command: Sequence[str]) -> dict[str, str]:
    """Long options of a command with the word behind them, empty for a flag."""
    following = [*command[1:], "--"]
    return {
        word.removeprefix("--"): "" if behind.startswith("--") else behind
        for word, behind in zip(command, following, strict=True)
        if word.startswith("--")
    }
