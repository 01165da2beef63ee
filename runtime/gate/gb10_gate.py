# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""One rank of the fabric gate: all-reduces over each way of the fabric, timed and checked. Runs inside the serving image.

    python3 gb10_gate.py '{"rank": 0, ...}'

The argument is the JSON that module_utils/_gate.py makes: who takes part, the store on the head's management address, and the ways,
one after another while all other ranks are idle. NCCL chooses its devices itself, so there a way is a pair of ranks, or all. Gloo is bound
to one address at a time, so there a way is one leg, and `all` a ring over the legs that is made here of sends and receives.

Lines that begin with MARK are for the caller: `at` tells where this rank stands, `error` why it gave up, and on rank 0 `result`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MARK = "gb10-gate "
VALUES = 251
"""Element i of rank r is (r + 1) * (i % 251 + 1): sums over ranks are exact in float32, and 251 is prime, so a shifted chunk is seen."""
LEAST_ITERATIONS, MOST_ITERATIONS = 3, 20
"""Of one size. Their mean is the time, as nccl-tests reckons: a leg that loses frames is fast at times, and a single all-reduce or a median hides that."""
LATENCY_BOUND = 256 * 1024
"""Below so many bytes a time says nothing about the next size."""
RDMA_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rnr_nak_retry_err")
"""hw_counters of mlx5 that move when a frame was lost or late; unlike traffic counters they stay at rest on a healthy fabric."""


def tell(**what: Any) -> None:
    """A line for the caller."""
    print(MARK + json.dumps(what), flush=True)


