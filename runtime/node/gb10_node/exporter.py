# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""A member's state as Prometheus text: memory, ports and HCAs, the rank, the canary, the guard, the breaker, the gate.

Everything is read from files when it is asked for; what a member does not have is left out, never reported as 0. Beside it a thread keeps the last day.
"""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gb10_core import _host

from gb10_node.config import RankConfig
from gb10_node.history import History, keep
from gb10_node.memory import MemoryReader
from gb10_node.readings import mapping, number
from gb10_node.recovery import Book, judge
from gb10_node.state import PHASES

PORT = 29620
"""Beside the coordination port (29600) and the gate's store (29610); on the management address only."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PORT_STATISTICS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
ACTIVE = "4: ACTIVE"
VAR = Path("/var/lib/gb10")

HELP = {
    "gb10_memory_free_bytes": "MemFree: what the GPU can take now",
    "gb10_memory_available_bytes": "MemAvailable: free, or page cache that can be dropped",
    "gb10_memory_cached_bytes": "Page cache",
    "gb10_memory_pressure_ratio": "Share of the last 10 s in which everything waited for memory",
    "gb10_disk_free_bytes": "Free space where the collection keeps checkpoints and state",
    "gb10_disk_size_bytes": "Size of that file system",
    "gb10_port_carrier": "1 when the network device has a carrier",
    "gb10_port_carrier_changes_total": "How often the carrier came or went",
    "gb10_port_mtu_bytes": "MTU of the network device",
    "gb10_port_statistic_total": "Counters of the network device",
    "gb10_leg_info": "A leg of the plan: its network device and HCA",
    "gb10_hca_active": "1 when the RDMA port is ACTIVE",
    "gb10_hca_rate_bits_per_second": "Speed of the wire",
    "gb10_hca_pcie_transfers_per_second": "Speed of the HCA's PCIe link, over all of its lanes",
    "gb10_hca_gid_table_crc32": "Checksum of the GID table: a change means that indexes may have moved",
    "gb10_hca_counter_total": "Counters of the RDMA port; data counters are in units of four bytes",
    "gb10_rank_phase": "1 for the phase that the rank is in",
    "gb10_rank_phase_since_seconds": "When the rank entered its phase",
    "gb10_rank_failure_seconds": "When the group last failed",
    "gb10_canary_seconds": "How long the last canary token took (head)",
    "gb10_canary_at_seconds": "When the last canary token came (head)",
    "gb10_guard_floor_bytes": "MemAvailable below which the memory guard ends the group",
    "gb10_guard_ended_group_seconds": "When the memory guard ended the group since it was started",
    "gb10_group_failures": "Failures of the group that still count (head)",
    "gb10_breaker_open": "1 when the group stays down until a person starts it (head)",
    "gb10_gate_measured_seconds": "When the fabric gate last measured (head)",
    "gb10_gate_max_age_seconds": "How old it may be (head)",
    "gb10_gate_passed": "1 when that measurement passed (head)",
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


def samples(config: RankConfig, reader: MemoryReader, sysfs: Path = Path("/sys"), var: Path = VAR) -> Iterator[Sample]:
    """Everything that is known now. Where RDMA devices are read is the configuration's; `sysfs` has the network devices."""
    memory = reader.read()
    for name, mib in (("free", memory.free), ("available", memory.available), ("cached", memory.cached)):
        yield f"gb10_memory_{name}_bytes", {}, float(mib << 20)
    yield "gb10_memory_pressure_ratio", {}, memory.pressure / 100
    if var.is_dir():
        disk = shutil.disk_usage(var)
        yield "gb10_disk_free_bytes", {"path": str(var)}, float(disk.free)
        yield "gb10_disk_size_bytes", {"path": str(var)}, float(disk.total)
    yield from _ports(sysfs / "class/net")
    for leg in config.start.legs:
        yield "gb10_leg_info", {"device": leg["netdev"], "hca": leg["hca"]}, 1.0
    yield from _hcas(Path(config.start.sysfs) / "class/infiniband")
    yield from _rank(config)
    if config.is_head:
        yield from _gate(config)


def _ports(root: Path) -> Iterator[Sample]:
    for device in _entries(root):
        labels = {"device": device.name}
        if device.name == "lo":
            continue
        for name, file in (("carrier", "carrier"), ("carrier_changes_total", "carrier_changes"), ("mtu_bytes", "mtu")):
            if (value := number(device / file)) is not None:
                yield f"gb10_port_{name}", labels, value
        for counter in PORT_STATISTICS:
            if (value := number(device / "statistics" / counter)) is not None:
                yield "gb10_port_statistic_total", {**labels, "counter": counter}, value


def _hcas(root: Path) -> Iterator[Sample]:
    for hca in _entries(root):
        labels, port = {"hca": hca.name}, hca / "ports/1"
        if (state := _host.read(port / "state")) is not None:
            yield "gb10_hca_active", labels, float(state == ACTIVE)
        yield from _speed(hca, labels)
        table = "\n".join(
            f"{slot.name} {_host.read(slot)} {_host.read(port / 'gid_attrs/types' / slot.name)}" for slot in _entries(port / "gids")
        )
        yield "gb10_hca_gid_table_crc32", labels, float(zlib.crc32(table.encode()))
        for counter in (*_entries(port / "counters"), *_entries(port / "hw_counters")):
            if (value := number(counter)) is not None:
                yield "gb10_hca_counter_total", {**labels, "counter": counter.name}, value


def _speed(hca: Path, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Of a card. The rate of soft-RoCE, which names its network device in `parent`, is a constant of no wire."""
    if not (hca / "parent").exists() and (rate := number(hca / "ports/1/rate")) is not None:
        yield "gb10_hca_rate_bits_per_second", labels, rate * 1e9
    speed, lanes = number(hca / "device/current_link_speed"), number(hca / "device/current_link_width")
    if speed is not None and lanes is not None:
        yield "gb10_hca_pcie_transfers_per_second", labels, speed * lanes * 1e9


def _gate(config: RankConfig) -> Iterator[Sample]:
    artefact, labels = mapping(config.measured), {"group": config.group}
    if config.start.gate_max_age_s is not None:
        yield "gb10_gate_max_age_seconds", labels, float(config.start.gate_max_age_s)
    if "measured_at" in artefact:
        yield "gb10_gate_measured_seconds", labels, float(artefact["measured_at"])
        yield "gb10_gate_passed", labels, float(not artefact.get("problems"))


def _rank(config: RankConfig) -> Iterator[Sample]:
    state, guard = mapping(config.run_dir / "state.json"), mapping(config.run_dir / "guard.json")
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
    if config.guard_floor_mib:
        yield "gb10_guard_floor_bytes", labels, float(config.guard_floor_mib << 20)
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
    history = History(config.history, [leg["netdev"] for leg in config.start.legs])
    threading.Thread(target=keep, args=(history, config, reader), daemon=True).start()
    print(f"gb10-exporter: http://{config.me.address}:{PORT}/metrics", flush=True)
    server.serve_forever()
    return 0
