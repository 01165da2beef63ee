# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""systemd units of a group, and the rule by which a running rank is restarted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _host, _serving, _tls
from ._files import ManagedFile

NODE_PACKAGE = "/usr/local/lib/gb10/gb10_node.pyz"
START_LIMIT_S, START_LIMIT = 1800, 5
"""A group that ends this often within the time stays down: something is wrong that another start does not cure."""
RESTART_S = 5
LOG_IDENTIFIER = "gb10-rank"
"""Of the rank's own lines in the journal; the engine's client adds others to the unit."""
HARDENED = """\
UMask=0077
CapabilityBoundingSet=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
"""
"""For the units beside the rank. They read procfs and sysfs; the guard writes one file there and signals a process of its own user."""
GUARD_DIRECTIVES = """\
OOMScoreAdjust=-900
LimitMEMLOCK=infinity
RuntimeDirectory=gb10/%i
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
PrivateNetwork=yes
RestrictAddressFamilies=none
"""
EXPORTER_DIRECTIVES = """\
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET
StateDirectory=gb10/history
"""
STOP_MARGIN_S = 30
"""Time beyond the container's own stop time in which the rank tells the others and removes the container."""


def target_unit(group: str) -> str:
    """The unit that stands for the whole group on a member."""
    return f"gb10@{group}.target"


def rank_unit(group: str) -> str:
    """The unit of this member's rank."""
    return f"gb10-rank@{group}.service"


def companion_units(group: str) -> list[str]:
    """The units beside the rank: the memory guard and the exporter."""
    return [f"gb10-guard@{group}.service", f"gb10-exporter@{group}.service"]


def failures_file(group: str) -> str:
    """Where the head keeps count of the group's failures; without it, the next start waits for nothing."""
    return f"/var/lib/gb10/recovery/{group}.json"


def lock_file(group: str, run_root: str = "/run/gb10") -> str:
    """Where the head keeps who works on the cluster. Not kept over a boot: a run does not outlive one either."""
    return f"{run_root}/locks/{group}.json"


def read_lock(group: str, run_root: str = "/run/gb10") -> dict[str, Any] | None:
    """The lock's record; None when it is free."""
    return _mapping(lock_file(group, run_root))


def _mapping(path: str | Path) -> dict[str, Any] | None:
    """A JSON object of a file; None where there is none."""
    try:
        content = json.loads(_host.read(path) or "null")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def evidence_directory(group: str) -> str:
    """Where a member keeps what it saw of failures and hangs."""
    return f"/var/lib/gb10/evidence/{group}"


def history_file(group: str) -> str:
    """Where a member's exporter keeps the last day."""
    return f"/var/lib/gb10/history/{group}.json"


def read_history(group: str) -> list[dict[str, Any]]:
    """The last day in records of five minutes (gb10_node.history says what is in one); empty where there is none."""
    try:
        records = json.loads(_host.read(history_file(group)) or "[]")
    except ValueError:
        return []
    return records if isinstance(records, list) else []


def memories(group: str) -> list[str]:
    """What the node services remember of a group over boots, but for its evidence, which is a person's to remove."""
    return [failures_file(group), f"/var/lib/gb10/gids/{group}.json", f"/var/lib/gb10/ladder/{group}.json", history_file(group)]


def unit_files(engine: str, stop_s: float) -> list[ManagedFile]:
    """The template units. `engine` is docker or podman, whose path is the member's own business."""
    program = shutil.which(engine) or f"/usr/bin/{engine}"
    after = "network-online.target" + (" docker.service" if engine == "docker" else "")
    # Silent, for docker complains where nothing is left, and that would be the last line of every life; the next start tells what stays.
    remove = f"/bin/sh -c '{program} rm --force gb10-%i 2>/dev/null'"
    target = """\
# Written by gb10.cluster (role service).
[Unit]
Description=Inference group %i
Wants=gb10-rank@%i.service gb10-guard@%i.service gb10-exporter@%i.service

[Install]
WantedBy=multi-user.target
"""
    rank = f"""\
# Written by gb10.cluster (role service).
[Unit]
Description=Rank of the inference group %i
After={after}
Wants=network-online.target
PartOf=gb10@%i.target
StartLimitIntervalSec={START_LIMIT_S}
StartLimitBurst={START_LIMIT}

[Service]
Type=notify
SyslogIdentifier={LOG_IDENTIFIER}
ExecStart=/usr/bin/python3 {NODE_PACKAGE} rank %i
ExecStopPost=-{remove}
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus=69 78
KillMode=mixed
TimeoutStopSec={int(stop_s) + STOP_MARGIN_S}
RuntimeDirectory=gb10/%i
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
"""
    return [
        ManagedFile("/etc/systemd/system/gb10@.target", target.encode()),
        ManagedFile("/etc/systemd/system/gb10-rank@.service", rank.encode()),
        _companion("guard", "Memory guard", GUARD_DIRECTIVES),
        _companion("exporter", "Prometheus exporter", EXPORTER_DIRECTIVES),
    ]


