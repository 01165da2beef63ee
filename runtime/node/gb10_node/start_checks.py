# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank looks at on its own member in the seconds before its container starts, in this order; the rules are the core's (`_start`).

Stale container (removed), image, packed Engram rows, config.json, GIDs, ports of the head, age of the fabric gate's pass (told), page cache (dropped),
free memory. The last two stand last because only then their result still holds when the engine takes its memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gb10_core import _gate_pass, _host, _image, _roce, _sockets, _start

from gb10_node import engram
from gb10_node.config import RankConfig
from gb10_node.memory import Memory, MemoryReader

MEMORY_TRIES, MEMORY_PAUSE_S = 4, 5.0
"""What was just stopped gives its memory back within seconds; bot-lab-21's launcher looks four times."""
LARGEST, LARGE_MIB = 3, 256
"""Processes that a refusal names, and what one must hold to be named."""


class Refused(Exception):
    """The rank may not start; one sentence with its cure."""


@dataclass(frozen=True)
class Checked:
    """What was found: variables for the container, what all ranks must have the same, the report for the state, and what has changed."""

    environment: dict[str, str]
    fingerprint: dict[str, str]
    report: dict[str, Any]
    events: list[str]


async def check(config: RankConfig) -> Checked:
    """Look at everything; raises Refused at the first thing that does not hold."""
    began = time.monotonic()
    gids = await asyncio.to_thread(_look, config)
    before = _known_gids(config.gids)
    events = gids.changes(before)
    if gids.indexes and gids.indexes != before:
        _host.write(config.gids, json.dumps(gids.indexes).encode())
    if stale := _stale_gate(config):
        events.append(stale)
    # A host without RDMA devices in the container is told nothing about them; and one number cannot express two.
    pinned = bool(config.container.devices) and gids.common is not None
    environment = {_start.GID_VARIABLE: str(gids.common)} if pinned else {}
    memory = await _free_memory(config)
    fingerprint = _start.fingerprint(config.container.environment | environment, config.container.command)
    report = {
        "seconds": round(time.monotonic() - began, 2),
        "gid_indexes": dict(gids.indexes),
        "environment": environment,
        "image": config.container.image,
        "gate": stale,
        "mem_free_mib": memory.free,
        "mem_available_mib": memory.available,
    }
    return Checked(environment, fingerprint, report, events)


def _look(config: RankConfig) -> _start.Gids:
    """All that is a matter of reading; the GIDs that were found."""
    start, engine = config.start, config.engine
    try:
        image = _image.inspected(engine, _host.run(_image.inspect_argv(engine, config.container.image)))
    except _image.ImageError as error:
        raise Refused(str(error)) from error
    config_json = _host.read_bytes(start.checkpoint / "config.json")
    gids = _start.resolve_gids(_roce.read_hcas(start.sysfs), start.legs)
    problems = [
        _image.verdict(config.container.image, image, None),
        engram.problem(config),
        _start.checkpoint_problem(
            str(start.checkpoint),
            config_json and config_json.decode("utf-8", "replace"),
            start.config_hash,
            start.virtual_heads,
            len(config.ranks),
        ),
        *(gids.problems if config.container.devices else []),
    ]
    if config.is_head:
        problems += _start.port_problems(_start.port_cures(config.api.port, config.master_port), _sockets.listeners(config.procfs))
    for problem in filter(None, problems):
        raise Refused(problem)
    return gids


def _stale_gate(config: RankConfig) -> str:
    """Why the head has no pass of the fabric gate that holds; empty where it has, and where nobody asks.

    No refusal: a start that nobody asked for, after a boot or a failure, must not leave a group down because a week went by, and to measure
    takes a person. Whoever starts a group that is down by a playbook is refused there.
    """
    if not config.is_head or config.start.gate_max_age_s is None:
        return ""
    try:
        kept = json.loads(config.measured.read_bytes())
    except (OSError, ValueError):
        kept = None
    kept = kept if isinstance(kept, dict) else None
    return _gate_pass.stale(kept, config.group, config.start.gate, time.time(), config.start.gate_max_age_s)


def _known_gids(path: Path) -> dict[str, int]:
    """The indexes of the last start on this member, also of one before a reboot."""
    try:
        known = json.loads(path.read_bytes())
        return {str(hca): int(index) for hca, index in known.items()}
    except (OSError, ValueError, AttributeError):
        return {}


async def _free_memory(config: RankConfig) -> Memory:
    """Drop the page cache, and see that MemFree has what the start needs."""
    reader = MemoryReader(config.procfs)
    need, problem = config.start.free_mib, ""
    for attempt in range(MEMORY_TRIES):
        if attempt:
            await asyncio.sleep(MEMORY_PAUSE_S)
        try:
            await asyncio.to_thread(reader.drop_page_cache)
        except OSError as error:
            print(f"gb10: the page cache is not dropped ({error.strerror})", flush=True)
        memory = reader.read()
        if not (
            problem := _start.memory_problem(need, memory.free, memory.available, _largest(config.procfs) if memory.free < need else [])
        ):
            return memory
    raise Refused(problem)


def _largest(procfs: str) -> list[tuple[str, int]]:
    """The processes that hold most memory, with their MiB."""
    page = os.sysconf("SC_PAGE_SIZE")
    held = []
    for pid in filter(str.isdigit, _host.names(procfs)):
        statm, name = _host.read(f"{procfs}/{pid}/statm"), _host.read(f"{procfs}/{pid}/comm")
        if statm and name:
            held.append((int(statm.split()[1]) * page >> 20, f"{name} (pid {pid})"))
    return [(name, mib) for mib, name in sorted(held, reverse=True)[:LARGEST] if mib >= LARGE_MIB]
