# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM's arguments and environment of each rank, from the profile; the order in which ranks are launched.

Option names and the multi-node form (`--nnodes`, `--node-rank`, `--headless`) are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._topology import Member

# Where a checkpoint directory appears inside the container.
MODELS_MOUNT = "/models"

TLS_FOLDER, TLS_MOUNT = "tls", "/run/gb10-tls"
"""Where the head keeps the certificate and its key, below /etc/gb10/GROUP, and where its container has them."""
CERTIFICATE, KEY = "certificate.pem", "key.pem"

# Options and variables that have one home elsewhere.
OPTION_HOMES = {
    "api-key": "the key file on the head",
    "distributed-executor-backend": "the plan",
    "enable-expert-parallel": "parallelism.expert_parallel",
    "gpu-memory-utilization": "memory.gpu_memory_utilization",
    "headless": "the plan",
    "host": "the plan",
    "kv-cache-memory-bytes": "memory.kv_cache_bytes",
    "master-addr": "the inventory",
    "master-port": "engine.master_port",
    "max-model-len": "serving.max_model_len",
    "model": "checkpoint.directory",
    "nnodes": "the inventory",
    "node-rank": "the inventory",
    "port": "cluster_api_port",
    "served-model-name": "serving.served_model_name",
    "ssl-certfile": "cluster_tls",
    "ssl-keyfile": "cluster_tls",
    "tensor-parallel-size": "parallelism.tensor_parallel_size",
}
VARIABLE_HOMES = {
    "GLOO_SOCKET_IFNAME": "cluster_management_interface",
    "VLLM_API_KEY": "the key file on the head",
    "VLLM_HOST_IP": "the inventory",
}
# DSpark's drafter has 128 experts, and the images that serve it on ranks which do not divide that need each expert whole on its rank (LLMKube).
DRAFT_METHOD, DRAFT_EXPERTS = "dspark", 128


def check_profile(profile: Mapping[str, Any], members: Sequence[Member]) -> None:
    """What the schema cannot say of a profile: sizes that must match and values that have another home."""
    where = f"profile {profile['name']}"
    size = profile["parallelism"]["tensor_parallel_size"]
    if size != len(members):
        raise PlanError(
            f"{where}: parallelism.tensor_parallel_size is {size}, but group sparks has {len(members)} members "
            f"({', '.join(member.name for member in members)}): choose a profile for {len(members)} members or correct the group"
        )
    if not {"kv_cache_bytes", "gpu_memory_utilization"} & set(profile["memory"]):
        raise PlanError(f"{where}: memory has neither kv_cache_bytes nor gpu_memory_utilization, so nothing bounds the KV cache: set one")
    longest = max(profile["serving"].get("warm_up", []), default=0)
    if longest >= profile["serving"]["max_model_len"]:
        raise PlanError(f"{where}: serving.warm_up has {longest} tokens, which leave no room for an answer in max_model_len: choose fewer")
    for option in sorted(set(profile["engine"]["arguments"]) & set(OPTION_HOMES)):
        raise PlanError(f"{where}: engine.arguments.{option} is set by {OPTION_HOMES[option]}: remove it")
    for option, reason in sorted(_forbidden(profile).items()):
        raise PlanError(f"{where}: {option} may not be set, {reason}: remove it")
    for variable in sorted(profile["engine"]["environment"]):
        if variable in VARIABLE_HOMES:
            raise PlanError(f"{where}: engine.environment.{variable} is set by {VARIABLE_HOMES[variable]}: remove it")
        if variable.startswith("NCCL_"):
            raise PlanError(f"{where}: engine.environment.{variable} belongs in nccl.overrides: move it")


