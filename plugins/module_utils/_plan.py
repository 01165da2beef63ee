# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inventory and profile to the plan: one JSON document with all that follows from the two, made without touching a host."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from . import _gate_pass, _image, _nccl, _serving
from ._errors import PlanError
from ._schema import with_defaults
from ._topology import Fabric, Member, plan_fabric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 1

# Where the rank supervisors of one group find each other; beside vLLM's own port 29500 and the profiles' master ports.
COORDINATION_PORT = 29600

# Seconds of silence after which a member counts as lost: a rank that loads weights keeps both cores of a small host busy.
HEARTBEAT_S = 10

# Waits before the starts that follow a failure; one failure more within six hours, and nothing starts any more. A token every
# 90 s keeps the GPU out of its slow state (LLMKube's keep-warm). After 300 s vLLM itself gives a step up. A start that logs nothing on any
# rank for 420 s hangs (MiaAI-Lab's two-Spark kit).
RECOVERY = {"backoff_s": [120, 300, 900], "canary_interval_s": 90, "canary_silence_s": 300, "load_silence_s": 420}

# The floors of LLMKube's gb10-memory-guard. `stop` ends the group in order when memory stays below the floor, `log` only says so,
# `kill` gives the container no grace. Kill is no default: what took the memory may be something else (an upload of 7 GiB once
# did, MiaAI-Lab's two-Spark kit), and a killed engine saves nothing.
GUARD = {"at_floor": "stop", "floor_mib": 1536, "flush_floor_mib": 4096, "load_cached_mib": 40960}

# Above every daemon's 0, so that an overrun takes the rank and not sshd; the value of tonyd2wild's and LakyFx's launchers.
OOM_SCORE_ADJ = 500

# Compiled kernels outlive a container here; a cold cache costs up to 36 minutes of tuning (jnardiello).
CACHE_ROOT = "/var/lib/gb10/cache"

# A rank's packed Engram rows; outside of the storage root, which may be a network's.
ENGRAM_ROOT = "/var/lib/gb10/engram"


def build_plan(members: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], profile: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of members (`name`, `address`, `interface`?) in rank order under settings (`cluster_*`) with a profile.

    All three are plain data, valid by the schemas in `_schema`. Raises PlanError, one sentence with the exact key.
    """
    settings = with_defaults(settings)
    ranks = members_of(members, settings)
    fabric = plan_fabric(ranks, settings)
    _serving.check_profile(profile, ranks)
    overrides = _overrides(profile)
    _nccl.check_overrides(fabric, overrides, profile["name"])
    _check_ports(profile, settings)
    names = list(fabric.members)
    head = ranks[0]
    cluster = {
        "name": settings["cluster_name"],
        "topology": fabric.topology,
        "members": names,
        "head": head.name,
        "engine": settings["cluster_engine"],
        "profile": profile["name"],
        "devices": list(settings["cluster_devices"]),
    }
    checkpoint = profile["checkpoint"]
    plan: dict[str, Any] = {
        "version": VERSION,
        "cluster": cluster,
        "fabric": _fabric(fabric, _nccl.explain(fabric, devices=bool(settings["cluster_devices"]), overrides=overrides)),
        "storage": {
            "directory": f"{settings['cluster_storage_root']}/{checkpoint['directory']}",
            "files_manifest": checkpoint.get("manifest", ""),
            "source": _source(profile, "checkpoint", "directory", "cluster_checkpoint_source", settings),
            "checkpoint": checkpoint["name"],
            "replicas": replicas(fabric),
            "preparation": checkpoint.get("preparation", {}),
        },
        "image": {
            "reference": profile["image"]["reference"],
            "name": _image.local_name(profile["image"]["reference"]),
            "source": _source(profile, "image", "archive", "cluster_image_archive", settings),
        },
        "service": {
            "group": cluster["name"],
            "port": settings["cluster_api_port"],
            "url": f"{'https' if settings['cluster_tls'] else 'http'}://{head.address}:{settings['cluster_api_port']}",
            "served_model_name": profile["serving"]["served_model_name"],
            "max_model_len": profile["serving"]["max_model_len"],
            "launch_order": _serving.launch_order(names),
            "unit": f"gb10-rank@{cluster['name']}.service",
            "probes": profile["probes"],
            "kv_bytes_per_token": profile["memory"].get("kv_bytes_per_token", 0),
        },
        "members": {
            member.name: {
                "rank": member.rank,
                "management": {"address": member.address, "interface": member.interface},
                "legs": member_legs(fabric, member.name),
                "rank_config": _rank_config(member, ranks, fabric, settings, profile),
            }
            for member in ranks
        },
    }
    gate = _gate_pass.digest(plan)
    for member in plan["members"].values():
        member["rank_config"]["start"]["gate"] = gate
    cluster["digest"] = digest(plan)
    for member in plan["members"].values():
        member["rank_config"]["digest"] = cluster["digest"]
    return plan


def members_of(members: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Member]:
    """Members by rank; the management interface is the group's unless a member names its own."""
    default = settings["cluster_management_interface"]
    return [Member(member["name"], rank, member["address"], member.get("interface", default)) for rank, member in enumerate(members)]


