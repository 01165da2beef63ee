# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/profile.schema.json, for editors: what the collection checks a profile with, and a sentence on each key. `tools/profile-schema` writes it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible_collections.gb10.cluster.plugins.module_utils import _schema

PATH = Path(__file__).resolve().parents[3] / "docs/profile.schema.json"

# By a key's whole path, its last two parts, or its name alone: the longest that is there counts.
ABOUT = {
    "name": "The profile's name, that of its file without .yml.",
    "description": "One line on what is served.",
    "status": "How far these values can be trusted.",
    "level": "verified: run by this collection; derived: from a published configuration that runs elsewhere; experimental: run by nobody as it is here.",
    "evidence": "One sentence: who ran it, on what, and how.",
    "checkpoint": "The model's files, the same on every member.",
    "checkpoint.name": "Names the manifest, in profiles/manifests or beside the inventory.",
    "checkpoint.directory": "Folder below cluster_storage_root, and below /models in the container.",
    "source": "Where it comes from.",
    "kind": "Decides the other keys.",
    "source.path": "Folder or archive on the controller; cluster_checkpoint_source and cluster_image_archive name it per inventory.",
    "repository": "OWNER/NAME on the hub.",
    "revision": "A commit of the hub. A branch such as main may move: what its first download brings is then pinned.",
    "include": "Patterns of the files that are wanted; all without it.",
    "url": "Address of the folder with the files.",
    "recipe": "The collection's recipe that builds it.",
    "published": "Where the built image may be pulled from instead.",
    "size_gib": "Size of all files; room for them is asked for before anything is fetched.",
    "manifest": "File in profiles/manifests with size and SHA-256 of each file; that of the checkpoint's name without it.",
    "preparation": "What is done to the files after they are there.",
    "virtual_heads": "Pads attention heads in config.json to a multiple of the ranks; the image must know how to load that.",
    "num_attention_heads": "Attention heads.",
    "o_groups": "Groups of the output projection.",
    "from": "The shape before padding; another one is refused.",
    "engram": "The n-gram tables, where the checkpoint lacks them or a rank's rows are packed.",
    "engram.directory": "Folder of the tables alone, below cluster_storage_root and /models.",
    "packed_mount": "Where the container finds this rank's packed rows; none are made without it.",
    "image": "The container image.",
    "reference": "Its name, best with a digest; a tag may move, and then members are only held to be the same.",
    "engine": "What runs in the container.",
    "command": "The engine's command; the checkpoint's folder and the options follow.",
    "environment": "Variables, as text. NCCL's belong in nccl.overrides.",
    "arguments": "Options without their dashes. What the plan or another key decides is refused here.",
    "master_port": "Port of the ranks' rendezvous on the head.",
    "cache_mount": "Where the container finds a folder that outlives it, for compiled kernels.",
    "refused": "Options that this engine must not get, each with the reason.",
    "parallelism": "How the model is divided.",
    "tensor_parallel_size": "Ranks; as many members must be in the inventory.",
    "expert_parallel": "Whole experts on each rank instead of a part of every one.",
    "memory": "One memory serves processor and GPU, so each line here is taken from the others.",
    "container_limit_mib": "The container's limit; an overrun then takes the rank and not the member.",
    "shm_mib": "The container's shared memory.",
    "kv_cache_bytes": "KV cache of each rank, pinned: the engine's profiler takes page cache for used memory.",
    "kv_bytes_per_token": "KV cache of one token on one rank, as measured; makes the memory plan exact.",
    "gpu_memory_utilization": "The engine's share of memory, where the cache is not pinned.",
    "start_free_mib": "MemFree that a start asks for, with the page cache dropped.",
    "guard": "The memory guard's floors; those of a Spark without it.",
    "at_floor": "stop: end the group in order; kill: without grace; log: say so only.",
    "floor_mib": "MemAvailable below which the guard acts.",
    "flush_floor_mib": "MemFree below which a serving member's page cache is dropped.",
    "load_cached_mib": "Page cache above which it is dropped while weights are read.",
    "serving": "The endpoint and its patience.",
    "served_model_name": "The model's name in the API.",
    "max_model_len": "Context in tokens, prompt and answer together.",
    "start_timeout_s": "From the container's start to the first token.",
    "stop_timeout_s": "From the request to stop to the kill.",
    "recovery": "Canary and restarts; those of a Spark without it.",
    "warm_up": "Prompt lengths in tokens that are computed once before the group is announced ready.",
    "log_lines": "What every rank must have logged before the group is announced ready: a name, and a regular expression for the line. "
    "Those of the overlay's levers follow from environment.",
    "backoff_s": "Waits before the starts that follow a failure; one failure more and the group stays down.",
    "canary_interval_s": "Time between two tokens that prove that the group computes.",
    "canary_silence_s": "Without token or movement for so long, the group has failed.",
    "load_silence_s": "A start in which no rank logs a line for so long has failed.",
    "probes": "What proves the served model, docs/verification.md; null or left out is not probed.",
    "chat": "A question with a known answer.",
    "prompt": "The question.",
    "expect": "Regular expression that the answer must hold.",
    "max_tokens": "Most tokens of the answer.",
    "chat_template_kwargs": "Arguments of the chat template, such as what switches thinking.",
    "parity": "Greedy tokens against those of one rank (service_reference_file).",
    "logprobs": "A finite log probability for each token.",
    "determinism": "One greedy request again and again.",
    "prefix_cache": "A long prompt twice: the same answer, served from the cache.",
    "stop": "A stop string within an answer.",
    "streams": "Two streams at once against each alone.",
    "exact": "Whether a stream beside another must have the very tokens that it has alone.",
    "tools": "A function call in OpenAI's fields.",
    "reasoning": "Thoughts in their own field.",
    "vision": "The colours of three stripes.",
    "limit": "A prompt that fills the context, and one token more.",
    "needle": "A number in a long text.",
    "tokens": "Tokens of the answer.",
    "prompt_tokens": "Tokens of the prompt.",
    "repeats": "How often.",
    "lengths": "Tokens of the texts.",
    "depths": "Where the number stands, as a share of the text.",
    "nccl": "NCCL's variables.",
    "overrides": "Only what no topology implies; the plan has the rest, with reasons.",
}


def about(path: tuple[str, ...]) -> str | None:
    """The sentence on a key."""
    return next((ABOUT[key] for key in (".".join(path), ".".join(path[-2:]), path[-1]) if key in ABOUT), None)


def keys(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """Every fixed key of a schema: its path, the `properties` that hold it, its name there."""
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name), schema["properties"], name
        yield from keys(inner, (*path, name))
    for choice in schema.get("allOf", []):
        yield from keys(choice["then"], path)


def document() -> dict[str, Any]:
    """The schema with titles. `description` is the rest of an error message there, so it stays as it is."""
    schema = copy.deepcopy(_schema.PROFILE)
    for path, properties, name in keys(schema):
        properties[name] = {"title": about(path), **properties[name]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Profile of gb10.cluster: what to serve, and how", **schema}


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
