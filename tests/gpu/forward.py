# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole forward passes of vLLM's engine with the plugin, on one GPU: python -m tests.gpu.forward FOLDER

A model with the release's sizes, but few layers and experts, and random weights: in EXL3, and the same weights decoded to bfloat16, which vLLM's own
layers compute. What the two differ by is held against what two roundings of the same decoded weights differ by, and against one matrix that is wrong.
Each engine is a process of its own. Writes FOLDER/forward.json, what each run answered to FOLDER/forward-answers.json, logs to FOLDER/forward.log.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.gpu.forward_model import TEXT, write, write_tokenizer

PROMPTS, NEW = (40, 700, 3000), 32
"""Tokens of each prompt: below the window, about top-k, and in two chunks with more keys than top-k and candidates."""
AT_A_TIME = 6
"""Engines on the card, each below a sixth of it."""
EXCHANGED = "rows of ranks exchanged:"
LEVERS = {
    "GB10_ENGRAM_DIR": "{folder}",
    "GB10_DROP_PAGE_CACHE": "1", "GB10_ENGRAM_CACHE_MIB": "8", "GB10_PREFILL_RELEASE_MIB": "999999999", "GB10_INDEXER_FACTOR": "1",
    "GB10_INDEXER_SPLIT": "256",
}  # fmt: skip


def harness() -> None:
    """A plugin for these runs alone: each process of an engine loads it."""
    if os.environ.get("GB10_TEST_IN_ORDER"):
        _in_order()
    if os.environ.get("GB10_TEST_ONE_CARD"):
        _one_card()


def _in_order() -> None:
    """vLLM's top-k gives the keys that it found in an order that changes from run to run, and attention adds them up in it: here they are sorted."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    found = SparseAttnIndexer.forward_cuda

    def forward(self: Any, hidden_states: torch.Tensor, *more: Any) -> Any:
        result = found(self, hidden_states, *more)
        rows = self.topk_indices_buffer[: hidden_states.shape[0]]
        none = torch.iinfo(rows.dtype).max
        ordered = torch.where(rows < 0, none, rows).sort(-1).values
        rows.copy_(torch.where(ordered == none, -1, ordered))
        return result

    SparseAttnIndexer.forward_cuda = forward


def _one_card() -> None:
    """Ranks of a group that share one GPU: NCCL takes one rank a GPU, so these talk through the host."""
    import torch.distributed as dist
    from vllm.config.parallel import ParallelConfig
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform

    class ThroughHost(DeviceCommunicatorBase):
        """What vLLM's communicator does, by gloo; sums are made in float32."""

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            host = input_.float().cpu() if input_.is_floating_point() else input_.cpu()
            dist.all_reduce(host, group=self.cpu_group)
            return host.to(input_.device, input_.dtype)

        def _parts(self, input_: torch.Tensor, sizes: list[int] | None = None) -> list[torch.Tensor]:
            host = input_.contiguous().cpu()
            parts = [host.new_empty((size, *host.shape[1:])) for size in sizes or [host.shape[0]] * self.world_size]
            raw = [part.view(torch.uint8) if part.numel() else part for part in (host, *parts)]
            if sizes:
                for rank, part in enumerate(raw[1:]):
                    if rank == self.rank_in_group:
                        part.copy_(raw[0])
                    dist.broadcast(part, self.ranks[rank], group=self.cpu_group)
            else:
                dist.all_gather(raw[1:], raw[0], group=self.cpu_group)
            return [part.to(input_.device) for part in parts]

        def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            return torch.cat(self._parts(input_), dim)

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
            if isinstance(input_, list):
                return [self.all_gatherv(one, dim, sizes) for one in input_]
            print(EXCHANGED, sizes, flush=True)  # the only caller here is the indexer's exchange
            return torch.cat(self._parts(input_, sizes), dim)

        def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
            whole = self.all_gather(input_, dim)
            return whole if self.rank_in_group == dst else None

    globals()["ThroughHost"] = ThroughHost
    kind = type(current_platform)
    kind.dist_backend = "gloo"
    kind.device_count = classmethod(lambda _kind: 8)
    kind.get_device_communicator_cls = classmethod(lambda _kind: "tests.gpu.forward.ThroughHost")
    ParallelConfig.get_local_gpu_index = lambda _self, _rank: 0


def prompts(text: dict[str, Any]) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, text["vocab_size"] - 600, (size,), generator=random).tolist() for size in PROMPTS]