def counters() -> dict[str, int]:
    """What counts lost frames on this member: TCP segments sent again, and errors of each RDMA device."""
    found = {}
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    found["TCP segments sent again"] = int(dict(zip(*lines, strict=True))["RetransSegs"])
    for path in Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/*"):
        if path.name in RDMA_COUNTERS:
            found[f"{path.parts[4]} {path.name}"] = int(path.read_text())
    return found


class Gate:
    """This rank with its store; `way` is a mapping of the specification."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import torch.distributed

        self.torch, self.dist, self.spec, self.rank = torch, torch.distributed, spec, spec["rank"]
        self.cuda = spec["backend"] == "nccl"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.patience = timedelta(seconds=spec["collective_s"])
        self.total = timedelta(seconds=spec["total_s"])
        self.store: Any = None

    def join(self) -> None:
        """Meet all ranks at the store."""
        host, port = self.spec["store"]
        wait = timedelta(seconds=self.spec["join_s"])
        try:
            self.store = self.dist.TCPStore(host, port, None, self.rank == 0, timeout=wait, wait_for_workers=False)
        except Exception as error:
            raise SystemExit(f"cannot meet the head at {host}:{port} ({first_line(error)})") from error
        self.meet("join", wait)

    def meet(self, name: str, wait: timedelta) -> None:
        """A barrier of all ranks."""
        keys = [f"{name}/{rank}" for rank in range(len(self.spec["members"]))]
        self.store.set(keys[self.rank], "1")
        try:
            self.store.wait(keys, wait)
        except Exception as error:
            missing = [member for member, key in zip(self.spec["members"], keys, strict=True) if not self.has(key)]
            raise SystemExit(f"{', '.join(missing) or 'the head'} did not come to {name!r} within {wait.total_seconds():.0f} s") from error

    def has(self, key: str) -> bool:
        """Whether a key is set; the store may be gone."""
        try:
            return bool(self.store.check([key]))
        except Exception:
            return True

    def run(self) -> None:
        """All ways in order; rank 0 tells the result."""
        self.join()
        for index, way in enumerate(self.spec["ways"]):
            tell(at=way["name"])
            self.meet(f"before {way['name']}", self.total)
            if self.rank in way["ranks"]:
                self.store.set(f"result/{index}/{self.rank}", json.dumps(self.measure(way)))
        self.meet("end", self.total)
        if self.rank == 0:
            nccl = ".".join(map(str, self.torch.cuda.nccl.version())) if self.cuda else ""
            tell(result=[self.gather(index, way) for index, way in enumerate(self.spec["ways"])], torch=self.torch.__version__, nccl=nccl)
        # The store lives in rank 0, which goes last.
        self.store.set(f"bye/{self.rank}", "1")
        if self.rank == 0:
            self.meet("bye", timedelta(seconds=10))

    def gather(self, index: int, way: dict[str, Any]) -> dict[str, Any]:
        """One way's result from all of its ranks: of each size the slowest rank's time."""
        parts = {rank: json.loads(self.store.get(f"result/{index}/{rank}")) for rank in way["ranks"]}
        names = self.spec["members"]
        errors = [f"{names[rank]}: {part['error']}" for rank, part in parts.items() if part["error"]]
        rows = [
            {
                "bytes": same[0]["bytes"],
                "seconds": max(row["seconds"] for row in same),
                "iterations": same[0]["iterations"],
                "wrong": sum(row["wrong"] for row in same),
            }
            for same in zip(*(part["rows"] for part in parts.values()), strict=False)
        ]
        lost = {names[rank]: part["lost"] for rank, part in parts.items() if part["lost"]}
        return {"name": way["name"], "rows": rows, "error": "; ".join(errors), "lost": lost}

    def measure(self, way: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a way; an error ends the way, not the gate."""
        before, rows, error = counters(), [], ""
        try:
            all_reduce = self.connect(way)
            for size in self.spec["sizes"]:
                # One rank decides for all, or they would part. What a large size takes is known from the last one.
                expected = rows[-1]["seconds"] * size / rows[-1]["bytes"] if rows and rows[-1]["bytes"] >= LATENCY_BOUND else 0
                if not self.agreed(way, f"go/{way['name']}/{size}", int(expected < self.spec["longest_s"])):
                    break
                rows.append(self.time(way, all_reduce, size))
        except Exception as problem:
            error = first_line(problem)
        lost = {name: count - before.get(name, 0) for name, count in counters().items() if count > before.get(name, 0)}
        return {"rows": rows, "error": error, "lost": lost}

    def agreed(self, way: dict[str, Any], key: str, number: int) -> int:
        """The number that the way's first rank has."""
        if self.rank == way["ranks"][0]:
            self.store.set(key, str(number))
        return int(self.store.get(key))

    def time(self, way: dict[str, Any], all_reduce: Callable[[Any], None], size: int) -> dict[str, Any]:
        """One size: check, warm up, time, and check again after the load."""
        torch, number = self.torch, len(way["ranks"])
        position = way["ranks"].index(self.rank) + 1
        pattern = (torch.arange(size // 4, device=self.device) % VALUES + 1).to(torch.float32)
        zeros = torch.zeros_like(pattern)

        def once(tensor: Any) -> float:
            begin = time.perf_counter()
            all_reduce(tensor)
            return time.perf_counter() - begin

        def wrong() -> int:
            tensor = pattern * position
            once(tensor)
            return int((tensor != pattern * (number * (number + 1) // 2)).sum().item())

        mistakes = wrong()
        first = once(zeros)
        fitting = min(MOST_ITERATIONS, max(LEAST_ITERATIONS, int(self.spec["size_s"] / first)))
        iterations = self.agreed(way, f"iterations/{way['name']}/{size}", fitting)
        seconds = statistics.fmean([first, *(once(zeros) for _iteration in range(iterations - 1))])
        return {"bytes": size, "seconds": seconds, "iterations": iterations, "wrong": mistakes + wrong()}

    def connect(self, way: dict[str, Any]) -> Callable[[Any], None]:
        """A way's all-reduce in place."""
        ranks, name = way["ranks"], way["name"]
        if self.cuda:
            return self.nccl(name, ranks.index(self.rank), len(ranks))
        if "lanes" in way:
            return self.ring(way)
        group = self.gloo(name, ranks.index(self.rank), len(ranks), way["addresses"][ranks.index(self.rank)])
        return lambda tensor: group.allreduce([tensor]).wait()

    def nccl(self, name: str, rank: int, size: int) -> Callable[[Any], None]:
        """An all-reduce by NCCL that ends in time.

        It polls: PyTorch's own blocking wait sleeps a millisecond between two looks, ten times what a small all-reduce takes, and its
        watchdog would end the whole process, so that one is given more time than this.
        """
        group = self.dist.ProcessGroupNCCL(self.dist.PrefixStore(name, self.store), rank, size, 4 * self.patience)

        def all_reduce(tensor: Any) -> None:
            work, deadline = group.allreduce([tensor]), time.monotonic() + self.patience.total_seconds()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    group.abort()
                    raise TimeoutError(f"an all-reduce did not end within {self.patience.total_seconds():.0f} s")
            work.wait()

        return all_reduce

    def gloo(self, name: str, rank: int, size: int, address: str) -> Any:
        """A Gloo group whose traffic goes by one address."""
        options = self.dist.ProcessGroupGloo._Options()
        options._devices = [self.dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self.patience
        return self.dist.ProcessGroupGloo(self.dist.PrefixStore(name, self.store), rank, size, options)

    def ring(self, way: dict[str, Any]) -> Callable[[Any], None]:
        """A ring over the legs: hop h joins ranks h and h + 1. Every lane is a ring of its own and takes its share of the tensor."""
        torch, number = self.torch, len(way["ranks"])
        lanes = []
        for lane, hops in enumerate(way["lanes"]):
            # In the order of hops on every rank: a group is made when both of its ranks are at it.
            groups = {}
            for hop, addresses in enumerate(hops):
                for end, rank in enumerate((hop, (hop + 1) % number)):
                    if rank == self.rank:
                        groups[end] = self.gloo(f"{way['name']}/{lane}/{hop}", end, 2, addresses[end])
            lanes.append((groups[0], groups[1]))

        def step(out: list[Any], into: list[Any]) -> None:
            works = []
            for (following, previous), one, other in zip(lanes, out, into, strict=True):
                if one.numel():
                    works.append(following.send([one], 1, 0))
                if other.numel():
                    works.append(previous.recv([other], 0, 0))
            for work in works:
                work.wait()

        def all_reduce(tensor: Any) -> None:
            shares = [torch.tensor_split(share, number) for share in torch.tensor_split(tensor, len(lanes))]
            for turn in range(number - 1):
                sums = [pieces[(self.rank - turn - 1) % number] for pieces in shares]
                arrived = [torch.empty_like(piece) for piece in sums]
                step([pieces[(self.rank - turn) % number] for pieces in shares], arrived)
                for piece, more in zip(sums, arrived, strict=True):
                    piece += more
            for turn in range(number - 1):
                step([p[(self.rank + 1 - turn) % number] for p in shares], [p[(self.rank - turn) % number] for p in shares])

        return all_reduce


def first_line(error: BaseException) -> str:
    """An exception's first sentence, without the source line and the stack that PyTorch adds."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] *", "", line).split(". ")[0].strip()


def main() -> None:
    """Run this rank; the exit status is 0 when it came to the end, whatever was measured."""
    gate, status = Gate(json.loads(sys.argv[1])), 1
    try:
        gate.run()
        status = 0
    except SystemExit as end:
        tell(error=str(end))
    except Exception as problem:
        tell(error=f"{type(problem).__name__}: {first_line(problem)}")
    sys.stdout.flush()
    # Not return: a group that failed may hold threads that never end.
    os._exit(status)


if __name__ == "__main__":
    main()
