# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""JSON schemas (2020-12) of what goes into a plan (members, settings, profile) and of the plan itself.

A `description` finishes the sentence "expected ..." of an error message. The checking is the controller's business
(plugin_utils/_inputs.py): no member needs a schema library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Schema = dict[str, Any]


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _text(pattern: str, description: str) -> Schema:
    return {"type": "string", "pattern": pattern, "description": description}


def _integer(least: int, most: int | None = None, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most}), **more}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _map(keys: Schema, values: Schema) -> Schema:
    """An object with free keys of one form and values of one form."""
    return {"type": "object", "propertyNames": keys, "additionalProperties": values}


def _one_of_kinds(kinds: Mapping[str, Schema]) -> Schema:
    """An object whose `kind` decides its other keys."""
    return {
        "type": "object",
        "properties": {"kind": {"enum": list(kinds)}},
        "required": ["kind"],
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {**schema, "properties": {"kind": {}, **schema["properties"]}},
            }
            for kind, schema in kinds.items()
        ],
    }


TEXT: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
NAME = _text(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "a name of letters, digits, '.', '_' and '-'")
INTERFACE = _text(r"^[A-Za-z0-9][A-Za-z0-9._@:-]{0,14}$", "the name of a network interface")
PATH = _text(r"^/\S+$", "an absolute path without spaces")
NETWORK = _text(r"^\d+\.\d+\.\d+\.\d+/\d+$", "an IPv4 network like 10.10.0.0/16")
PORT = _integer(1024, 65535)
SECONDS = _integer(1)
_RECOVERY = {"backoff_s": _list(SECONDS, minItems=1), "canary_interval_s": SECONDS, "canary_silence_s": SECONDS, "load_silence_s": SECONDS}
RECOVERY = _object(_RECOVERY)
MEBIBYTES = _integer(64)
GUARD = _object(
    {"at_floor": {"enum": ["stop", "kill", "log"]}, "floor_mib": MEBIBYTES, "flush_floor_mib": MEBIBYTES, "load_cached_mib": MEBIBYTES}
)
# What is told -> a regular expression for the line that tells it.
LOG_LINES = _map(TEXT, {**TEXT, "format": "regex"})
SCALAR: Schema = {"type": ["string", "integer", "number"], "minLength": 1}
VARIABLE = _text(r"^[A-Z_][A-Z0-9_]*$", "the name of an environment variable")

MEMBER = _object({"name": TEXT, "address": TEXT}, {"interface": INTERFACE})
MEMBERS = _list(MEMBER)

# The group variables of a cluster. `default`: what holds where a variable is not set.
SETTINGS = _object(
    {
        "cluster_name": _text(r"^[a-z][a-z0-9-]*$", "lower-case letters, digits and hyphens"),
        "cluster_profile": TEXT,
        "cluster_topology": {"enum": ["pair", "ring", "switched"]},
    },
    {
        "cluster_cables": _list(TEXT, default=[]),
        "cluster_switch_cages": _list({"enum": [0, 1]}, minItems=1, uniqueItems=True, default=[0]),
        "cluster_leg_pool": {**NETWORK, "default": "10.10.0.0/16"},
        "cluster_leg_prefix": {**_integer(8, 30), "type": ["integer", "null"], "default": None},
        "cluster_leg_stride_prefix": _integer(8, 30, default=24),
        "cluster_leg_numbering": {"enum": ["ends", "ranks"], "default": "ends"},
        "cluster_leg_first_host": _integer(1, 253, default=1),
        "cluster_mtu": _integer(1280, 9000, default=9000),
        "cluster_management_interface": {**INTERFACE, "default": "enP7s7"},
        "cluster_management_network": {**NETWORK, "type": ["string", "null"], "default": None},
        # What Docker, Podman, k3s, kubeadm (services) and flannel take unless told otherwise.
        "cluster_reserved_networks": _list(
            NETWORK,
            default=["172.17.0.0/16", "10.88.0.0/16", "10.42.0.0/16", "10.43.0.0/16", "10.96.0.0/12", "10.244.0.0/16"],
        ),
        "cluster_engine": {"enum": ["docker", "podman"], "default": "docker"},
        "cluster_devices": _list(PATH, default=["/dev/infiniband"]),
        "cluster_gpu": {**BOOLEAN, "default": True},
        "cluster_api_port": {**PORT, "default": 8000},
        "cluster_tls": {**BOOLEAN, "default": False},
        "cluster_storage_root": {**PATH, "default": "/var/lib/gb10/models"},
        "cluster_checkpoint_source": {"type": ["string", "null"], "minLength": 1, "default": None},
        "cluster_image_archive": {"type": ["string", "null"], "minLength": 1, "default": None},
        "cluster_allow_disruption": {**BOOLEAN, "default": False},
        "cluster_profile_changes": {"type": "object", "default": {}},
    },
)

