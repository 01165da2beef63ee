# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fabric gate: what is measured, what it has to reach, and what a measurement says. Of what it is, and how long it holds, is `_gate_pass`.

It exists for the member that is slow while every indicator is green: one such member made collectives 6.8 times slower, with TCP fine
and no counter moving (colonel-otto/3x-dgx-spark-mesh-deepseek-v4-0731-flash).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from . import _nccl_log, _nccl_verdict
from ._findings import refused

FOLDER = "/var/lib/gb10/gate"
PORT = 29610
"""The ranks of a measurement meet here on the head's management address; beside the supervisors' port."""
MARK = "gb10-gate "
SIZES = tuple(8 * 32**power for power in range(6))
"""Bytes of an all-reduce: 8, 256, 8 Ki, 256 Ki, 8 Mi and 256 Mi. The largest that was reached is judged; published figures are of 256 MB."""

# GB/s of bus bandwidth.
RING_OF_THREE = 20.0
"""Pass mark; 256 MB over four HCAs of each Spark made 23.2 (LLMKube), half the HCAs 13.9 (masquerator-coder), sockets 7.9 (LLMKube)."""
DIRECT = 21.9
"""NVIDIA's mark for two Sparks and for a switch: 175 Gb/s (spark_cluster_setup: warns below 21.875). A pair made 23.2 (graham33)."""
LONGER_RING = 10.0
"""NVIDIA's mark for a ring, 80 Gb/s. It says that the transport works; no figure of a longer ring with four HCAs is published."""
OUTLIER = 4.0
"""A pair so many times slower than the fastest is slow wherever its mark lies; those of the sick member were 6.8 times slower."""

JOIN_S, COLLECTIVE_S = 120, 30
"""Seconds for all containers to start and import PyTorch, and for one collective."""
SIZE_S, LONGEST_S = 1.0, 5.0
"""Seconds for timing one size; a size of which one all-reduce would take longest is left out. 256 MiB at a Spark's mark take 18 ms."""


def marks(topology: str, count: int, harness: str) -> dict[str, float]:
    """What each kind of way has to reach with a backend, in GB/s of bus bandwidth.

    There is none for one leg (NCCL uses both legs of a cable), and none for Gloo, whose speed is that of the processors.
    """
    if harness != "nccl":
        return {}
    if topology == "ring":
        return {"all": RING_OF_THREE if count == 3 else LONGER_RING, "pair": DIRECT}
    return {"all": DIRECT, "pair": DIRECT}


def backend(plan: Mapping[str, Any]) -> str:
    """`nccl` with GPUs, else `gloo`."""
    return "nccl" if next(iter(plan["members"].values()))["rank_config"]["container"]["gpus"] else "gloo"


