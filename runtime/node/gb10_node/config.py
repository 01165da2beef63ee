# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank needs to know, read from the files that the service role wrote under /etc/gb10/GROUP."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gb10_node.health import Api


class ConfigError(ValueError):
    """One sentence: what is wrong, where, what to do."""


@dataclass(frozen=True)
class Peer:
    """One rank of the group: its number, its member's name, its address on the management network."""

    rank: int
    member: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.member}"


@dataclass(frozen=True)
class Container:
    """The arguments of the container, already decided by the plan."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: dict[str, str]
    volumes: tuple[dict[str, Any], ...]
    devices: tuple[str, ...]
    gpus: bool
    capabilities: tuple[str, ...]
    ulimits: dict[str, str]
    shm_mib: int
    memory_mib: int
    oom_score_adj: int


@dataclass(frozen=True)
class Recovery:
    """Seconds before the starts that follow a failure, between two canary tokens, and of silence after which a group is dead: serving, loading."""

    backoff_s: tuple[float, ...]
    canary_interval_s: float
    canary_silence_s: float
    load_silence_s: float


@dataclass(frozen=True)
class Start:
    """What must hold before a start: MiB of MemFree (0: not asked), the legs' HCAs, the checkpoint and what its config.json must be, what the gate
    must have measured within how many seconds (None: not asked). And before the group is announced ready: what each rank has to have logged (name
    -> regular expression), prompt lengths that are computed once.
    """

    free_mib: int
    legs: tuple[dict[str, str], ...]
    checkpoint: Path
    virtual_heads: dict[str, Any]
    config_hash: str
    sysfs: str
    gate: str
    gate_max_age_s: float | None
    log_lines: dict[str, str]
    warm_up: tuple[int, ...]


@dataclass(frozen=True)
class RankConfig:
    """One rank: who it is, who the others are, what it runs, how long things may take (seconds)."""

    group: str
    rank: int
    digest: str
    engine: str
    ranks: tuple[Peer, ...]
    coordination_port: int
    master_port: int
    api: Api
    served_model_name: str
    container: Container
    start_s: float
    stop_s: float
    heartbeat_s: float
    recovery: Recovery
    start: Start
    guard_floor_mib: int
    api_key: str | None
    file_hash: str
    run_dir: Path
    failures: Path
    gids: Path
    evidence: Path
    measured: Path
    history: Path
    procfs: str

    @property
    def me(self) -> Peer:
        """This rank."""
        return self.ranks[self.rank]

    @property
    def head(self) -> Peer:
        """Rank 0, which serves the API and coordinates the start."""
        return self.ranks[0]

    @property
    def is_head(self) -> bool:
        """True on the member that serves the API."""
        return self.rank == 0


def configuration_hash(rank_json: bytes) -> str:
    """Hash by which a running rank and its file are compared: SHA-256 of the file's bytes."""
    return hashlib.sha256(rank_json).hexdigest()


def load(
    group: str,
    etc: Path = Path("/etc/gb10"),
    run: Path = Path("/run/gb10"),
    var: Path = Path("/var/lib/gb10"),
    procfs: Path = Path("/proc"),
) -> RankConfig:
    """Read /etc/gb10/GROUP/rank.json, and on the head the API key beside it; raises ConfigError."""
    path = etc / group / "rank.json"
    try:
        text = path.read_bytes()
        raw = json.loads(text)
        container = raw["container"]
        config = RankConfig(
            group=raw["group"],
            rank=raw["rank"],
            digest=raw["digest"],
            engine=raw["engine"],
            ranks=tuple(Peer(r["rank"], r["member"], r["address"]) for r in raw["ranks"]),
            coordination_port=raw["coordination_port"],
            master_port=raw["master_port"],
            api=Api(**raw["api"]),
            served_model_name=raw["served_model_name"],
            container=Container(
                name=container["name"],
                image=container["image"],
                command=tuple(container["command"]),
                environment=dict(container["environment"]),
                volumes=tuple(container["volumes"]),
                devices=tuple(container["devices"]),
                gpus=container["gpus"],
                capabilities=tuple(container["capabilities"]),
                ulimits=dict(container["ulimits"]),
                shm_mib=container["shm_mib"],
                memory_mib=container["memory_mib"],
                oom_score_adj=container["oom_score_adj"],
            ),
            start_s=raw["timeouts"]["start_s"],
            stop_s=raw["timeouts"]["stop_s"],
            heartbeat_s=raw["timeouts"]["heartbeat_s"],
            recovery=Recovery(**raw["recovery"] | {"backoff_s": tuple(raw["recovery"]["backoff_s"])}),
            start=Start(
                free_mib=raw["start"]["free_mib"],
                legs=tuple(raw["start"]["legs"]),
                checkpoint=Path(raw["start"]["checkpoint"]),
                virtual_heads=dict(raw["start"]["virtual_heads"]),
                config_hash=raw["start"]["config_hash"],
                sysfs=raw["start"]["sysfs"],
                gate=raw["start"]["gate"],
                gate_max_age_s=raw["start"]["gate_max_age_s"],
                log_lines=dict(raw["start"]["log_lines"]),
                warm_up=tuple(raw["start"]["warm_up"]),
            ),
            guard_floor_mib=raw.get("guard", {}).get("floor_mib", 0),
            api_key=_api_key(etc / group / "api-key") if raw["rank"] == 0 else None,
            file_hash=configuration_hash(text),
            run_dir=run / group,
            failures=var / "recovery" / f"{group}.json",
            gids=var / "gids" / f"{group}.json",
            evidence=var / "evidence" / group,
            measured=var / "gate" / f"{group}.json",
            history=var / "history" / f"{group}.json",
            procfs=str(procfs),
        )
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): run the service role on this member") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a rank configuration ({error!r}): run the service role on this member") from error
    return config


def _api_key(path: Path) -> str:
    key = path.read_text(encoding="ascii").strip()
    if not key:
        raise ConfigError(f"{path} is empty: delete it and run the service role, which makes a key")
    return key