def _forbidden(profile: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a profile that break it, with the reason: options that its image cannot take, and what no image can."""
    given = {name: value for name, value in profile["engine"]["arguments"].items() if value is not None}
    found = {f"engine.arguments.{name}": reason for name, reason in profile["engine"].get("refused", {}).items() if name in given}
    overrides = given.get("hf-overrides")
    if isinstance(overrides, dict) and "text_config" in overrides:
        found["engine.arguments.hf-overrides.text_config"] = (
            "since a mapping takes the place of the whole text_config, which then has no heads (virtual_heads edits config.json instead)"
        )
    heads = profile["checkpoint"].get("preparation", {}).get("virtual_heads")
    if heads and str(profile["engine"]["environment"].get("GB10_VIRTUAL_TP", 0)) != "0":
        found["engine.environment.GB10_VIRTUAL_TP"] = "since checkpoint.preparation.virtual_heads pads config.json for the same ranks"
    size = profile["parallelism"]["tensor_parallel_size"]
    draft = given.get("speculative-config")
    drafts = isinstance(draft, dict) and draft.get("method") == DRAFT_METHOD
    if profile["parallelism"].get("expert_parallel") and drafts and DRAFT_EXPERTS % size:
        found["parallelism.expert_parallel"] = f"since the drafter's {DRAFT_EXPERTS} experts do not divide by {size}"
    return found


def capture_sizes(sequences: int, tokens: int) -> list[int]:
    """Batch sizes to capture as graphs: a decode step has `tokens` or tokens + 1 rows per sequence when so many are speculated (LLMKube, SFXNZ)."""
    return sorted({count * step for count in range(1, sequences + 1) for step in (tokens, tokens + 1)})


def _compilation(options: Mapping[str, Any]) -> dict[str, Any]:
    """The compilation-config with its capture sizes, where a profile leaves them to its sequences and speculated tokens."""
    config, draft, sequences = (options.get(name) for name in ("compilation-config", "speculative-config", "max-num-seqs"))
    if not isinstance(config, dict) or not isinstance(draft, dict) or not sequences or "cudagraph_capture_sizes" in config:
        return {}
    tokens = draft.get("num_speculative_tokens")
    return {"compilation-config": config | {"cudagraph_capture_sizes": capture_sizes(sequences, tokens)}} if tokens else {}


def arguments(profile: Mapping[str, Any], members: Sequence[Member], rank: int, port: int, tls: bool = False) -> list[str]:
    """A rank's argument vector after the image's name.

    All ranks carry the same options but for their rank and API: ranks that differ hang without an error. Options are sorted
    by name, so that the order of keys in a profile means nothing; one that is null is not passed.
    """
    memory = profile["memory"]
    options: dict[str, Any] = {
        **profile["engine"]["arguments"],
        **_compilation(profile["engine"]["arguments"]),
        "served-model-name": profile["serving"]["served_model_name"],
        "max-model-len": profile["serving"]["max_model_len"],
    }
    if "kv_cache_bytes" in memory:
        options["kv-cache-memory-bytes"] = memory["kv_cache_bytes"]
    if "gpu_memory_utilization" in memory:
        options["gpu-memory-utilization"] = memory["gpu_memory_utilization"]
    if profile["parallelism"].get("expert_parallel"):
        options["enable-expert-parallel"] = True
    placement = {
        "tensor-parallel-size": profile["parallelism"]["tensor_parallel_size"],
        "nnodes": len(members),
        "node-rank": rank,
        "master-addr": members[0].address,
        "master-port": profile["engine"]["master_port"],
        "distributed-executor-backend": "mp",
        # The API listens on all addresses of the head: clients are on the management plane, the canary on the head itself.
        **({"headless": True} if rank else {"host": "0.0.0.0", "port": port}),
        **({"ssl-certfile": f"{TLS_MOUNT}/{CERTIFICATE}", "ssl-keyfile": f"{TLS_MOUNT}/{KEY}"} if tls and not rank else {}),
    }
    argv = [*profile["engine"]["command"], f"{MODELS_MOUNT}/{profile['checkpoint']['directory']}"]
    for name, value in [*placement.items(), *sorted(options.items())]:
        argv += [] if value is None else [f"--{name}", *_words(value)]
    return argv


def _words(value: Any) -> list[str]:
    """An option's value as words: none for a flag, several for a list, JSON for a mapping."""
    if value is True:
        return []
    if isinstance(value, dict):
        return [json.dumps(value, sort_keys=True, separators=(",", ":"))]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)]


def environment(profile: Mapping[str, Any], member: Member, nccl: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables: the profile's, NCCL's, and the address under which the other ranks find it."""
    own = {key: str(value) for key, value in profile["engine"]["environment"].items()}
    return {**own, **nccl, "VLLM_HOST_IP": member.address}


def launch_order(names: Sequence[str]) -> list[str]:
    """Workers by rank, the head last: it opens the rendezvous and the API, so no worker meets a half-started group."""
    return [*names[1:], names[0]]
