# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the benchmark's client adds to what it measures: the same windows by the server's clock and by the client's.

usage: python -m tests.unit.verify.client_cost [TOKENS_PER_SECOND]

The server is the one without a model, in a process of its own; it writes the times of its first and last token into `usage`.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from statistics import median

from ansible_collections.gb10.cluster.plugins.module_utils import _bench, _endpoint, _openai

from .fake_engine import KEY, MODEL, Engine

REPEATS = 7


def serve(port: multiprocessing.SimpleQueue[int], token_s: float) -> None:
    """Runs until it is killed."""
    engine = Engine(token_s=token_s)
    port.put(engine.port)
    engine.serve_forever()


def main() -> None:
    """Print one line per number of streams."""
    speed = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0
    queue: multiprocessing.SimpleQueue[int] = multiprocessing.SimpleQueue()
    server = multiprocessing.Process(target=serve, args=(queue, 1 / speed), daemon=True)
    server.start()
    endpoint = _endpoint.Endpoint("127.0.0.1", queue.get(), KEY, 60)
    for streams in (1, 2, 4, 8):
        step, errors = _bench.Step("decode", 256, streams), []
        wall, cpu = time.monotonic(), time.process_time()
        for repeat in range(REPEATS):
            asked = _bench.requests(step, MODEL, f"cost {streams} {repeat}", 1.3)
            replies = endpoint.ask_all(asked)
            value = _bench.measured(step, asked, replies, 0)["value"]
            usages = [_openai.read(request, reply).usage for request, reply in zip(asked, replies, strict=True)]
            window = max(usage["last_at"] for usage in usages) - min(usage["first_at"] for usage in usages)
            errors.append(value / (255 * streams / window) - 1)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        each = " ".join(f"{error:+.2%}" for error in errors)
        print(f"{streams} streams of {speed:.0f} tokens per second: median {median(errors):+.2%} [{each}], {share:.1%} of a core")
    server.terminate()


if __name__ == "__main__":
    main()