def answer(folder: str, more: dict[str, Any], times: int) -> dict[str, Any]:
    """An engine's answers: log-probabilities of each prompt's own tokens, and of those that follow greedily."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": folder, "skip_tokenizer_init": True, "limit_mm_per_prompt": {"image": 0}, "max_model_len": 8192, "max_num_batched_tokens": 2048,
        "max_num_seqs": 8, "gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2 << 30, "enable_prefix_caching": False, "seed": 0,
        "enforce_eager": True, "kernel_config": {"enable_jit_warmup": False}, "disable_log_stats": True, **more,
    }  # fmt: skip
    began = time.monotonic()
    llm = LLM(**arguments)
    result: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1), "answers": []}
    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    for _time in range(times):
        began = time.monotonic()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(TEXT)], sampling, use_tqdm=False)
        result.setdefault("generate_s", []).append(round(time.monotonic() - began, 3))
        result["answers"].append(
            [
                {
                    "prompt": [
                        one[token].logprob for one, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
                    ],
                    "tokens": list(output.outputs[0].token_ids),
                    "logprobs": [
                        one[token].logprob for one, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                    ],
                }
                for output in outputs
            ]
        )
    if arguments.get("tensor_parallel_size", 1) == 1:
        result["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


_GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 3, 6, 12, 18]}}
_DRAFT = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
_THREE = {"GB10_VIRTUAL_TP": "3"}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "exl3": ("exl3", {}, {}),
    "dense": ("dense", {}, {}),
    "rounded": ("rounded", {}, {}),
    "exl3, graphs": ("exl3", _GRAPHS, {}),
    "exl3, levers": ("exl3", {}, LEVERS),
    "exl3, drafter": ("exl3", _DRAFT, {}),
    "exl3, graphs, levers": ("exl3", _GRAPHS, LEVERS),
    "exl3, 3 ranks": ("exl3", {"tensor_parallel_size": 3}, _THREE),
    "exl3, 3 ranks, levers": ("exl3", {"tensor_parallel_size": 3}, _THREE | LEVERS),
    "wrong": ("wrong", {}, {}),
    "exl3, drafter, graphs, levers": ("exl3", {**_GRAPHS, **_DRAFT}, LEVERS),
    "exl3, 2 ranks": ("exl3", {"tensor_parallel_size": 2}, {}),
    "exl3, 2 ranks, levers": ("exl3", {"tensor_parallel_size": 2}, LEVERS),
}
"""Name to kind of checkpoint, arguments of the engine, and variables; `{folder}` is the checkpoint's."""

ALIKE = (
    ("exl3", "exl3, graphs"), ("exl3", "exl3, levers"), ("exl3, graphs", "exl3, graphs, levers"), ("exl3, 2 ranks", "exl3, 2 ranks, levers"),
    ("exl3, 3 ranks", "exl3, 3 ranks, levers"),
)  # fmt: skip
"""Pairs of runs that should answer alike to the bit."""
APART = (
    ("dense", "rounded"), ("exl3", "dense"), ("exl3", "rounded"), ("wrong", "dense"), ("exl3", "exl3, 2 ranks"), ("exl3", "exl3, 3 ranks"),
    ("exl3", "exl3, drafter"), ("exl3, drafter", "exl3, drafter, graphs, levers"),
)  # fmt: skip
"""Pairs that differ by rounding, `wrong` by more."""


