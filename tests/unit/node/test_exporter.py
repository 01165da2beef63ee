# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The exporter over trees of files, and over HTTP on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gb10_node import config, exporter
from gb10_node.memory import MemoryReader

from tests.unit.node.packages import PACKAGES

LINE = re.compile(r'^[a-z_0-9]+(\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})? [-+0-9.e]+$')


@pytest.fixture
def member(tmp_path: Path) -> Path:
    """A head with one port whose carrier cannot be read, one HCA with a hole in its GID table, and a rank that serves."""
    files = {
        "etc/lab/rank.json": json.dumps(
            {
                "group": "lab", "rank": 0, "digest": "d", "engine": "podman", "ranks": [{"rank": 0, "member": "t1", "address": "127.0.0.1"}],
                "coordination_port": 29600, "master_port": 29500, "api": {"port": 8000}, "served_model_name": "m",
                "container": {
                    "name": "gb10-lab", "image": "i", "command": [], "environment": {}, "volumes": [], "devices": [], "gpus": False,
                    "capabilities": [], "ulimits": {}, "shm_mib": 64, "memory_mib": 64, "oom_score_adj": 0,
                },
                "timeouts": {"start_s": 1, "stop_s": 1, "heartbeat_s": 1},
                "recovery": {"backoff_s": [60], "canary_interval_s": 1, "canary_silence_s": 1, "load_silence_s": 1},
                "start": {
                    "free_mib": 0, "legs": [{"hca": "rocep1s0f0", "netdev": "enp1s0f0np0", "address": "10.10.0.1"}], "checkpoint": "/m",
                    "virtual_heads": {}, "config_hash": "", "sysfs": str(tmp_path / "sys"),
                    "gate": "", "gate_max_age_s": 604800, "log_lines": {}, "warm_up": [],
                },
                "guard": {"at_floor": "stop", "floor_mib": 1536, "flush_floor_mib": 4096, "load_cached_mib": 8192},
            }
        ),
        "etc/lab/api-key": "sesame",
        "run/lab/state.json": json.dumps({"phase": "serving", "since": 1700000000.5, "failure": None, "canary": {"at": 1700000090.0, "seconds": 0.25}}),
        "sys/class/net/lo/mtu": "65536",
        "sys/class/net/enp1s0f0np0/mtu": "9000",
        "sys/class/net/enp1s0f0np0/carrier_changes": "3",
        "sys/class/net/enp1s0f0np0/statistics/rx_bytes": "123456789012345",
        "sys/class/infiniband/rocep1s0f0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/rocep1s0f0/ports/1/gids/0": "fe80::1",
        "sys/class/infiniband/rocep1s0f0/ports/1/gids/3": "::ffff:10.10.0.1",
        "sys/class/infiniband/rocep1s0f0/ports/1/gid_attrs/types/3": "RoCE v2",
        "sys/class/infiniband/rocep1s0f0/ports/1/counters/port_rcv_data": "42",
        "sys/class/infiniband/rocep1s0f0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "sys/class/infiniband/rocep1s0f0/device/current_link_speed": "32.0 GT/s PCIe",
        "sys/class/infiniband/rocep1s0f0/device/current_link_width": "4",
        "sys/class/infiniband/rxe0/parent": "eth0",
        "sys/class/infiniband/rxe0/ports/1/rate": "2.5 Gb/sec (1X SDR)",
        "var/gate/lab.json": json.dumps({"measured_at": 1700000000, "problems": []}),
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "sys/class/net/enp1s0f0np0/carrier").mkdir()  # reading it fails, as that of a port that is down does
    return tmp_path


def scrape(member: Path) -> str:
    settings = config.load("lab", member / "etc", member / "run", member / "var")
    return exporter.text(exporter.samples(settings, MemoryReader(), member / "sys", member / "var"))


