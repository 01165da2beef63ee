# SPDX-License-Identifier: Apache-2.0
"""Dense matrix -> EXL3 layer on the CPU, with or without the Hessian of its inputs. For tests and small models.

Without: rotate, scale to the codebook's rms, search each ring. With: rows of tiles are coded from the last to the first,
each seeing the weighted error of those coded before it, and the two scale vectors are fitted again at the end.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from .format import RING, Array, Layer, codebook, from_rings, hadamard, pack, rotate, to_rings, widths

# Input rms with the least error for N(0, 1) weights, by codebook and bits (searched on 65,536 weights).
BEST_RMS = {
    "mul1": {1: 1.118, 1.5: 1.025, 2: 0.975, 2.5: 0.975, 3: 0.925, 3.5: 0.904, 4: 0.880, 5: 0.825, 6: 0.784, 7: 0.725, 8: 0.725},
    "mcg": {1: 1.399, 2: 1.243, 3: 1.150, 4: 1.109, 5: 1.015, 6: 0.964, 7: 0.885, 8: 0.853},
    "3inst": {1: 1.399, 2: 1.238, 3: 1.150, 4: 1.094, 5: 1.026, 6: 0.964, 7: 0.887, 8: 0.858},
}
DAMPING = 0.025  # of the mean diagonal of a Hessian, added to it


@cache
def _search() -> ctypes.CDLL:
    """The search in C, compiled where it runs: it is the only hot loop, and a hundred times slower in numpy."""
    source = Path(__file__).with_name("search.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "search.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, "-o", library, source, "-lm"], check=True)
        return ctypes.CDLL(str(library))


def search(rings: Array, bits: float, name: str) -> Array:
    """[..., 256] targets -> uint16 states of a closed path for each ring, close to the least squared error."""
    table = np.ascontiguousarray(codebook(name), np.float32)
    targets, steps = np.ascontiguousarray(rings, np.float32), widths(bits).astype(np.int32)
    states = np.empty(targets.shape, np.uint16)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (table, targets)]
    _search().viterbi(
        *pointers, ctypes.c_long(targets.size // RING), ctypes.c_void_p(steps.ctypes.data), ctypes.c_void_p(states.ctypes.data)
    )
    return states


def _prepare(weights: Array, bits: float, name: str, seed: int) -> tuple[Array, Array, Array]:
    """Rotated weights of the codebook's best rms, suh, svh (float64). Columns of zeros get svh 0."""
    rng = np.random.default_rng(seed)
    w = weights.astype(np.float64)
    k, n = w.shape
    rms = np.sqrt((w**2).mean(0))
    scale = rms / max(rms.mean(), 1e-30)
    svh = rng.choice([-1.0, 1.0], n) * scale
    w = rotate(w / np.where(scale < 1e-30, 1.0, svh))
    rms = np.sqrt((w**2).mean(1))
    suh = rng.choice([-1.0, 1.0], k) * np.where(rms < 1e-30, 0.1, rms) / BEST_RMS[name][bits]
    return rotate(np.ascontiguousarray((w / suh[:, None]).T)).T, suh, np.where(scale < 1e-30, 0.0, svh)


def _layer(states: Array, suh: Array, svh: Array, bits: float, name: str) -> Layer:
    return Layer(pack(states, bits), suh.astype(np.float16), svh.astype(np.float16), name)


def quantize(weights: Array, bits: float, name: str = "mul1", seed: int = 0) -> Layer:
    """Layer of a dense [k, n] matrix, k and n multiples of 128."""
    rotated, suh, svh = _prepare(weights, bits, name, seed)
    return _layer(search(to_rings(rotated), bits, name), suh, svh, bits, name)


def _feedback(hessian: Array) -> Array:
    """Unit lower triangular factor by blocks of 16, less its diagonal: how the error of a row weighs on those before it."""
    factor = np.linalg.cholesky(hessian)
    result = np.zeros_like(factor)
    for j in range(0, len(factor), 16):
        result[j + 16 :, j : j + 16] = factor[j + 16 :, j : j + 16] @ np.linalg.inv(factor[j : j + 16, j : j + 16])
    return result


def quantize_hessian(weights: Array, hessian: Array, bits: float, name: str = "mul1", seed: int = 0, refits: int = 2) -> Layer:
    """The same with error feedback; hessian = mean of x x^T [k, k] over inputs of this layer."""
    w, suh, svh = _prepare(weights, bits, name, seed)
    k, n = w.shape
    damped = hessian + DAMPING * np.trace(hessian) / k * np.eye(k)
    scaled = damped * suh[:, None] * suh
    turn = np.kron(np.eye(k // len(hadamard())), hadamard())
    factor = _feedback(turn @ scaled @ turn)
    coded, states = np.zeros((k, n)), np.empty((k // 16, n // 16, RING), np.uint16)
    for row in range(k - 16, -1, -16):
        target = w[row : row + 16] + factor[row + 16 :, row : row + 16].T @ (w[row + 16 :] - coded[row + 16 :])
        found = search(to_rings(target), bits, name)
        states[row // 16], coded[row : row + 16] = found[0], from_rings(codebook(name)[found])
    q, dense = _layer(states, suh, svh, bits, name).dense(), weights.astype(np.float64)
    wanted = damped @ dense
    for _round in range(refits):
        power = (q * (damped @ q)).sum(0)
        column = np.divide((q * wanted).sum(0), power, out=np.ones(n), where=power > 1e-30)
        q, svh = q * column, svh * column
        system = (q @ q.T) * damped
        row_factor = np.linalg.solve(system + 1e-6 * np.trace(system) / k * np.eye(k), (q * wanted).sum(1))
        row_factor = np.where(np.isfinite(row_factor) & (row_factor > 0), row_factor, 1.0)
        q, suh = q * row_factor[:, None], suh * row_factor
    return _layer(states, suh, svh, bits, name)
