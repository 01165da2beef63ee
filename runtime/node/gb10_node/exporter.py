# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""A member's state as Prometheus text: memory, ports and HCAs, the rank, the canary, the guard, the breaker.

Everything is read from files when it is asked for; what a member does not have is left out, never reported as 0.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gb10_node.config import RankConfig
from gb10_node.memory import MemoryReader
from gb10_node.recovery import Book, judge
from gb10_node.state import PHASES

PORT = 29620
"""Beside the coordination port (29600) and the gate's store (29610); on the management address only."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PORT_STATISTICS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
ACTIVE = "4: ACTIVE"

HELP = {
    "gb10_memory_free_bytes": "MemFree: what the GPU can take now",
    "gb10_memory_available_bytes": "MemAvailable: free, or page cache that can be dropped",
    "gb10_memory_cached_bytes": "Page cache",
    "gb10_memory_pressure_ratio": "Share of the last 10 s in which everything waited for memory",
    "gb10_disk_free_bytes": "Free space where the collection keeps checkpoints and state",
    "gb10_port_carrier": "1 when the network device has a carrier",
    "gb10_port_carrier_changes_total": "How often the carrier came or went",
    "gb10_port_mtu_bytes": "MTU of the network device",
    "gb10_port_statistic_total": "Counters of the network device",
    "gb10_hca_active": "1 when the RDMA port is ACTIVE",
    "gb10_hca_gid_table_crc32": "Checksum of the GID table: a change means that indexes may have moved",
    "gb10_hca_counter_total": "Counters of the RDMA port; data counters are in units of four bytes",
    "gb10_rank_phase": "1 for the phase that the rank is in",
    "gb10_rank_phase_since_seconds": "When the rank entered its phase",
    "gb10_rank_failure_seconds": "When the group last failed",
    "gb10_canary_seconds": "How long the last canary token took (head)",
    "gb10_canary_at_seconds": "When the last canary token came (head)",
    "gb10_guard_ended_group_seconds": "When the memory guard ended the group since it was started",
    "gb10_group_failures": "Failures of the group that still count (head)",
    "gb10_breaker_open": "1 when the group stays down until a person starts it (head)",
}

Sample = tuple[str, Mapping[str, str], float]


def text(samples: Iterator[Sample]) -> str:
    """The exposition format, one block a metric."""
    blocks: dict[str, list[str]] = {}
    for name, labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        blocks.setdefault(name, []).append(f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}")
    lines = []
    for name, block in blocks.items():
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}", *block]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def samples(config: RankConfig, reader: MemoryReader, sysfs: Path = Path("/sys"), var: Path = Path("/var/lib/gb10")) -> Iterator[Sample]:
    """Everything that is known now."""
    memory = reader.read()
    for name, mib in (("free", memory.free), ("available", memory.available), ("cached", memory.cached)):
        yield f"gb10_memory_{name}_bytes", {}, float(mib << 20)
    yield "gb10_memory_pressure_ratio", {}, memory.pressure / 100
    if var.is_dir():
        yield "gb10_disk_free_bytes", {"path": str(var)}, float(shutil.disk_usage(var).free)
    yield from _ports(sysfs / "class/net")
    yield from _hcas(sysfs / "class/infiniband")
    yield from _rank(config)


def _ports(root: Path) -> Iterator[Sample]:
    for device in _entries(root):
        labels = {"device": device.name}
        if device.name == "lo":
            continue
        for name, file in (("carrier", "carrier"), ("carrier_changes_total", "carrier_changes"), ("mtu_bytes", "mtu")):
            if (value := _number(device / file)) is not None:
                yield f"gb10_port_{name}", labels, value
        for counter in PORT_STATISTICS:
            if (value := _number(device / "statistics" / counter)) is not None:
                yield "gb10_port_statistic_total", {**labels, "counter": counter}, value


def _hcas(root: Path) -> Iterator[Sample]:
    for hca in _entries(root):
        labels, port = {"hca": hca.name}, hca / "ports/1"
        if (state := _read(port / "state")) is not None:
            yield "gb10_hca_active", labels, float(state == ACTIVE)
        table = "\n".join(f"{slot.name} {_read(slot)} {_read(port / 'gid_attrs/types' / slot.name)}" for slot in _entries(port / "gids"))
        yield "gb10_hca_gid_table_crc32", labels, float(zlib.crc32(table.encode()))
        for counter in (*_entries(port / "counters"), *_entries(port / "hw_counters")):
            if (value := _number(counter)) is not None:
                yield "gb10_hca_counter_total", {**labels, "counter": counter.name}, value


def _rank(config: RankConfig) -> Iterator[Sample]:
    state, guard = _json(config.run_dir / "state.json"), _json(config.run_dir / "guard.json")
    labels = {"group": config.group, "rank": str(config.rank)}
    if "phase" in state:
        for phase in PHASES:
            yield "gb10_rank_phase", {**labels, "phase": phase}, float(state["phase"] == phase)
        yield "gb10_rank_phase_since_seconds", labels, float(state["since"])
    if state.get("failure"):
        yield "gb10_rank_failure_seconds", labels, float(state["failure"]["at"])
    if state.get("canary"):
        yield "gb10_canary_seconds", labels, float(state["canary"]["seconds"])
        yield "gb10_canary_at_seconds", labels, float(state["canary"]["at"])
    if "at" in guard:
        yield "gb10_guard_ended_group_seconds", labels, float(guard["at"])
    if config.is_head:
        verdict = judge(Book(config.failures).read(), config.recovery.backoff_s, time.time())
        yield "gb10_group_failures", labels, float(verdict.failures)
        yield "gb10_breaker_open", labels, float(verdict.is_open)


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, numbers in their order; nothing where there is no folder."""
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name) if path.name.isdigit() else 0, path.name))
    except OSError:
        return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # an empty slot of a GID table, the carrier of a port that is down
        return None


def _number(path: Path) -> float | None:
    try:
        return float(_read(path) or "none")
    except ValueError:
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def serve(config: RankConfig) -> int:
    """Answer GET /metrics on the member's management address until the unit is stopped."""
    reader = MemoryReader()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                return self.send_error(404, "Only /metrics is here")
            body = text(samples(config, reader)).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: a scrape every few seconds is no news."""

    try:
        server = ThreadingHTTPServer((config.me.address, PORT), Handler)
    except OSError as error:
        print(f"gb10-exporter: cannot listen on {config.me.address}:{PORT} ({error.strerror}): free the port", flush=True)
        return 1
    print(f"gb10-exporter: http://{config.me.address}:{PORT}/metrics", flush=True)
    server.serve_forever()
    return 0
