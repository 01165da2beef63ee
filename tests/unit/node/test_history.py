# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a member keeps of its last day."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from gb10_node import canary, health
from gb10_node.history import LOOK_S, RECORD_S, RECORDS, History, bytes_of
from gb10_node.memory import Memory
from hypothesis import given, settings
from hypothesis import strategies as st

LEG = "enp1s0f0np0"
LOOKS = int(RECORD_S / LOOK_S)


def memory(free: int) -> Memory:
    return Memory(free, free + 100, 0)


def test_a_record_has_the_least_memory_and_the_longest_token_of_its_five_minutes(tmp_path: Path) -> None:
    history = History(tmp_path / "h/lab.json", [LEG, "gone"])
    frees = [900, *([700] * 4), 300, *([800] * (LOOKS - 5))]
    for number, free in enumerate(frees):
        more = {"canary": 2.0 if number == 3 else 0.5, "kv": 0.1 * (number == 4)}
        history.look(1000.0 + number * LOOK_S, memory(free), {LEG: number * 3000}, more)
    (record,) = history.records
    assert record == {"at": 1000 + RECORD_S, "free": 300, "available": 400, "canary": 2.0, "kv": 0.1, "legs": {LEG: 100}}
    kept = tmp_path / "h/lab.json"
    assert json.loads(kept.read_text()) == [record] and kept.stat().st_mode & 0o777 == 0o600
    for number in range(1, LOOKS + 1):
        history.look(1000.0 + RECORD_S + number * LOOK_S, memory(500), {LEG: 0}, {})
    # The next one begins where the last one ended; the counter started anew, and there was no token.
    assert history.records[1] == {"at": 1000 + 2 * RECORD_S, "free": 500, "available": 600, "legs": {}}


@settings(max_examples=30)
@given(st.lists(st.floats(0.0, 4000.0), min_size=5, max_size=40))
def test_it_is_bounded_in_order_and_survives_a_new_life(tmp_path_factory: pytest.TempPathFactory, steps: list[float]) -> None:
    path = tmp_path_factory.mktemp("h") / "lab.json"
    path.write_text(json.dumps([{"at": at, "free": 1, "available": 1, "legs": {}} for at in range(RECORDS + 50)]))
    history, now = History(path, [LEG]), 1e6
    for step in steps:
        now += step
        history.look(now, memory(5), {LEG: 0}, {})
    assert len(history.records) == RECORDS
    times = [record["at"] for record in history.records]
    assert times == sorted(times)
    assert History(path, [LEG]).records == history.records


def test_a_clock_that_was_set_back_begins_anew(tmp_path: Path) -> None:
    history = History(tmp_path / "lab.json", [LEG])
    history.look(5000.0, memory(5), {LEG: 0}, {})
    history.look(1000.0, memory(5), {LEG: 0}, {})
    history.look(1000.0 + RECORD_S, memory(5), {LEG: 600}, {})
    assert [record["legs"] for record in history.records] == [{LEG: 2}]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '[{"free": 1}]', "\udcff"])
def test_a_file_that_is_no_history_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab.json").write_text(text, errors="surrogateescape")
    assert History(tmp_path / "lab.json", []).records == []


def test_rdma_counts_at_the_hca_and_all_else_at_the_network_device(tmp_path: Path) -> None:
    legs = [{"netdev": LEG, "hca": "rocep1s0f0"}, {"netdev": "enP2p1s0f0np0", "hca": "roceP2p1s0f0"}, {"netdev": "gone", "hca": "gone"}]
    for name, value in {"rx_bytes": 10, "tx_bytes": 5}.items():
        for leg in legs[:2]:
            (tmp_path / "net" / leg["netdev"] / "statistics").mkdir(parents=True, exist_ok=True)
            (tmp_path / "net" / leg["netdev"] / "statistics" / name).write_text(f"{value}\n")
    counters = tmp_path / "ib/rocep1s0f0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("100\n")
    (counters / "port_xmit_data").write_text("20\n")
    assert bytes_of(legs, tmp_path / "net", tmp_path / "ib") == {LEG: 495, "enP2p1s0f0np0": 15}


def test_an_engine_that_ends_while_it_answers_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            connection, _address = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:num_requests_running 1\n")

        thread = threading.Thread(target=cut)
        thread.start()
        assert canary.read_figures(health.Api(server.getsockname()[1])) is None
        thread.join()