def digest(plan: Mapping[str, Any]) -> str:
    """SHA-256 of all that the running group depends on: the cluster, its fabric, every rank's configuration, the preparation.

    It is one value for all ranks, compared between them and against the running unit. Where files come from, what is probed
    and the notes are no part of it: a change of these restarts nothing.
    """
    content = {
        "version": plan["version"],
        "cluster": {key: value for key, value in plan["cluster"].items() if key != "digest"},
        "fabric": {key: value for key, value in plan["fabric"].items() if key not in ("notes", "nccl")},
        "checkpoint": [plan["storage"][key] for key in ("checkpoint", "files_manifest", "preparation")],
        "ranks": {
            name: {key: value for key, value in member["rank_config"].items() if key != "digest"}
            for name, member in plan["members"].items()
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def replicas(fabric: Fabric) -> list[dict[str, str]]:
    """Who copies the checkpoint from whom: a tree from the head outwards, each copy over a leg that both ends share.

    The address is that of the source on the first leg (half A) towards the copying member.
    """
    copies: dict[str, dict[str, str]] = {}
    waiting = [fabric.members[0]]
    while waiting:
        source = waiting.pop(0)
        for leg, end in fabric.legs_of(source):
            for peer in leg.ends:
                if peer.member not in {fabric.members[0], *copies}:
                    copies[peer.member] = {"member": peer.member, "from": source, "address": end.address}
                    waiting.append(peer.member)
    return list(copies.values())


def member_legs(fabric: Fabric, member: str) -> list[dict[str, Any]]:
    """A member's legs as plain data, each with whom it meets there."""
    return [
        {
            "netdev": end.port.netdev,
            "hca": end.port.hca,
            "cage": end.port.cage,
            "half": leg.half,
            "cable": leg.cable,
            "address": end.address,
            "prefix_length": leg.network.prefixlen,
            "network": str(leg.network),
            "peers": [
                {"member": peer.member, "netdev": peer.port.netdev, "address": peer.address} for peer in leg.ends if peer.member != member
            ],
        }
        for leg, end in fabric.legs_of(member)
    ]


def nccl_environment(fabric: Fabric, member: Member, settings: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, str]:
    """A member's NCCL and Gloo variables under the settings."""
    chosen = _nccl.variables(fabric, member.name, member.interface, devices=bool(settings["cluster_devices"]), overrides=overrides)
    return {key: variable.value for key, variable in chosen.items()}


def _overrides(profile: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in profile.get("nccl", {}).get("overrides", {}).items()}


def _check_ports(profile: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The API, the rendezvous and the supervisors need a port each on the head."""
    taken = {COORDINATION_PORT: "the rank supervisors' port"}
    where = f"profile {profile['name']}: engine.master_port"
    for key, port in (("inventory: cluster_api_port", settings["cluster_api_port"]), (where, profile["engine"]["master_port"])):
        if port in taken:
            raise PlanError(f"{key} is {port}, which is {taken[port]}: choose another port")
        taken[port] = f"also {key.removeprefix('inventory: ')}"


def _source(profile: Mapping[str, Any], part: str, kind: str, setting: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Where a part comes from: a setting's path on the controller, or as the profile says."""
    if settings[setting]:
        return {"kind": kind, "path": settings[setting]}
    source = dict(profile[part]["source"])
    if source["kind"] == kind and "path" not in source:
        raise PlanError(f"profile {profile['name']}: {part}.source names no path: set {setting} in the inventory")
    return source


def _fabric(fabric: Fabric, nccl: Mapping[str, Any]) -> dict[str, Any]:
    """The fabric as plain data. What the library must know beyond a plain release is a note as well, for who reads only these."""
    return {
        "mtu": fabric.mtu,
        "prefix_length": fabric.prefix_length,
        "networks": [str(leg.network) for leg in fabric.legs],
        "cables": [
            {"name": cable.name, "ends": [{"member": plug.member, "cage": plug.cage} for plug in cable.ends]} for cable in fabric.cables
        ],
        "legs": [
            {
                "cable": leg.cable,
                "half": leg.half,
                "network": str(leg.network),
                "ends": [
                    {
                        "member": end.member,
                        "cage": end.port.cage,
                        "netdev": end.port.netdev,
                        "hca": end.port.hca,
                        "address": end.address,
                    }
                    for end in leg.ends
                ],
            }
            for leg in fabric.legs
        ],
        "nccl": nccl,
        "notes": [*fabric.notes, *(each["reason"] for each in nccl["library"] if each["feature"] != _nccl.SUBNET_ROUTING)],
    }


def _rank_config(
    member: Member, ranks: Sequence[Member], fabric: Fabric, settings: Mapping[str, Any], profile: Mapping[str, Any]
) -> dict[str, Any]:
    """What the rank supervisor of a member reads, but for what follows from the whole plan: its digest, and what the gate has to have measured."""
    name = settings["cluster_name"]
    nccl = nccl_environment(fabric, member, settings, _overrides(profile))
    devices = list(settings["cluster_devices"])
    return {
        "group": name,
        "rank": member.rank,
        "world_size": len(ranks),
        "engine": settings["cluster_engine"],
        "ranks": [{"rank": other.rank, "member": other.name, "address": other.address} for other in ranks],
        "coordination_port": COORDINATION_PORT,
        "master_port": profile["engine"]["master_port"],
        "api": {"port": settings["cluster_api_port"], "tls": settings["cluster_tls"]},
        "served_model_name": profile["serving"]["served_model_name"],
        "container": {
            "name": f"gb10-{name}",
            "image": _image.local_name(profile["image"]["reference"]),
            "command": _serving.arguments(profile, ranks, member.rank, settings["cluster_api_port"], settings["cluster_tls"]),
            "environment": _serving.environment(profile, member, nccl),
            "volumes": _volumes(profile, settings, member.rank == 0),
            "devices": devices,
            "gpus": settings["cluster_gpu"],
            # RDMA registration pins memory; without RDMA devices nothing needs it.
            "capabilities": ["IPC_LOCK"] if devices else [],
            "ulimits": {"memlock": "-1"},
            "shm_mib": profile["memory"]["shm_mib"],
            "memory_mib": profile["memory"]["container_limit_mib"],
            "oom_score_adj": OOM_SCORE_ADJ,
        },
        "timeouts": {
            "start_s": profile["serving"]["start_timeout_s"],
            "stop_s": profile["serving"]["stop_timeout_s"],
            "heartbeat_s": HEARTBEAT_S,
        },
        "recovery": RECOVERY | profile["serving"].get("recovery", {}),
        "guard": profile["memory"].get("guard", GUARD),
        "start": {
            "free_mib": profile["memory"].get("start_free_mib", 0),
            "legs": [
                {"hca": end.port.hca, "netdev": end.port.netdev, "address": end.address} for dummy, end in fabric.legs_of(member.name)
            ],
            "checkpoint": f"{settings['cluster_storage_root']}/{profile['checkpoint']['directory']}",
            "virtual_heads": profile["checkpoint"].get("preparation", {}).get("virtual_heads", {}),
            "log_lines": dict(profile["engine"].get("log_lines", {})),
            "warm_up": list(profile["serving"].get("warm_up", [])),
        },
    }


def _volumes(profile: Mapping[str, Any], settings: Mapping[str, Any], head: bool) -> list[dict[str, Any]]:
    """The checkpoint, its Engram tables, a rank's packed rows of them and the head's certificate, read-only; the cache of compiled kernels."""
    directories = [profile["checkpoint"]["directory"]]
    engram = profile["checkpoint"].get("preparation", {}).get("engram")
    if engram:
        directories.append(engram["directory"])
    root = settings["cluster_storage_root"]
    volumes = [
        {"source": f"{root}/{directory}", "target": f"{_serving.MODELS_MOUNT}/{directory}", "read_only": True} for directory in directories
    ]
    if engram and "packed_mount" in engram:
        volumes.append({"source": f"{ENGRAM_ROOT}/{settings['cluster_name']}", "target": engram["packed_mount"], "read_only": True})
    if "cache_mount" in profile["engine"]:
        source = f"{CACHE_ROOT}/{settings['cluster_name']}"
        volumes.append({"source": source, "target": profile["engine"]["cache_mount"], "read_only": False})
    if head and settings["cluster_tls"]:
        volumes.append(
            {"source": f"/etc/gb10/{settings['cluster_name']}/{_serving.TLS_FOLDER}", "target": _serving.TLS_MOUNT, "read_only": True}
        )
    return volumes