def test_every_line_is_of_the_format_and_every_metric_is_explained_once(member: Path) -> None:
    lines = scrape(member).splitlines()
    assert all(LINE.match(line) for line in lines if not line.startswith("#"))
    explained = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(explained) == len(set(explained))
    assert set(explained) == {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_what_is_known_is_said_exactly_and_what_is_not_is_left_out(member: Path) -> None:
    said = scrape(member)
    assert 'gb10_port_statistic_total{device="enp1s0f0np0",counter="rx_bytes"} 123456789012345\n' in said
    assert 'gb10_rank_phase{group="lab",rank="0",phase="serving"} 1\n' in said
    assert 'gb10_rank_phase{group="lab",rank="0",phase="loading"} 0\n' in said
    assert 'gb10_canary_seconds{group="lab",rank="0"} 0.25\n' in said
    assert 'gb10_hca_counter_total{hca="rocep1s0f0",counter="port_rcv_data"} 42\n' in said
    assert 'gb10_breaker_open{group="lab",rank="0"} 0\n' in said
    assert 'gb10_leg_info{device="enp1s0f0np0",hca="rocep1s0f0"} 1\n' in said
    assert 'gb10_hca_rate_bits_per_second{hca="rocep1s0f0"} 200000000000\n' in said and 'bits_per_second{hca="rxe0"' not in said
    assert 'gb10_hca_pcie_transfers_per_second{hca="rocep1s0f0"} 128000000000\n' in said
    assert 'gb10_guard_floor_bytes{group="lab",rank="0"} 1610612736\n' in said
    assert 'gb10_gate_max_age_seconds{group="lab"} 604800\n' in said
    assert 'gb10_gate_measured_seconds{group="lab"} 1700000000\n' in said and 'gb10_gate_passed{group="lab"} 1\n' in said
    assert "gb10_port_carrier{" not in said and "gb10_rank_failure_seconds" not in said and 'device="lo"' not in said


def test_a_gid_that_moves_changes_the_table_s_checksum(member: Path) -> None:
    def checksum() -> str:
        return next(line for line in scrape(member).splitlines() if line.startswith("gb10_hca_gid_table_crc32{"))

    before = checksum()
    assert checksum() == before
    gids = member / "sys/class/infiniband/rocep1s0f0/ports/1/gids"
    (gids / "3").rename(gids / "5")
    assert checksum() != before


def test_an_open_breaker_is_seen(member: Path) -> None:
    (member / "var/recovery").mkdir()
    (member / "var/recovery/lab.json").write_text(json.dumps({"failures": [{"at": time.time(), "reason": "x"}] * 2}))
    said = scrape(member)
    assert 'gb10_breaker_open{group="lab",rank="0"} 1\n' in said
    assert 'gb10_group_failures{group="lab",rank="0"} 2\n' in said


def test_what_the_guard_did_is_seen(member: Path) -> None:
    assert "gb10_guard_ended_group_seconds" not in scrape(member)
    (member / "run/lab/guard.json").write_text(json.dumps({"at": 1700000000.0, "action": "rank told to stop", "reason": "x"}))
    assert 'gb10_guard_ended_group_seconds{group="lab",rank="0"} 1700000000\n' in scrape(member)


def test_a_gate_that_did_not_pass_says_so(member: Path) -> None:
    (member / "var/gate/lab.json").write_text(json.dumps({"measured_at": 1700000000, "problems": ["slow"]}))
    assert 'gb10_gate_passed{group="lab"} 0\n' in scrape(member)


def test_it_answers_metrics_and_nothing_else_on_its_own_address(member: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gb10_node import config, exporter; exporter.PORT = int(sys.argv[1]); "
        f"exporter.VAR = Path({str(member / 'var')!r}); "
        f"exporter.serve(config.load('lab', *(Path({str(member)!r}, name) for name in ('etc', 'run', 'var'))))"
    )
    port = 30000 + os.getpid() % 20000
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen([sys.executable, "-c", code, str(port)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and f":{port}/metrics" in process.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                body = answer.read().decode()
            assert "gb10_memory_free_bytes " in body and "sesame" not in body
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=30)
        finally:
            process.kill()
