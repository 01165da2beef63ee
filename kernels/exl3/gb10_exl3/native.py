# SPDX-License-Identifier: Apache-2.0
"""The CUDA library behind the ops: python -m gb10_exl3.native [--arch sm_121a ...] [--output FILE] [--report FILE]

It has a C interface and knows nothing of PyTorch, so that it builds wherever nvcc is and serves every PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("csrc")
DEFAULT = Path(__file__).with_name("libgb10_exl3.so")
ARCHITECTURES = ("sm_90a", "sm_121a")  # where it is tested and timed; where it serves
MAX_SHARDS = 8
MAX_PAIRS = 512  # (token, expert) pairs of one launch of the MoE kernels

_PTR, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_long


class Shard(ctypes.Structure):
    """csrc/linear.cu: Shard."""

    _fields_ = [("trellis", _PTR), ("suh", _PTR), ("svh", _PTR), ("k2", _INT), ("codebook", _INT), ("first_strip", _INT), ("strips", _INT)]


class LinearArgs(ctypes.Structure):
    """csrc/linear.cu: LinearArgs."""

    _fields_ = [
        *[(name, _PTR) for name in ("x", "y", "bias")],
        *[(name, _LONG) for name in ("x_stride", "y_stride")],
        *[(name, _INT) for name in ("m", "k", "bf16", "shards")],
        ("shard", Shard * MAX_SHARDS),
    ]


class Experts(ctypes.Structure):
    """csrc/moe.cu: Experts."""

    _fields_ = [("trellis", _PTR), ("suh", _PTR), ("svh", _PTR), ("k2", _INT), ("codebook", _INT)]


class MoeArgs(ctypes.Structure):
    """csrc/moe.cu: MoeArgs."""

    _fields_ = [
        *[(name, _PTR) for name in ("x", "out", "ids", "weights", "expert_map", "activated", "down_rows")],
        *[(name, _LONG) for name in ("x_stride", "out_stride")],
        *[(name, _INT) for name in ("tokens", "top", "experts", "mapped", "hidden", "inter", "bf16", "ids_long")],
        ("limit", ctypes.c_float),
        *[(name, Experts) for name in ("gate", "up", "down")],
    ]


class DenseArgs(ctypes.Structure):
    """csrc/dense.cu: DenseArgs."""

    _fields_ = [
        *[(name, _PTR) for name in ("trellis", "suh", "svh", "out")],
        *[(name, _INT) for name in ("k", "n", "k2", "codebook", "bf16")],
    ]


class EngramArgs(ctypes.Structure):
    """csrc/dense.cu: EngramArgs."""

    _fields_ = [
        *[(name, _PTR) for name in ("weight", "scale", "ids", "out")],
        *[(name, _LONG) for name in ("count", "rows", "offset")],
        ("width", _INT),
    ]


@cache
def library() -> ctypes.CDLL:
    """The built library: $GB10_EXL3_LIBRARY, or the file beside this one."""
    path = Path(os.environ.get("GB10_EXL3_LIBRARY", DEFAULT))
    if not path.is_file():
        raise RuntimeError(f"{path}: no CUDA library; build it with python -m gb10_exl3.native --output {path}")
    loaded = ctypes.CDLL(str(path))
    loaded.exl3_error.restype = ctypes.c_char_p
    for name in ("exl3_linear", "exl3_moe", "exl3_dequant", "engram_gather"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return loaded


def call(name: str, args: ctypes.Structure, stream: int) -> None:
    """Launches on a stream; raises what CUDA says about the launch."""
    code = getattr(library(), name)(ctypes.byref(args), stream)
    if code:
        raise RuntimeError(f"{name}: {library().exl3_error(code).decode()}")


def digest() -> str:
    """SHA-256 over the CUDA sources: what a report or a result was made from."""
    content = b"".join(
        path.name.encode() + b"\0" + path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh")
    )
    return hashlib.sha256(content).hexdigest()


def _kernels(log: str) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes and static shared memory of each kernel, from what ptxas says of one architecture."""
    result = {}
    for mangled, text in re.findall(r"Compiling entry function '(\w+)'.*?\n(.*?registers.*?)\n", log, re.DOTALL):
        name, _separator, rest = re.sub(r"^_ZN4exl3\d+", "", mangled).partition("_kernel")
        rows = re.match(r"ILi(\d+)E", rest)
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill", text)]
        shared = re.search(r"(\d+) bytes smem", text)
        registers = re.search(r"Used (\d+) registers", text)
        assert registers is not None
        result[f"{name}<{rows[1]}>" if rows else name] = {
            "registers": int(registers[1]),
            "spilled_bytes": sum(spills),
            "static_shared_bytes": int(shared[1]) if shared else 0,
        }
    return result


def build(output: Path, architectures: tuple[str, ...] = ARCHITECTURES, nvcc: str = "nvcc") -> dict[str, Any]:
    """Compiles all sources to `output`. Returns the resources of each kernel by architecture."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in sorted(SOURCES.glob("*.cu")):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in architectures]
            command = [nvcc, "-O3", "-std=c++17", *targets, "-Xptxas", "-v", "-Xcompiler", "-fPIC", "-c", str(source), "-o", objects[-1]]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source.name}: nvcc failed\n{done.stderr}")
            for arch in architectures:
                own = "\n".join(part for part in re.split(r"(?=ptxas info\s*: Compiling)", done.stderr) if f"'{arch}'" in part)
                report.setdefault(arch, {}).update(_kernels(own))
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([nvcc, "-shared", *objects, "-o", str(output)], check=True)
    dynamic = ctypes.CDLL(str(output)).exl3_shared_bytes
    for kernels in report.values():
        for name, kernel in kernels.items():
            kernel["dynamic_shared_bytes"] = dynamic(name.encode())
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help=f"target of the build, may be repeated (default: {' '.join(ARCHITECTURES)})")
    parser.add_argument("--output", type=Path, default=DEFAULT)
    parser.add_argument("--report", type=Path, help="write registers, spills and shared memory of every kernel here")
    options = parser.parse_args()
    kernels = build(options.output, tuple(options.arch or ARCHITECTURES))
    if options.report:
        version = (
            subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout.split("release ")[1].split(",")[0]
        )
        content = {"nvcc": version, "sources_sha256": digest(), "kernels": kernels}
        options.report.write_text(json.dumps(content, indent=1) + "\n")
    print(options.output)


if __name__ == "__main__":
    main()
