# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranks as processes that talk over gloo on loopback. They are forked from the test's process, which has imported vLLM once for all."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

FORK = multiprocessing.get_context("fork")
PATIENCE = 900
"""Seconds for a rank's answer: a loaded machine is slow, not wrong."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(function: Callable[..., Any], rank: int, count: int, port: int, queue: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK="0")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        queue.put((rank, None, function(rank, count, port, *arguments)))
    except BaseException as error:
        queue.put((rank, f"{type(error).__name__}: {error}", traceback.format_exc()))


def run(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, count, port, *arguments)` gives in each rank, by rank. Raises AssertionError with what a rank raised."""
    queue, port = FORK.Queue(), _free_port()
    processes = [FORK.Process(target=_rank, args=(function, rank, count, port, queue, arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        answers = [queue.get(timeout=PATIENCE) for _process in processes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    failed = [(error, trace) for _rank, error, trace in answers if error]
    if failed:
        raise AssertionError(f"{failed[0][0]}\n{failed[0][1]}")
    return [result for _rank, _error, result in sorted(answers, key=lambda answer: answer[0])]