def ways(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is measured, in order: each with `name`, `kind`, `ranks`, `members`, `cable`, `half`; for Gloo the addresses that it goes by.

    NCCL finds the legs of a pair itself and uses both halves. Gloo goes by one address, so that there each leg is a way of its own.
    """
    names = plan["cluster"]["members"]
    rank = {name: number for number, name in enumerate(names)}
    found: list[dict[str, Any]] = []
    shared: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for leg in plan["fabric"]["legs"]:
        for ends in combinations(sorted(leg["ends"], key=lambda end: rank[end["member"]]), 2):
            pair = (rank[ends[0]["member"]], rank[ends[1]["member"]])
            way = {
                "name": f"{ends[0]['member']} - {ends[1]['member']}",
                "kind": "pair",
                "ranks": list(pair),
                "members": [end["member"] for end in ends],
                "cable": leg["cable"],
                "half": leg["half"],
                "addresses": [end["address"] for end in ends],
            }
            shared.setdefault(pair, []).append(way)
    everybody = {"name": "all", "kind": "all", "ranks": list(rank.values()), "members": names, "cable": "", "half": ""}
    if backend(plan) == "nccl":
        for legs in shared.values():
            way = {**legs[0], "cable": " and ".join(dict.fromkeys(leg["cable"] for leg in legs)), "half": ""}
            del way["addresses"]
            found.append(way)
        return [*found, everybody]
    found = [
        {**leg, "kind": "leg", "name": f"{leg['name']} by {leg['cable']} half {leg['half']}"} for legs in shared.values() for leg in legs
    ]
    return [*found, {**everybody, "lanes": _lanes(len(names), shared)}]


def _lanes(count: int, shared: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]) -> list[list[list[str]]]:
    """Rings over the legs, one per leg that all neighbours share: of each hop (rank to the next) the addresses at both ends."""
    hops = [(rank, (rank + 1) % count) for rank in range(count)]
    lanes = min(len(shared[min(hop), max(hop)]) for hop in hops)
    return [[shared[min(hop), max(hop)][lane]["addresses"][:: 1 if hop[0] < hop[1] else -1] for hop in hops] for lane in range(lanes)]


def spec(plan: Mapping[str, Any], member: str, largest: int, timeout: float) -> dict[str, Any]:
    """What a member's rank is told (runtime/gate/gb10_gate.py). `largest`: bytes of the largest all-reduce; `timeout`: seconds for all of it."""
    head = plan["members"][plan["cluster"]["head"]]["management"]["address"]
    return {
        "rank": plan["members"][member]["rank"],
        "members": plan["cluster"]["members"],
        "store": [head, PORT],
        "backend": backend(plan),
        "sizes": [size for size in SIZES if size <= largest],
        "ways": ways(plan),
        "join_s": JOIN_S,
        "collective_s": COLLECTIVE_S,
        "size_s": SIZE_S,
        "longest_s": LONGEST_S,
        "total_s": timeout,
    }


def container_name(group: str) -> str:
    """The name by which a container is removed, whatever became of its client."""
    return f"gb10-gate-{group}"


def argv(config: Mapping[str, Any], program: str, specification: Mapping[str, Any]) -> list[str]:
    """The engine's command that runs a rank of the gate as the serving rank runs: its image, devices, limits and variables.

    The program goes by the command line, so that nothing lies on the member before or after. `--pull never`: which image a reference
    leads to is the runtime role's business.
    """
    container = config["container"]
    environment = dict(container["environment"])
    if container["gpus"]:
        environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # what proves the transport is said at INFO only
    # vLLM loads this library for its communicators; torch.distributed has to use the same for the measurement to mean anything.
    if library := environment.get("VLLM_NCCL_SO_PATH"):
        environment.setdefault("LD_PRELOAD", library)
    command = [config["engine"], "run", "--rm", "--name", container_name(config["group"]), "--network", "host", "--pull", "never"]
    command += ["--shm-size", f"{container['shm_mib']}m", "--oom-score-adj", str(container["oom_score_adj"]), "--entrypoint", "python3"]
    for capability in container["capabilities"]:
        command += ["--cap-add", capability]
    for name, value in sorted(container["ulimits"].items()):
        command += ["--ulimit", f"{name}={value}"]
    for device in container["devices"]:
        command += ["--device", device]
    if container["gpus"]:
        command += ["--gpus", "all"] if config["engine"] == "docker" else ["--device", "nvidia.com/gpu=all"]
    for name, value in sorted(environment.items()):
        command += ["--env", f"{name}={value}"]
    return [*command, container["image"], "-c", program, json.dumps(specification)]


@dataclass(frozen=True)
class Output:
    """What a rank's container said to its caller."""

    at: str
    error: str
    result: Mapping[str, Any] | None


def parse(text: str) -> Output:
    """The marked lines of a container's output."""
    said: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                said |= json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
    return Output(str(said.get("at", "")), str(said.get("error", "")), said if "result" in said else None)


def transport_problems(plan: Mapping[str, Any], member: str, output: str) -> list[str]:
    """What the log of a member's rank says against the planned transport, one sentence each.

    Its ranks are those of pairs, so the plan of the group says nothing about them beyond RDMA or not.
    """
    if backend(plan) != "nccl" or not plan["cluster"]["devices"]:
        return []
    verdict = _nccl_verdict.judge(_nccl_log.parse([(member, output.splitlines())]), _nccl_verdict.expected_of(None))
    return [re.sub(r"^(?:rank \d+(?: and )?)+: ", f"{member}: ", finding.sentence) for finding in refused(verdict["findings"])]


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """GB/s of an all-reduce's bus bandwidth: what each link carries, comparable for any number of ranks.

    Bytes per second times 2 (n - 1) / n, as nccl-tests reckons (doc/PERFORMANCE.md there).
    """
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def measured(plan: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The program's results with what each was, and each row with its bandwidth."""
    by_name = {result["name"]: result for result in results}
    return [
        {
            **{key: way[key] for key in ("name", "kind", "members", "cable", "half")},
            "rows": [
                {**row, "bus_gb_per_s": round(bus_bandwidth(row["bytes"], row["seconds"], len(way["ranks"])), 6)}
                for row in by_name[way["name"]]["rows"]
            ],
            "error": by_name[way["name"]]["error"],
            "lost": by_name[way["name"]]["lost"],
        }
        for way in ways(plan)
    ]


def bandwidth(way: Mapping[str, Any]) -> float:
    """GB/s at the largest size that a way reached; 0 where it did not get so far."""
    return way["rows"][-1]["bus_gb_per_s"] if way["rows"] and not way["error"] else 0.0


def judge(measurements: Sequence[Mapping[str, Any]], wanted: Mapping[str, float]) -> list[str]:
    """What is wrong, one sentence each; nothing where the gate is passed. `wanted`: GB/s per kind of way, as far as there is a mark."""
    problems = []
    for way in measurements:
        if wrong := sum(row["wrong"] for row in way["rows"]):
            problems.append(
                f"an all-reduce over {_where(way)} gave {wrong} wrong values: do not serve with it, check memory and cable of both ends"
            )
    parts = [way for way in measurements if way["kind"] != "all"]
    pairs = [bandwidth(way) for way in parts if way["kind"] == "pair"]
    mark = {**wanted, **({"pair": max(wanted.get("pair", 0.0), max(pairs) / OUTLIER)} if pairs else {})}
    slow = [way for way in parts if _falls_short(way, mark)]
    if slow:
        problems.append(_culprit(slow, [way for way in parts if way not in slow], mark))
    problems += [
        f"all ranks together: {_reach(way, mark)}, while every {parts[0]['kind']} alone is fast enough: check NCCL's choice of devices and "
        "channels (module gb10.cluster.nccl_verdict on the ranks' logs)"
        for way in measurements
        if way["kind"] == "all" and not slow and _falls_short(way, mark)
    ]
    return problems


def _falls_short(way: Mapping[str, Any], mark: Mapping[str, float]) -> bool:
    return bool(way["error"]) or bandwidth(way) < mark.get(way["kind"], 0.0)


def _culprit(slow: Sequence[Mapping[str, Any]], good: Sequence[Mapping[str, Any]], mark: Mapping[str, float]) -> str:
    """The member, cable or leg that all slow ways have in common."""
    listed = ", ".join(f"{_where(way)} {_reach(way, mark)}" for way in slow)
    healthy = {name for way in good for name in way["members"]}
    common = set.intersection(*(set(way["members"]) for way in slow))
    met = set().union(*(way["members"] for way in slow)) - common
    if not good:
        return f"every way is slow ({listed}): look for one cause, such as sockets instead of RDMA, the MTU, a sick member, or load on all"
    if len(common) == 1 and len(met) > 1 and not common & healthy:
        sick = common.pop()
        return (
            f"every way to {sick} is slow and no other is ({listed}): reboot {sick}, and where that does not help, take its power and its "
            "QSFP cables off for a minute"
        )
    cables = sorted({_cable(way) for way in slow})
    if len(cables) == 1:
        return f"{listed}: no other way is slow, so check {cables[0]} and the ports at both ends"
    return f"{listed}: check {', '.join(cables)} and their ports"


def _cable(way: Mapping[str, Any]) -> str:
    """What is plugged in between the two members of a way."""
    if way["cable"].startswith("switch."):
        return f"the cables of {' and '.join(way['members'])} to the switch"
    return f"cable {way['cable']}"


def _where(way: Mapping[str, Any]) -> str:
    return "all ranks" if way["kind"] == "all" else f"{way['kind']} {way['name']}"


def _reach(way: Mapping[str, Any], mark: Mapping[str, float]) -> str:
    """What a way came to, with what was lost there meanwhile."""
    lost = [f"{count} {what} by {member}" for member, counts in sorted(way["lost"].items()) for what, count in sorted(counts.items())]
    noted = f" ({', '.join(lost)})" if lost else ""
    if way["error"]:
        return f"failed with {way['error']!r}{noted}"
    return f"reaches {_figures(bandwidth(way))} of {_figures(mark.get(way['kind'], 0.0))} GB/s{noted}"


def _figures(number: float) -> str:
    """Three of them, never as a power of ten."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def summary(artefact: Mapping[str, Any] | None) -> list[str]:
    """An artefact in lines: one per way, with the bandwidth of the largest size and the time of the smallest."""
    return [
        f"{way['name']}: {_figures(bandwidth(way))} GB/s at {way['rows'][-1]['bytes']} bytes, {way['rows'][0]['seconds'] * 1e6:.0f} us at 8 bytes"
        if way["rows"]
        else f"{way['name']}: {way['error']}"
        for way in (artefact or {}).get("measurements", [])
    ]
