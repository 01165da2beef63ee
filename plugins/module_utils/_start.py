# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What must hold on a member at the moment when its rank starts. Each refusal is one sentence with its cure; none is an empty string.

The rank's supervisor asks before each start, and the preflight of a restart asks what can be asked of a running group before anything is stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _padding, _roce

GID_VARIABLE = "NCCL_IB_GID_INDEX"
USABLE = frozenset({"right", "slow", "slow-pcie"})
"""Verdicts on an HCA over which a group computes; that it is slow is the gate's to refuse."""
OWN_VARIABLES = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", GID_VARIABLE, "NCCL_SOCKET_IFNAME", "VLLM_API_KEY", "VLLM_HOST_IP"})
OWN_OPTIONS = {"--headless": 0, "--host": 1, "--node-rank": 1, "--port": 1, "--ssl-certfile": 1, "--ssl-keyfile": 1}
"""What the ranks of one group rightly have different, by `_serving` and `_nccl`: variables, and options with the number of their values."""


@dataclass(frozen=True)
class Gids:
    """A member's GIDs now: the index of each planned HCA, the one index that all share (else None), and what is wrong."""

    indexes: Mapping[str, int]
    common: int | None
    problems: Sequence[str]

    def changes(self, before: Mapping[str, int]) -> list[str]:
        """What moved since an earlier start."""
        return [
            f"HCA {hca} carries its address at GID index {index} instead of {before[hca]}"
            for hca, index in self.indexes.items()
            if before.get(hca, index) != index
        ]


def resolve_gids(hcas: Mapping[str, _roce.Hca], legs: Sequence[Mapping[str, str]]) -> Gids:
    """The GIDs of a member's legs (`hca`, `netdev`, `address`)."""
    judged = _roce.judge(hcas, {leg["hca"]: (leg["netdev"], leg["address"]) for leg in legs})
    unusable = [f"HCA {row['name']} " for row in judged["hcas"] if row["verdict"] not in USABLE]
    known = {row["name"] for row in judged["hcas"]}
    absent = [f"HCA {leg['hca']} " for leg in legs if leg["hca"] not in known]
    return Gids(
        {row["name"]: row["gid_index"] for row in judged["hcas"] if row["gid_index"] is not None},
        judged["gid_index"],
        [problem for problem in judged["problems"] if problem.startswith((*unusable, *absent))],
    )


def checkpoint_problem(directory: str, config: str | None, kept_hash: str, heads: Mapping[str, Any], ranks: int) -> str:
    """Whether config.json is the one that the service role saw (`kept_hash`, empty where it saw none) and is padded as the profile says."""
    path, cure = f"{directory}/config.json", "run site.yml --tags storage,service"
    if config is None:
        return f"{path} is not there: {cure}"
    if heads:
        try:
            padded = _padding.is_padded(json.loads(config), _padding.shape_of(heads, ranks))
        except (_padding.PaddingError, ValueError) as error:
            return f"{path} cannot be judged ({error}): {cure}"
        if not padded:
            return f"{path} is not padded for {ranks} ranks, as after a new staging: {cure}"
    if kept_hash and hashlib.sha256(config.encode()).hexdigest() != kept_hash:
        return f"{path} is not the one that was there when the group was set up: {cure}"
    return ""


def port_problems(wanted: Mapping[int, str], held: Mapping[int, str]) -> list[str]:
    """Ports that others hold. `wanted`: port -> cure, `held`: port -> program."""
    return [f"port {port} is in use by {held[port]}: {cure}" for port, cure in wanted.items() if port in held]


def port_cures(api: int, master: int) -> dict[int, str]:
    """The ports that the head's container needs, each with what to do where it is taken."""
    return {api: "stop it or choose another cluster_api_port", master: "stop it or choose another engine.master_port in the profile"}


def memory_problem(need_mib: int, free_mib: int, available_mib: int, largest: Sequence[tuple[str, int]]) -> str:
    """Whether MemFree has what a start needs, with the page cache dropped; `largest`: processes with their MiB.

    MemFree counts and not MemAvailable: the GPU's driver takes no page cache back (MiaAI-Lab's two-Spark kit, vllm#35313).
    """
    if free_mib >= need_mib:
        return ""
    held = ", ".join(f"{name} {mib / 1024:.1f}" for name, mib in largest)
    return (
        f"{free_mib / 1024:.1f} GiB are free and {available_mib / 1024:.1f} available with the page cache dropped, but a start needs "
        f"{need_mib / 1024:.1f} free: stop what holds the memory (GiB: {held or 'no process, so look at the GPU'})"
    )


def fingerprint(environment: Mapping[str, str], command: Iterable[str]) -> dict[str, str]:
    """What all ranks must have the same, as name -> short hash: values may be secret. Ranks that differ hang without an error (OT, bot-lab-21)."""
    common = {name: value for name, value in environment.items() if name not in OWN_VARIABLES}
    common["the arguments"] = "\0".join(shared_arguments(command))
    return {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in common.items()}


def shared_arguments(command: Iterable[str]) -> list[str]:
    """A rank's arguments without those that are its own."""
    kept, skip = [], 0
    for word in command:
        option, equals = word.partition("=")[:2]
        if skip:
            skip -= 1
        elif option in OWN_OPTIONS:
            skip = 0 if equals else OWN_OPTIONS[option]
        else:
            kept.append(word)
    return kept


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first name by which two fingerprints differ; empty when they do not."""
    return next((name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)), "")
