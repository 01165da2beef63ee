#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One step of a benchmark."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_bench
short_description: Measure one step of a benchmark against a served model
version_added: 0.1.0
description:
  - Runs on the head, so that the API key never leaves it and no network is part of a figure. Every repetition is kept; which count, and what may be
    said of them, is in docs/benchmarks.md.
  - Nothing is measured beside other requests, out of a warm cache, or over a window that was not filled.
  - Meanwhile the free memory of the members is read from their exporters, once a second.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.ENDPOINT]
attributes:
  check_mode:
    support: full
    details:
      - Nothing is measured then.
  diff_mode:
    support: N/A
    details:
      - This module changes nothing.
  idempotent:
    support: none
    details:
      - Each call measures anew; it never reports a change.
options:
  step:
    description:
      - What to measure, with C(kind) and C(tokens). V(prefill) is a new prompt of about so many tokens; V(decode) a forced window of so many, 256 or
        more, by C(concurrency) streams at once; V(mixed) such a window with a prefill of C(beside) tokens beside it.
    type: dict
    required: true
  repeats:
    description: How often. The first ones are warm-up until the speed is steady; three must remain.
    type: int
    default: 5
  exporters:
    description: Address of each member's exporter, by name of the member.
    type: dict
    default: {}
  timeout:
    description: Seconds for one request; a long prompt gets more, by its length.
    type: float
    default: 600
"""

EXAMPLES = r"""
- name: Measure the decode of four streams
  gb10.cluster.serving_bench:
    group: lab
    port: 8000
    model: smollm2
    step: {kind: decode, tokens: 256, concurrency: 4}
"""

RETURN = r"""
result:
  description: The step with every repetition, its median, least and most in tokens per second, or C(refused), why there is none.
  returned: when something was measured
  type: dict
"""

import secrets
import threading
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _answers, _bench, _endpoint, _openai

EXPORTER_PORT = 29620
SAMPLE_S = 1.0
CANARY_S = 30
"""For the canary's token to end before other requests count as such."""
HITS = "vllm:prefix_cache_hits_total"
RUNNING = "vllm:num_requests_running"


class MemoryFloor(threading.Thread):
    """The least memory that each member had while it runs, in MiB."""

    def __init__(self, exporters: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.endpoints = {name: _endpoint.Endpoint(address, EXPORTER_PORT, "", 2) for name, address in exporters.items()}
        self.floor: dict[str, dict[str, int]] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while True:
            for name, endpoint in self.endpoints.items():
                said = endpoint.ask(_openai.Request(_openai.METRICS, with_key=False)).text
                for kind in ("free", "available"):
                    if (value := _answers.counter(said, f"gb10_memory_{kind}_bytes")) is not None:
                        floor = self.floor.setdefault(name, {})
                        floor[f"{kind}_mib"] = min(int(value) >> 20, floor.get(f"{kind}_mib", int(value) >> 20))
            if self.over.wait(SAMPLE_S):
                return


def metric(endpoint: _endpoint.Endpoint, name: str) -> float | None:
    """One of vLLM's own figures, if it has it."""
    return _answers.counter(endpoint.ask(_openai.Request(_openai.METRICS)).text, name)


def others(endpoint: _endpoint.Endpoint) -> float:
    """Requests that run beside ours, after the canary's token had its time."""
    deadline = time.monotonic() + CANARY_S
    while (running := metric(endpoint, RUNNING) or 0) and time.monotonic() < deadline:
        time.sleep(SAMPLE_S)
    return running


def tokens_per_word(endpoint: _endpoint.Endpoint, model: str) -> float:
    """Of the words that prompts are made of, by the server's own tokenizer. Raises Faulty."""
    sizes = []
    for count in (8, 40):
        request = _openai.completion(model, _bench.text(secrets.token_hex(8), count, 1), 1)
        sizes.append(_openai.read(request, endpoint.ask(request)).count("prompt_tokens"))
    return max((sizes[1] - sizes[0]) / 32, 0.1)


def measure(endpoint: _endpoint.Endpoint, model: str, step: _bench.Step, repeats: int) -> dict[str, Any]:
    """All repetitions, concluded."""
    per_word = tokens_per_word(endpoint, model)
    repetitions = []
    for _repetition in range(repeats):
        asked = _bench.requests(step, model, secrets.token_hex(8), per_word)
        before = metric(endpoint, HITS)
        replies = endpoint.ask_all(asked)
        after = metric(endpoint, HITS)
        repetitions.append(_bench.measured(step, asked, replies, None if before is None or after is None else after - before))
    return _bench.concluded(step, repetitions)


def main() -> None:
    """Look, measure, report."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "step": {"type": "dict", "required": True},
            "repeats": {"type": "int", "default": 5},
            "exporters": {"type": "dict", "default": {}},
            "timeout": {"type": "float", "default": 600},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    try:
        step = _bench.step_of(parameters["step"])
        endpoint = _endpoint.of_group(parameters["group"], parameters["port"], parameters["timeout"])
    except (TypeError, ValueError, LookupError) as error:
        module.fail_json(msg=str(error))
    if parameters["repeats"] < _bench.LEAST_REPETITIONS:
        module.fail_json(msg=f"repeats is {parameters['repeats']}: fewer than {_bench.LEAST_REPETITIONS} are no median")
    if module.check_mode:
        module.exit_json(changed=False)
    if running := others(endpoint):
        module.fail_json(msg=f"{running:.0f} other requests run, and nothing can be measured beside them: wait, or keep clients away")
    floor = MemoryFloor(parameters["exporters"])
    floor.start()
    wall, cpu = time.monotonic(), time.process_time()
    try:
        result = measure(endpoint, parameters["model"], step, parameters["repeats"])
    except _openai.Faulty as faulty:
        module.fail_json(msg=f"{step.name} cannot be measured: {faulty}")
    finally:
        floor.over.set()
        floor.join()
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    module.exit_json(changed=False, result=result | {"memory_floor": floor.floor, "client_cpu_share": round(share, 4)})


if __name__ == "__main__":
    main()