def _volumes(config: Mapping[str, Any]) -> ManagedFile:
    """What only one group's rank needs: it never starts on the empty directory under a checkpoint that is not mounted (NFS, another disk)."""
    sources = " ".join(volume["source"].replace("%", "%%") for volume in config["container"]["volumes"])
    text = f"# Written by gb10.cluster (role service).\n[Unit]\nRequiresMountsFor={sources}\n"
    return ManagedFile(f"/etc/systemd/system/{rank_unit(config['group'])}.d/volumes.conf", text.encode())


def _companion(service: str, what: str, directives: str) -> ManagedFile:
    """A template unit beside the rank, which comes and goes with the group."""
    text = f"""\
# Written by gb10.cluster (role service).
[Unit]
Description={what} of the inference group %i
After=network-online.target
PartOf=gb10@%i.target

[Service]
SyslogIdentifier=gb10-{service}
ExecStart=/usr/bin/python3 {NODE_PACKAGE} {service} %i
Restart=always
RestartSec={RESTART_S}
RestartPreventExitStatus=78
{directives}{HARDENED}"""
    return ManagedFile(f"/etc/systemd/system/gb10-{service}@.service", text.encode())


def config_hash(checkpoint: str) -> str:
    """SHA-256 of a checkpoint's config.json as it is now; empty where there is none."""
    content = _host.read_bytes(f"{checkpoint}/config.json")
    return "" if content is None else hashlib.sha256(content).hexdigest()


def rank_files(
    config: Mapping[str, Any],
    package: bytes,
    image: tuple[str, str],
    api_key: str | None,
    config_json: str,
    sysfs: str,
    gate_max_age_s: float | None,
    tls: Sequence[ManagedFile] = (),
) -> list[ManagedFile]:
    """All files of a rank.

    What runs is more than the plan: the image behind its name, the checkpoint's config.json (`config_json`, its hash), the node package and the
    units count too. So rank.json holds them: by its hash a running rank is up to date or not, and by its `digest` the ranks compare themselves
    before a start. `image`: its id, by which the engine runs it, and its content (`_image`): an id differs between engines' stores, so the content
    is what the ranks compare. `sysfs`: where the member's RDMA devices are read. `gate_max_age_s`: how old the head's gate may be; None: not asked.
    `tls`: the certificate and its key, as tls_files gives them.
    """
    units = unit_files(config["engine"], config["timeouts"]["stop_s"])
    node = hashlib.sha256(package).hexdigest()
    image_id, content = image
    rank = {
        **config,
        "container": {**config["container"], "image": image_id},
        "digest": _combined(config["digest"], content, config_json, node),
        "start": {**config["start"], "config_hash": config_json, "sysfs": sysfs, "gate_max_age_s": gate_max_age_s},
        # The engine's path in a unit is the member's own business, so this is no part of the digest.
        "files": {"image": content, "node": node, "units": hashlib.sha256(b"".join(unit.content for unit in units)).hexdigest()},
    }
    if tls:
        # The engine reads it once, so another certificate is another rank.
        rank["files"]["tls"] = hashlib.sha256(b"".join(file.content for file in tls)).hexdigest()
    rank_json = json.dumps(rank, indent=1, sort_keys=True) + "\n"
    etc = f"/etc/gb10/{config['group']}"
    files = [*units, _volumes(config), ManagedFile(NODE_PACKAGE, package), ManagedFile(f"{etc}/rank.json", rank_json.encode()), *tls]
    if api_key is not None:
        files.append(ManagedFile(f"{etc}/api-key", (api_key + "\n").encode(), 0o600, secret=True))
    return files