def run(name: str, base: Path, output: Path, limit: int = 330) -> dict[str, Any]:
    """One run in a process of its own; what went wrong instead of answers."""
    kind, more, variables = RUNS[name]
    folder = base / kind
    environment = (
        os.environ
        | {"GB10_DROP_PAGE_CACHE": "0", "GB10_TEST_IN_ORDER": "1"}
        | {key: value.format(folder=folder) for key, value in variables.items()}
    )
    if more.get("tensor_parallel_size", 1) > 1:
        environment["GB10_TEST_ONE_CARD"] = "1"
    place = base / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    program = [sys.executable, "-m", "tests.gpu.forward", "--answer", str(folder), json.dumps(more), str(place)]
    began = time.monotonic()
    with place.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(program, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = place.with_suffix(".log").read_text(errors="replace")
    result = json.loads(place.read_text()) if place.exists() else {"failed": text[-6000:], "code": code}
    result |= {"took_s": round(time.monotonic() - began, 1), "levers": proven(text), "exchanges": text.count(EXCHANGED)}
    with (output / "forward.log").open("a") as file:
        file.write(f"===== {name}\n{text}\n")
    print(name, {key: result.get(key) for key in ("start_s", "generate_s", "took_s", "code")}, flush=True)
    if "failed" in result:
        print(text[-3000:], flush=True)
    return result


def proven(text: str) -> list[str]:
    """The levers whose line is in a log."""
    from gb10_vllm.levers import LEVERS as levers
    from gb10_vllm.levers import PREFIX

    return [lever.variable for lever in levers if re.search(re.escape(PREFIX) + lever.proof, text)]


def equal(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Whether two runs answered alike to the bit."""
    first, second = one["answers"][0], other["answers"][0]
    return {
        "prompts": [a["prompt"] == b["prompt"] for a, b in zip(first, second, strict=True)],
        "tokens": [a["tokens"] == b["tokens"] for a, b in zip(first, second, strict=True)],
        "logprobs": [a["logprobs"] == b["logprobs"] for a, b in zip(first, second, strict=True)],
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """By how much two runs differ: over the prompts' own log-probabilities, and where the greedy tokens part."""
    result = []
    for first, second in zip(one["answers"][0], other["answers"][0], strict=True):
        difference = (torch.tensor(first["prompt"], dtype=torch.float64) - torch.tensor(second["prompt"], dtype=torch.float64)).abs()
        same = [a == b for a, b in zip(first["tokens"], second["tokens"], strict=True)]
        until = same.index(False) if False in same else len(same)
        close = [abs(a - b) for a, b in zip(first["logprobs"][:until], second["logprobs"][:until], strict=True)]
        result.append(
            {
                "prompt_tokens": len(first["prompt"]) + 1,
                "rms": float(f"{difference.square().mean().sqrt():.4g}"),
                "median": float(f"{difference.median():.4g}"),
                "largest": float(f"{difference.max():.4g}"),
                "tokens_alike": until,
                "largest_of_those": float(f"{max(close, default=0):.4g}"),
            }
        )
    return result


def main() -> None:
    """The command line."""
    if sys.argv[1] == "--answer":
        place = Path(sys.argv[4])
        result = answer(sys.argv[2], json.loads(sys.argv[3]), 2)
        place.with_suffix(".part").write_text(json.dumps(result))
        place.with_suffix(".part").rename(place)
        return
    if sys.argv[1] == "--write":
        import gb10_vllm

        gb10_vllm.register()
        import gb10_exl3.ops

        assert gb10_exl3.ops
        base, kind = Path(sys.argv[2]), sys.argv[3]
        write(base / kind, kind, json.loads((base / "text.json").read_text()), base / "tokenizer")
        return
    output = Path(sys.argv[1])
    wanted = [name for name in RUNS if not sys.argv[2:] or name in sys.argv[2:]]
    (output / "forward.log").unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        base = Path(folder)
        text = {**TEXT, "engram_compressed_vocab_size": write_tokenizer(base / "tokenizer", TEXT["vocab_size"])}
        (base / "text.json").write_text(json.dumps(text))

        def made(kind: str) -> None:
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "tests.gpu.forward", "--write", str(base), kind], check=True)
            print("written", kind, round(time.monotonic() - began, 1), flush=True)

        results: dict[str, dict[str, Any]] = {}
        lock = threading.Lock()

        def ran(name: str) -> None:
            if time.monotonic() < deadline:
                result = run(name, base, output)
                with lock:
                    results[name] = result
                    (output / "forward-answers.json").write_text(json.dumps(results))
                    (output / "forward.json").write_text(json.dumps(summary(results), indent=1) + "\n")

        deadline = time.monotonic() + float(os.environ.get("GB10_TEST_SECONDS", "3600"))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(made, sorted({RUNS[name][0] for name in wanted})))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(ran, wanted))
    problems = judged(json.loads((output / "forward.json").read_text()), wanted)
    print(*problems or ["as it should be"], sep="\n")
    sys.exit(bool(problems))


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is kept."""
    document: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "runs": {},
    }
    for name, result in results.items():
        entry = {key: value for key, value in result.items() if key != "answers"}
        if "answers" in result:
            entry["alike_again"] = result["answers"][0] == result["answers"][1]
        document["runs"][name] = entry
    document["pairs"] = [
        {"one": one, "other": other, "alike": equal(results[one], results[other]), "apart": apart(results[one], results[other])}
        for one, other in (*ALIKE, *APART)
        if all("answers" in results.get(name, {}) for name in (one, other))
    ]
    return document


def judged(document: dict[str, Any], wanted: list[str]) -> list[str]:
    """What is not as it should be."""
    problems = [f"{name} did not run" for name in wanted if "start_s" not in document["runs"].get(name, {})]
    problems += [
        f"{name}: another answer the second time" for name, entry in document["runs"].items() if not entry.get("alike_again", True)
    ]
    pairs = {(pair["one"], pair["other"]): pair for pair in document["pairs"]}
    for one, other in ALIKE:
        if (one, other) in pairs and not all(all(flags) for flags in pairs[one, other]["alike"].values()):
            problems.append(f"{one} and {other} do not answer alike")
    medians = {names: [part["median"] for part in pair["apart"]] for names, pair in pairs.items()}
    problems += [
        f"{name}: no rows were exchanged"
        for name, entry in document["runs"].items()
        if "ranks, levers" in name and not entry.get("exchanges", True)
    ]
    yard = medians.get(("dense", "rounded"))
    for names, factor, below in ((("exl3", "dense"), 2, True), (("wrong", "dense"), 2, False)):
        if yard and names in medians and any((a <= factor * b) != below for a, b in zip(medians[names], yard, strict=True)):
            problems.append(f"{names}: {medians[names]} apart, two roundings of the weights {yard}")
    return problems


if __name__ == "__main__":
    main()
