# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint as a ZFS dataset: its properties, its snapshots, and the stream that brings one to another member.

A stream goes from `zfs send` into a TCP connection over a leg and out of it into `zfs receive`: every record in it has a
checksum that the receiver holds against its content, so that a byte that turns on the way ends the stream and not more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PORT = 8732
"""Beside the port of `weights_source`."""
OWNER = "gb10:checkpoint"
"""The user property by which our datasets are known; nothing is received into another one."""
PREFIX = "gb10-"
KEPT = 2
"""Snapshots of a dataset that stay: the newest, and the one before it to go back to."""
PROPERTIES = {"recordsize": "1M", "atime": "off", "compression": "lz4"}
"""Of a dataset of weights (MiaAI-Lab's two-Spark kit): long sequential reads, and lz4 gives up early on what does not compress."""
REPLICA_PROPERTIES = {**PROPERTIES, "readonly": "on", "canmount": "on"}
"""Nothing but a stream changes a replica, so that the next increment fits."""
REQUEST_BYTES = 64 * 1024

_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*(/[A-Za-z0-9_.:-]+)+")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot by its name after the @, and the guid that it has on every member."""

    name: str
    guid: str


def is_dataset(name: str) -> bool:
    """Whether this is POOL/NAME, which goes into commands."""
    return bool(_DATASET.fullmatch(name))


def snapshot_name(digest: str) -> str:
    """The snapshot of a checkpoint by the digest of its manifest: the same content has the same name."""
    return f"{PREFIX}{digest[:16]}"


def parse_snapshots(text: str) -> list[Snapshot]:
    """Snapshots of `zfs list -H -t snapshot -o name,guid -s creation`, oldest first."""
    found = []
    for line in text.splitlines():
        name, guid = line.split("\t")
        found.append(Snapshot(name.partition("@")[2], guid))
    return found


def list_argv(dataset: str) -> list[str]:
    """The command that `parse_snapshots` reads."""
    return ["zfs", "list", "-H", "-p", "-t", "snapshot", "-o", "name,guid", "-s", "creation", "-d", "1", dataset]


def common(ours: Sequence[Snapshot], theirs: Sequence[str]) -> Snapshot | None:
    """The newest of our snapshots that the other has, by guid: a name alone says nothing."""
    return next((snapshot for snapshot in reversed(ours) if snapshot.guid in theirs), None)


def create_argv(dataset: str, path: str, name: str) -> list[str]:
    """Makes the dataset on the member where files arrive."""
    options = {**PROPERTIES, "mountpoint": path, OWNER: name}
    return ["zfs", "create", "-p", *(word for key, value in options.items() for word in ("-o", f"{key}={value}")), dataset]


def send_argv(dataset: str, snapshot: str, base: Snapshot | None, token: str) -> list[str]:
    """The stream of a snapshot: the rest of a cut one, what is new since `base`, or all of it.

    -L keeps records of 1 MiB whole, -c sends them compressed as they lie on the disk.
    """
    if token:
        return ["zfs", "send", "-t", token]
    return ["zfs", "send", "-L", "-c", *(["-i", f"@{base.name}"] if base else []), f"{dataset}@{snapshot}"]


def receive_argv(dataset: str, path: str, name: str) -> list[str]:
    """Takes a stream. -s keeps what has arrived of a stream that is cut, and -u mounts nothing half-way."""
    options = {**REPLICA_PROPERTIES, "mountpoint": path, OWNER: name}
    return ["zfs", "receive", "-s", "-u", *(word for key, value in options.items() for word in ("-o", f"{key}={value}")), dataset]


def rollback_argv(dataset: str, snapshot: Snapshot) -> list[str]:
    """Takes back what was changed since a snapshot."""
    return ["zfs", "rollback", "-r", f"{dataset}@{snapshot.name}"]


def surplus(snapshots: Sequence[Snapshot]) -> list[str]:
    """Our snapshots that are too many, oldest first. Others' are not ours to remove."""
    ours = [snapshot.name for snapshot in snapshots if snapshot.name.startswith(PREFIX)]
    return ours[:-KEPT]


def request(snapshots: Sequence[Snapshot], token: str) -> bytes:
    """What a receiver says first: one line."""
    return json.dumps({"have": [snapshot.guid for snapshot in snapshots], "token": token}).encode() + b"\n"


def parse_request(line: bytes) -> tuple[list[str], str]:
    """Guids and resume token; a request that is no such line raises ValueError."""
    content = json.loads(line)
    have, token = content["have"], content["token"]
    if not isinstance(have, list) or not all(isinstance(guid, str) and guid.isdigit() for guid in have):
        raise ValueError("have")
    if not isinstance(token, str) or not re.fullmatch(r"[0-9a-f-]*", token):
        raise ValueError("token")
    return have, token


def reply(kind: str) -> bytes:
    """What the sender says before the stream: `full`, `increment`, `rest`, or `nothing` and then no stream."""
    return json.dumps({"kind": kind}).encode() + b"\n"


def choose_backend(facts: Mapping[str, Any], need: int, room: int) -> tuple[str, str]:
    """Which way a member gets the checkpoint, and why, in one sentence.

    Of `facts`: `replica` says how it was got before (empty if never), `pools` whether head and member have a dataset to
    put it in, `head_adjacent` whether a leg leads to the head. `need` and `room` are bytes.
    """
    if facts["replica"]:
        return facts["replica"], f"it was got by {facts['replica']} before, and what is there is kept"
    if need <= room:
        if facts["pools"]:
            return "zfs", "there is room for it, and both ends have a pool, so that new revisions come as increments"
        return "rsync", "there is room for it on the local disk, from where it loads fastest"
    if facts["head_adjacent"]:
        return "nfs", "there is no room for it on the local disk, and a leg leads to the head"
    return "", "there is no room for it on the local disk, and no leg leads to the head: make room"
