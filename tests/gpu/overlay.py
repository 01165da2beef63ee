# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank of the full-size model in the memory of one GPU, and what the plugin's layers take of a step: python -m tests.gpu.overlay FOLDER

vLLM builds the model, its weights are random bits. Every EXL3 layer of the rank runs in the model's order through the plugin's methods: decoding from
one CUDA graph, a prefill's chunk eagerly. Attention, norms, Engram and what ranks exchange are not in it. Writes FOLDER/overlay.json.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch

from tests.overlay import engine, models

TEXT = models.FULL_TEXT
DECODE = (1, 6, 12)
"""Rows: one token, one sequence with five drafted ones, two of them."""
PREFILL = (1024, 8192)


def tables(folder: Path) -> None:
    """Shards as large as the release's, all holes: rows of zeros."""
    weight_map = {}
    for layer, rows in zip(TEXT["engram_layer_ids"], TEXT["engram_num_embeddings"], strict=True):
        header, end = {}, 0
        for part, dtype, width in (("weight", "F8_E4M3", 256), ("scale", "F8_E8M0", 8)):
            name = f"layers.{layer}.engram.embed.{part}"
            header[name] = {"dtype": dtype, "shape": [rows, width], "data_offsets": [end, end + rows * width]}
            end += rows * width
            weight_map[name] = f"table-{layer}.safetensors"
        text = json.dumps(header).encode()
        with (folder / f"table-{layer}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fill(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The EXL3 layers, with random trellises and scales."""
    layers = []
    for name, module in model.named_modules():
        if not type(getattr(module, "quant_method", None)).__name__.startswith("Exl3"):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.int16:
                parameter.data.random_(-32768, 32768)
            elif parameter.dtype == torch.float16:
                parameter.data.uniform_(0.02, 0.07)
        module.exl3_awaited = set()
        module.quant_method.process_weights_after_loading(module)
        layers.append((name, module))
    return layers


@cache
def random(*shape: int) -> torch.Tensor:
    """The same for all layers of a width, so that the peak of memory is the layers' own."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def launch(module: torch.nn.Module, rows: int) -> tuple[Callable[[], Any], int]:
    """What runs a layer on random rows, and the bytes of weights that it has to read."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters(recurse=False))
    method, width = module.quant_method, module.suh.shape[-1] if hasattr(module, "suh") else module.w13_suh.shape[-1]
    if type(method).__name__ == "Exl3MoEMethod":
        experts, top = module.w2_trellis.shape[0], module.moe_config.experts_per_token
        ids = torch.stack([torch.randperm(experts, device="cuda")[:top] for _row in range(rows)])
        size = size // experts * len(ids.unique())
        weights = torch.rand(rows, top, device="cuda")
        return lambda: method.apply(module, random(rows, width), weights, ids, None, None), size
    groups = module.trellis.shape[:1] if type(method).__name__ == "Exl3GroupedMethod" else ()
    return lambda: method.apply(module, random(rows, *groups, width)), size


def timed(run: Callable[[], Any], times: int) -> float:
    """Milliseconds, the median."""
    taken = []
    for _time in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _event in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def step(layers: list[tuple[str, torch.nn.Module]], rows: int) -> dict[str, Any]:
    """One step of a decode from a graph, or one chunk of a prefill."""
    # The head is asked for the last tokens alone.
    work = [launch(module, min(rows, 64) if name.endswith("lm_head") else rows) for name, module in layers]

    def run() -> None:
        for one, _size in work:
            one()

    run()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    result: dict[str, Any] = {
        "rows": rows,
        "layers": len(work),
        "weights_gib": round(sum(size for _one, size in work) / 2**30, 3),
        "memory_mib": (torch.cuda.max_memory_allocated() - held) >> 20,
    }
    if rows <= max(DECODE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        result["ms"] = round(timed(graph.replay, 20), 3)
        result["gb_per_s"] = round(sum(size for _one, size in work) / result["ms"] / 1e6)
    else:
        result["ms"] = round(timed(run, 3), 1)
        result["tokens_per_s"] = round(1000 * rows / result["ms"])
    return result


def checks(path: Path) -> dict[str, int]:
    """How the tests ended that ran before, from pytest's report."""
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    return {key: sum(count[key] for count in counts) for key in counts[0]}


def _rank(rank: int, count: int, port: int, config: Any, kind: str) -> dict[str, Any] | None:
    with engine.Rank(rank, count, port, config) as one:
        one.config.quant_config = engine.quantized(kind, one.config.quant_config)
        if rank:
            return None  # was needed for the process groups
        torch.cuda.init()
        model = one.build(False, "cuda")
        torch.cuda.synchronize()
        parameters = sum(value.numel() * value.element_size() for value in model.parameters())
        result: dict[str, Any] = {
            "kind": kind,
            "ranks": count,
            "card": torch.cuda.get_device_name(),
            "parameters_gib": round(parameters / 2**30, 2),
            "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        }
        with torch.inference_mode():
            layers = fill(model)
            result["decode"] = [step(layers, rows) for rows in DECODE]
            result["prefill"] = [step(layers, rows) for rows in PREFILL]
        return result


def main() -> None:
    """The command line."""
    import gb10_vllm

    gb10_vllm.register()
    import gb10_vllm.model

    results = []
    with TemporaryDirectory() as folder:
        where = Path(folder)
        models.write_tokenizer(where / "tokenizer")
        (where / "tables").mkdir()
        tables(where / "tables")
        models.write_config(where / "model", TEXT, models.FULL_VISION, models.NATIVE, where / "tokenizer")
        for kind, count in (("all", 2), ("experts", 3)):
            environment = {"GB10_ENGRAM_DIR": str(where / "tables")} | ({"GB10_VIRTUAL_TP": "3"} if count == 3 else {})
            results.append(engine.run(count, _rank, where / "model", kind, **environment)[0])
            print(json.dumps(results[-1]), flush=True)
    folder = Path(sys.argv[1])
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "checks": checks(folder / "overlay.xml"),
        "ranks": results,
    }
    (folder / "overlay.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