# For what needs the fabric only.
FABRIC_SETTINGS: Schema = {**SETTINGS, "required": ["cluster_topology"]}

CHECKPOINT_SOURCE = _one_of_kinds(
    {
        "directory": _object({}, {"path": TEXT}),
        "hub": _object({"repository": TEXT, "revision": TEXT}, {"include": _list(TEXT, minItems=1)}),
        "http": _object({"url": TEXT}),
    }
)
IMAGE_SOURCE = _one_of_kinds(
    {
        "archive": _object({}, {"path": TEXT}),
        "registry": _object({}),
        "build": _object({"recipe": TEXT}, {"published": TEXT}),
    }
)
HEADS = {"num_attention_heads": _integer(1), "o_groups": _integer(1)}
PREPARATION = _object(
    {},
    {
        "virtual_heads": _object({**HEADS, "from": _object(HEADS)}),
        "engram": _object(
            {"directory": NAME, "source": CHECKPOINT_SOURCE, "size_gib": {"type": "number", "exclusiveMinimum": 0}}, {"packed_mount": PATH}
        ),
    },
)
_TEMPLATE: Schema = {"chat_template_kwargs": {"type": "object"}}


def _probe(required: Schema, optional: Schema) -> Schema:
    """Settings of a probe that a profile may leave out, or set to null: not probed."""
    return {**_object(required, optional), "type": ["object", "null"]}


PROBES = _object(
    {"chat": _object({"prompt": TEXT, "expect": {**TEXT, "format": "regex"}, "max_tokens": _integer(1)}, _TEMPLATE)},
    {
        "parity": _object({"prompt": TEXT, "tokens": _integer(1)}),
        "logprobs": _probe({}, {"tokens": _integer(1)}),
        "determinism": _probe({}, {"tokens": _integer(1), "repeats": _integer(2)}),
        "prefix_cache": _probe({}, {"tokens": _integer(1), "prompt_tokens": _integer(1)}),
        "stop": _probe({}, {"tokens": _integer(16)}),
        "streams": _probe({}, {"tokens": _integer(8), "exact": BOOLEAN}),
        "tools": _probe({}, {"max_tokens": _integer(1), **_TEMPLATE}),
        "reasoning": _probe(_TEMPLATE, {"max_tokens": _integer(1)}),
        "vision": _probe({}, {"max_tokens": _integer(1), **_TEMPLATE}),
        "limit": _probe({}, {}),
        "needle": _probe(
            {"lengths": _list(_integer(256), minItems=1)},
            {"depths": _list({"type": "number", "minimum": 0, "maximum": 1}, minItems=1), "max_tokens": _integer(1), **_TEMPLATE},
        ),
    },
)

