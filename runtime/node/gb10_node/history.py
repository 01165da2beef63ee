# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""A member's last day in one small file, for the status page: 288 records of five minutes, with or without a Prometheus.

Each record has the least memory of its time and the longest token, since what matters is what happens between two looks. A time in which nobody
looked has no record: a gap, never a line of zeros.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gb10_core import _host

from gb10_node.canary import read_figures
from gb10_node.config import RankConfig
from gb10_node.memory import Memory, MemoryReader
from gb10_node.readings import mapping, number

LOOK_S, RECORD_S = 30.0, 300.0
RECORDS = 288
KV_USAGE = "vllm:kv_cache_usage_perc"


class History:
    """Looks become records; the file is replaced whole with each. No clock of its own: `look` is given the time.

    A record: `at` (end of its time, seconds since 1970), `free` and `available` (least MiB), `legs` (bytes per second in both directions,
    by network device), and on the head of a serving group `canary` (seconds, the longest) and `kv` (share of the KV cache, the highest).
    """

    def __init__(self, path: Path, legs: Sequence[str]) -> None:
        self.path, self._legs = path, legs
        self.records = _kept(path)
        self._record: dict[str, Any] = {}
        self._began: float | None = None
        self._counted: dict[str, float] = {}

    def look(self, now: float, memory: Memory, counted: Mapping[str, float], more: Mapping[str, float]) -> None:
        """Take one look in; raises OSError where a record cannot be kept, which loses that write alone. `counted`: bytes of each leg so far."""
        if self._began is None or now < self._began:  # the second: the clock was set back
            return self._begin(now, counted)
        least = {"free": memory.free, "available": memory.available}
        self._record |= {name: min(value, self._record.get(name, value)) for name, value in least.items()}
        self._record |= {name: max(value, self._record.get(name, value)) for name, value in more.items()}
        if (passed := now - self._began) >= RECORD_S:
            moved = {leg: counted[leg] - self._counted[leg] for leg in self._legs if leg in counted and leg in self._counted}
            # A counter that went back is a device that came anew.
            legs = {leg: round(count / passed) for leg, count in moved.items() if count >= 0}
            self.records = [*self.records, {"at": round(now), **self._record, "legs": legs}][-RECORDS:]
            self._begin(now, counted)
            _host.write(self.path, json.dumps(self.records, separators=(",", ":")).encode(), 0o600)

    def _begin(self, now: float, counted: Mapping[str, float]) -> None:
        self._record, self._began, self._counted = {}, now, dict(counted)


def _kept(path: Path) -> list[dict[str, Any]]:
    """What an earlier life kept; nothing where it is no history."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return [record for record in records if record["at"] >= 0][-RECORDS:]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def bytes_of(legs: Sequence[Mapping[str, str]], net: Path, infiniband: Path) -> dict[str, float]:
    """Bytes that each leg has moved, both ways. A ConnectX counts RDMA at its HCA, in units of four bytes, and all else at its network device."""
    found = {}
    for leg in legs:
        device, port = net / leg["netdev"] / "statistics", infiniband / leg["hca"] / "ports/1/counters"
        plain = [number(device / name) for name in ("rx_bytes", "tx_bytes")]
        rdma = [number(port / name) for name in ("port_rcv_data", "port_xmit_data")]
        if None not in plain:
            found[leg["netdev"]] = sum(count or 0 for count in plain) + 4 * sum(count or 0 for count in rdma)
    return found


def _serving(config: RankConfig, now: float) -> dict[str, float]:
    """What the head of a serving group knows besides: the last token's time, where it came since the last look, and the KV cache in use."""
    state = mapping(config.run_dir / "state.json")
    if not config.is_head or state.get("phase") != "serving":
        return {}
    found = {}
    if (canary := state.get("canary")) and now - canary["at"] < RECORD_S:
        found["canary"] = float(canary["seconds"])
    usage = [float(value) for name, value in read_figures(config.api) or () if name == KV_USAGE]
    return found | ({"kv": round(max(usage), 4)} if usage else {})


def keep(history: History, config: RankConfig, reader: MemoryReader) -> None:
    """Look until the process ends."""
    told = ""
    while True:
        counted = bytes_of(config.start.legs, Path("/sys/class/net"), Path(config.start.sysfs) / "class/infiniband")
        now = time.time()
        try:
            history.look(now, reader.read(), counted, _serving(config, now))
            told = ""
        except (OSError, ValueError) as error:
            if str(error) != told:
                print(f"gb10-exporter: the last day is not kept in {history.path} ({error})", flush=True)
            told = str(error)
        time.sleep(LOOK_S)
