# SPDX-License-Identifier: Apache-2.0
"""Seconds on the installed GPU: python -m gb10_exl3.selfcheck. One line per check, then a JSON line; status 1 if any fails.

Compares the kernels with the numpy reference: the stored vectors, a linear and a MoE layer for few and for many rows, Engram rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import ops
from .format import CODEBOOKS, Array, Layer, engram_rows, moe

# Rotated inputs and results are rounded to half once each: 2^-11 of a value at most, so 2^-10 together.
HALF_BOUND = 2.0**-10


def vectors() -> dict[str, Any]:
    """The stored test vectors."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text())
    return content


def stored_layer() -> tuple[Layer, Array, Array]:
    """The layer of the vectors, its input and its output."""
    entry = vectors()["layer"]
    halves = {key: np.array(entry[key], np.uint16).view(np.float16) for key in ("suh", "svh", "bias", "x")}
    trellis = np.array(entry["trellis_u16"], np.uint16).view(np.int16).reshape(entry["trellis_u16_shape"])
    layer = Layer(trellis, halves["suh"], halves["svh"], entry["codebook"], halves["bias"])
    return layer, halves["x"].reshape(entry["x_shape"]), np.array(entry["y_f"]).reshape(entry["y_shape"])


def random_layer(rng: np.random.Generator, k: int, n: int, bits: float, codebook: str = "mul1") -> Layer:
    """Any words are a valid trellis. Scales are such that outputs are of the size of the inputs."""
    trellis = rng.integers(-32768, 32768, (k // 16, n // 16, int(16 * bits)), np.int16)
    suh, svh = (rng.choice([-1, 1], size) * rng.uniform(0.5, 1.5, size) for size in (k, n))
    return Layer(trellis, (suh * k**-0.5).astype(np.float16), svh.astype(np.float16), codebook)


def cuda(array: Array) -> torch.Tensor:
    """A copy on the GPU."""
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def error(found: torch.Tensor, wanted: Array) -> float:
    """Norm of the difference over the norm of what is wanted; not-a-number stays one."""
    return float(np.linalg.norm(found.double().cpu().numpy() - wanted) / np.linalg.norm(wanted))


def run_linear(layer: Layer, x: Array) -> torch.Tensor:
    """The op on one layer."""
    bias = None if layer.bias is None else cuda(layer.bias)
    return ops.linear(cuda(x), [cuda(layer.trellis)], [cuda(layer.suh)], [cuda(layer.svh)], [CODEBOOKS[layer.codebook]], bias)


def _stack(layers: list[Layer]) -> list[torch.Tensor]:
    return [cuda(np.stack([getattr(layer, key) for layer in layers])) for key in ("trellis", "suh", "svh")]


def check_decode() -> float:
    """Number of halves that differ, over all stored tiles and codebooks."""
    wrong = 0
    for tile in vectors()["tiles"]:
        trellis = np.tile(np.array(tile["trellis_u16"], np.uint16).view(np.int16), (8, 8, 1))
        for name, decoded in tile["decoded_rowmajor"].items():
            dense = ops.dequant(cuda(trellis), None, None, CODEBOOKS[name], torch.float16).cpu().numpy().view(np.uint16)
            wrong += int((dense != np.tile(np.array(decoded, np.uint16).reshape(16, 16), (8, 8))).sum())
    return wrong


def check_stored_layer() -> float:
    """Error against the stored result."""
    layer, x, y = stored_layer()
    return error(run_linear(layer, x), y)


def linear_error(rows: int, bits: float, k: int = 1280, n: int = 512) -> float:
    """Error of a random layer."""
    rng = np.random.default_rng(rows)
    layer, x = random_layer(rng, k, n, bits), rng.normal(size=(rows, k)).astype(np.float16)
    return error(run_linear(layer, x), layer.linear(x))


def moe_error(tokens: int, experts: int = 8, hidden: int = 256, inter: int = 384) -> float:
    """Error of a random MoE layer, three experts per token."""
    rng = np.random.default_rng(tokens)
    shapes = [(hidden, inter, 3), (hidden, inter, 3), (inter, hidden, 4)]
    layers = [tuple(random_layer(rng, *shape) for shape in shapes) for _expert in range(experts)]
    x, ids = rng.normal(size=(tokens, hidden)).astype(np.float16), np.stack([rng.permutation(experts)[:3] for _token in range(tokens)])
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    stacks = [_stack([layer[i] for layer in layers]) for i in range(3)]
    out = ops.moe(cuda(x), cuda(weights), cuda(ids), *stacks, [CODEBOOKS["mul1"]] * 3, 10.0, None)
    return error(out, moe(x, ids, weights, layers, 10.0))


def check_engram() -> float:
    """Number of values that differ."""
    rng = np.random.default_rng(3)
    weight, scale = rng.integers(0, 127, (50, 256), np.uint8), rng.integers(100, 140, (50, 8), np.uint8)
    ids = rng.integers(0, 50, 20)
    out = ops.engram_gather(cuda(weight).view(torch.float8_e4m3fn), cuda(scale).view(torch.float8_e8m0fnu), cuda(ids + 7), 7)
    return float((out.float().cpu().numpy() != engram_rows(weight[ids], scale[ids])).sum())


# Of many rows the weights are rounded as well, twice; the input of down is itself a result.
CHECKS: dict[str, tuple[Callable[[], float], float]] = {
    "decode": (check_decode, 0),
    "stored layer": (check_stored_layer, HALF_BOUND),
    "linear": (lambda: linear_error(6, 3), HALF_BOUND),
    "linear of many rows": (lambda: linear_error(100, 3), 2 * HALF_BOUND),
    "moe": (lambda: moe_error(5), 2 * HALF_BOUND),
    "moe of many tokens": (lambda: moe_error(120), 2 * HALF_BOUND),
    "engram": (check_engram, 0),
}


def main() -> int:
    """Runs every check, whatever the others say."""
    results = {}
    for name, (check, bound) in CHECKS.items():
        try:
            value = check()
            results[name] = {"passed": value <= bound, "value": value, "bound": bound}
        except RuntimeError as failure:
            results[name] = {"passed": False, "error": str(failure).splitlines()[0]}
        print(f"{'ok    ' if results[name]['passed'] else 'FAILED'} {name}: {results[name]}")
    print(json.dumps({"device": torch.cuda.get_device_name(), "checks": results}))
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