PROFILE = _object(
    {
        "name": NAME,
        "description": TEXT,
        # Whether these values were run by this collection, taken from a published configuration that was, or put together; and what says so.
        "status": _object({"level": {"enum": ["verified", "derived", "experimental"]}, "evidence": TEXT}),
        "checkpoint": _object(
            {
                "name": NAME,
                "directory": NAME,
                "source": CHECKPOINT_SOURCE,
                "size_gib": {"type": "number", "exclusiveMinimum": 0},
            },
            {"manifest": NAME, "preparation": PREPARATION},
        ),
        "image": _object({"reference": TEXT, "source": IMAGE_SOURCE}),
        "engine": _object(
            {
                "command": _list(TEXT, minItems=1),
                "environment": _map(VARIABLE, SCALAR),
                "arguments": _map(
                    _text(r"^[a-z][a-z0-9-]*$", "the name of an option without its dashes"),
                    {
                        "anyOf": [SCALAR, {"const": True}, {"type": "null"}, _list(SCALAR, minItems=1), {"type": "object"}],
                        "description": "a value, true for a bare flag, a list, a mapping, or null for what is not passed",
                    },
                ),
                "master_port": PORT,
            },
            {
                "cache_mount": PATH,
                "refused": _map(_text(r"^[a-z][a-z0-9-]*$", "the name of an option without its dashes"), TEXT),
                "log_lines": LOG_LINES,
            },
        ),
        "parallelism": _object({"tensor_parallel_size": _integer(1)}, {"expert_parallel": BOOLEAN}),
        "memory": _object(
            {"container_limit_mib": MEBIBYTES, "shm_mib": MEBIBYTES},
            {
                "kv_cache_bytes": _integer(1),
                "kv_bytes_per_token": {"type": "number", "exclusiveMinimum": 0},
                "gpu_memory_utilization": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "start_free_mib": MEBIBYTES,
                "guard": GUARD,
            },
        ),
        "serving": _object(
            {
                "served_model_name": TEXT,
                "max_model_len": _integer(1),
                "start_timeout_s": SECONDS,
                "stop_timeout_s": SECONDS,
            },
            {"recovery": _object({}, _RECOVERY), "warm_up": _list(_integer(1), uniqueItems=True)},
        ),
        "probes": PROBES,
    },
    {"nccl": _object({"overrides": _map(VARIABLE, SCALAR)})},
)


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every default of the schema filled in."""
    defaults = {key: schema["default"] for key, schema in SETTINGS["properties"].items() if "default" in schema}
    return {**defaults, **settings}


_ADDRESS = _text(r"^\d+\.\d+\.\d+\.\d+$", "an IPv4 address")
_CAGE: Schema = {"enum": [0, 1]}
_HALF: Schema = {"enum": ["A", "B"]}
_STRINGS = _map(VARIABLE, {"type": "string", "minLength": 1})

RANK_CONFIG = _object(
    {
        "group": TEXT,
        "rank": _integer(0),
        "world_size": _integer(1),
        "digest": _text(r"^[0-9a-f]{64}$", "a SHA-256 in hexadecimal"),
        "engine": {"enum": ["docker", "podman"]},
        "ranks": _list(_object({"rank": _integer(0), "member": TEXT, "address": _ADDRESS}), minItems=2),
        "coordination_port": PORT,
        "master_port": PORT,
        "api": _object({"port": PORT, "tls": BOOLEAN}),
        "served_model_name": TEXT,
        "container": _object(
            {
                "name": TEXT,
                "image": TEXT,
                "command": _list({"type": "string"}, minItems=1),
                "environment": _STRINGS,
                "volumes": _list(_object({"source": PATH, "target": PATH, "read_only": BOOLEAN})),
                "devices": _list(PATH),
                "gpus": BOOLEAN,
                "capabilities": _list(TEXT),
                "ulimits": {"type": "object", "additionalProperties": TEXT},
                "shm_mib": MEBIBYTES,
                "memory_mib": MEBIBYTES,
                "oom_score_adj": _integer(-1000, 1000),
            }
        ),
        "timeouts": _object({"start_s": SECONDS, "stop_s": SECONDS, "heartbeat_s": SECONDS}),
        "recovery": RECOVERY,
        "guard": GUARD,
        "start": _object(
            {
                "free_mib": _integer(0),
                "legs": _list(_object({"hca": TEXT, "netdev": TEXT, "address": _ADDRESS}), minItems=2),
                "checkpoint": PATH,
                "virtual_heads": {"anyOf": [_object({}), PREPARATION["properties"]["virtual_heads"]]},
                "log_lines": LOG_LINES,
                "warm_up": _list(_integer(1)),
                "gate": _text(r"^[0-9a-f]{64}$", "a SHA-256 in hexadecimal"),
            }
        ),
    }
)

PLAN = _object(
    {
        "version": {"const": 1},
        "cluster": _object(
            {
                "name": TEXT,
                "topology": {"enum": ["pair", "ring", "switched"]},
                "members": _list(TEXT, minItems=2, uniqueItems=True),
                "head": TEXT,
                "engine": {"enum": ["docker", "podman"]},
                "profile": TEXT,
                "devices": _list(PATH),
                "digest": _text(r"^[0-9a-f]{64}$", "a SHA-256 in hexadecimal"),
            }
        ),
        "fabric": _object(
            {
                "mtu": _integer(1280, 9000),
                "prefix_length": _integer(8, 30),
                "networks": _list(NETWORK, minItems=2, uniqueItems=True),
                "cables": _list(_object({"name": TEXT, "ends": _list(_object({"member": TEXT, "cage": _CAGE}), minItems=2, maxItems=2)})),
                "legs": _list(
                    _object(
                        {
                            "cable": TEXT,
                            "half": _HALF,
                            "network": NETWORK,
                            "ends": _list(
                                _object({"member": TEXT, "cage": _CAGE, "netdev": TEXT, "hca": TEXT, "address": _ADDRESS}),
                                minItems=2,
                            ),
                        }
                    ),
                    minItems=2,
                ),
                "nccl": _object(
                    {
                        "reasons": _map(VARIABLE, TEXT),
                        "absent": _map(VARIABLE, TEXT),
                        "library": _list(_object({"feature": VARIABLE, "reason": TEXT})),
                    }
                ),
                "notes": _list(TEXT),
            }
        ),
        "storage": _object(
            {
                "directory": PATH,
                "files_manifest": {"type": "string"},
                "source": CHECKPOINT_SOURCE,
                "checkpoint": NAME,
                "replicas": _list(_object({"member": TEXT, "from": TEXT, "address": _ADDRESS}), minItems=1),
                "preparation": PREPARATION,
            }
        ),
        "image": _object({"reference": TEXT, "name": TEXT, "source": IMAGE_SOURCE}),
        "service": _object(
            {
                "group": TEXT,
                "port": PORT,
                "url": TEXT,
                "served_model_name": TEXT,
                "max_model_len": _integer(1),
                "launch_order": _list(TEXT, minItems=2, uniqueItems=True),
                "unit": TEXT,
                "probes": PROBES,
                "kv_bytes_per_token": {"type": "number", "minimum": 0},
            }
        ),
        "members": {
            "type": "object",
            "additionalProperties": _object(
                {
                    "rank": _integer(0),
                    "management": _object({"address": _ADDRESS, "interface": INTERFACE}),
                    "legs": _list(
                        _object(
                            {
                                "netdev": TEXT,
                                "hca": TEXT,
                                "cage": _CAGE,
                                "half": _HALF,
                                "cable": TEXT,
                                "address": _ADDRESS,
                                "prefix_length": _integer(8, 30),
                                "network": NETWORK,
                                "peers": _list(_object({"member": TEXT, "netdev": TEXT, "address": _ADDRESS}), minItems=1),
                            }
                        ),
                        minItems=2,
                    ),
                    "rank_config": RANK_CONFIG,
                }
            ),
        },
    }
)
