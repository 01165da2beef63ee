# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank is doing, for systemd (status line) and for the collection's modules (state.json)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gb10_node.config import RankConfig

PHASES = ("waiting", "starting", "loading", "serving", "stopping", "stopped", "failed")
EVENTS = 10
"""Changes that are kept in the state."""


def notify(message: str) -> None:
    """Tell systemd (sd_notify protocol); silent where the process was not started by systemd."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.sendall(message.encode())


class State:
    """state.json in the unit's runtime directory, replaced whole at every change of phase.

    Keys: group, rank, member, phase, detail, since (epoch seconds), pid, digest, config_hash (of the rank.json that this
    process runs), canary: null or {at, seconds} of the last token on the head, checks: what the checks before this start found, events: the
    last changes that a start found, [{at, what}], and failure: null or {at, reason, culprit, log, evidence} of the last failed start or run.
    The last two are kept over restarts, so that whoever waits for the group can say why.
    """

    def __init__(self, config: RankConfig) -> None:
        self.path: Path = config.run_dir / "state.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {
            "group": config.group,
            "rank": config.rank,
            "member": config.me.member,
            "pid": os.getpid(),
            "digest": config.digest,
            "config_hash": config.file_hash,
            "canary": None,
            "checks": {},
            "events": self._previous("events", list) or [],
            "failure": self._previous("failure", dict),
        }

    def _previous(self, key: str, kind: type) -> Any:
        """What the life before this one kept; None where it is not of its kind."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))[key]
        except (OSError, ValueError, KeyError):
            return None
        return kept if isinstance(kept, kind) else None

    def enter(self, phase: str, detail: str = "") -> None:
        """Record a phase; `detail` says what is waited for, in words."""
        assert phase in PHASES, phase
        if (self.data.get("phase"), self.data.get("detail")) == (phase, detail):
            return
        self.data |= {"phase": phase, "detail": detail, "since": time.time()}
        self._write()
        notify(f"STATUS={phase}{': ' + detail if detail else ''}")
        print(f"gb10: {phase}{': ' + detail if detail else ''}", flush=True)

    def fail(self, reason: str, culprit: str, log: list[str], at: float, evidence: str = "", stopped: bool = False) -> None:
        """Record why the group ended and when (seconds since 1970): the rank that ended it, its last log lines, where evidence was kept, and whether
        somebody stopped that rank."""
        self.data["failure"] = {"at": at, "reason": reason, "culprit": culprit, "log": log, "evidence": evidence, "stopped": stopped}
        self.enter("failed", reason)

    def checked(self, found: dict[str, Any], events: Sequence[str]) -> None:
        """Record what the checks before a start found, and what has changed since the last one."""
        self.data["checks"] = found
        self.tell(*events)

    def tell(self, *events: str) -> None:
        """Record what a person should know. What is said again at each start is kept once, as of the last time."""
        for what in events:
            print(f"gb10: {what}", flush=True)
        others = [event for event in self.data["events"] if event["what"] not in events]
        self.data["events"] = [*others, *({"at": time.time(), "what": what} for what in events)][-EVENTS:]
        self._write()

    def canary(self, seconds: float) -> None:
        """Record how long the last token took."""
        self.data["canary"] = {"at": time.time(), "seconds": round(seconds, 3)}
        self._write()

    def stay_down(self, reason: str) -> None:
        """Record why this start is none; the log is still that of the last failure."""
        failure = self.data["failure"] or {}
        self.fail(reason, self.data["member"], failure.get("log", []), time.time(), failure.get("evidence", ""))

    def clear_failure(self) -> None:
        """A group that serves has no failure to report."""
        self.data["failure"] = None

    def _write(self) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self.data), encoding="utf-8")
        temporary.replace(self.path)