def tls_files(group: str, certificate: str, key: str) -> list[ManagedFile]:
    """The files of a certificate and its key (`_tls.check` says whether they serve)."""
    folder = f"/etc/gb10/{group}/{_serving.TLS_FOLDER}"
    return [
        ManagedFile(f"{folder}/{_serving.CERTIFICATE}", certificate.encode()),
        ManagedFile(f"{folder}/{_serving.KEY}", key.encode(), 0o600, secret=True),
    ]


def kept_tls(group: str) -> tuple[str, str]:
    """The certificate and the key that this member has; empty where it has none."""
    folder = f"/etc/gb10/{group}/{_serving.TLS_FOLDER}"
    return _host.read(f"{folder}/{_serving.CERTIFICATE}") or "", _host.read(f"{folder}/{_serving.KEY}") or ""


def tls_for(config: Mapping[str, Any], certificate: str, key: str) -> tuple[str, str]:
    """The certificate and the key with which a rank serves: those given, or those kept; empty where it serves without. Raises ValueError with one sentence."""
    if config["rank"] or not config["api"]["tls"]:
        return "", ""
    group = config["group"]
    if not certificate:
        certificate, key = kept_tls(group)
    if not certificate:
        raise ValueError(
            f"group {group} is planned with TLS and its head has no certificate: set service_tls_certificate and service_tls_key"
        )
    try:
        _tls.check(certificate, key)
    except ValueError as error:
        raise ValueError(f"group {group}: {error}") from None
    return certificate, key


def rank_digest(plan: Mapping[str, Any], image: str, config_json: str, rank_json: Mapping[str, Any]) -> str:
    """The digest that a rank would have with this plan and the image of this content, and with the node services of a rank.json."""
    return _combined(plan["cluster"]["digest"], image, config_json, rank_json["files"]["node"])


def _combined(plan_digest: str, image: str, config_json: str, node: str) -> str:
    return hashlib.sha256(" ".join((plan_digest, image, config_json, node)).encode()).hexdigest()


@dataclass(frozen=True)
class RankState:
    """What systemd and the rank itself say. `phase` is "absent" where no rank has run since boot."""

    active: str
    phase: str
    detail: str
    config_hash: str
    failure: Mapping[str, Any] | None
    checks: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()

    @property
    def is_active(self) -> bool:
        """True while systemd runs the rank or is about to run it again."""
        return self.active in ("active", "activating", "reloading", "deactivating")

    def has_failed(self, since: float, stops_since: float) -> bool:
        """Whether a start that began then has failed. A rank that was stopped fails a start only from a later time on: what stops it at first is the
        same start, which gives that member a new configuration."""
        failure = self.failure or {"at": 0}
        return failure["at"] > (stops_since if failure.get("stopped") else since)

    @property
    def is_ending(self) -> bool:
        """True while a rank's life ends, its container stops and the unit tidies up: systemd runs it again afterwards, or not."""
        return self.active == "deactivating"

    @property
    def holds_group(self) -> bool:
        """True when ending this rank ends a group that has started."""
        # In every other state of its unit, the phase is that of a life that is over.
        return self.active == "active" and self.phase in ("starting", "loading", "serving")


def rank_record(group: str, run_root: str = "/run/gb10") -> dict[str, Any]:
    """The rank's state.json; empty where none has run since boot."""
    return _mapping(Path(run_root) / group / "state.json") or {}


def read_rank_state(group: str, run_root: str = "/run/gb10") -> RankState:
    """Ask systemd and read the rank's state.json."""
    shown = _host.run(["systemctl", "show", rank_unit(group), "--property=ActiveState", "--value"])
    state = rank_record(group, run_root)
    return RankState(
        active=shown.out.strip() or "unknown",
        phase=state.get("phase", "absent"),
        detail=state.get("detail", ""),
        config_hash=state.get("config_hash", ""),
        failure=state.get("failure"),
        checks=state.get("checks", {}),
        events=state.get("events", []),
    )


def read_guard_record(group: str, run_root: str = "/run/gb10") -> dict[str, Any] | None:
    """What the memory guard did to the group since it was started: {at, action, reason, low_water_mib}, or None."""
    return _mapping(Path(run_root) / group / "guard.json")


def needs_restart(state: RankState, rank_json: bytes) -> bool:
    """A rank runs out of date when the configuration it read is not the file's."""
    return state.is_active and state.config_hash != hashlib.sha256(rank_json).hexdigest()
