# SPDX-License-Identifier: Apache-2.0
"""The CUDA library behind the ops: python -m gb10_exl3.native [--arch sm_121a ...] [--output FILE] [--report FILE | --check FILE]

It has a C interface and knows nothing of PyTorch, so that it builds wherever nvcc is and serves every PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from .format import RATES

SOURCES = Path(__file__).with_name("csrc")
DEFAULT = Path(__file__).with_name("libgb10_exl3.so")
ARCHITECTURES = ("sm_90a", "sm_121a")  # where it is tested and timed; where it serves
MAX_SHARDS = 8
MAX_PAIRS = 8192  # (token, expert) pairs of one launch of the MoE kernels: more go in pieces, for the workspace's sake
MAX_EXPERTS = 2048  # csrc/moe.cu: kMaxExperts

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
        *[(name, _PTR) for name in ("x", "out", "ids", "weights", "expert_map", "activated", "down_rows", "routes")],
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


# The inner loop alone: a tile decoded and multiplied by eight rows, so often that the rest of the kernel does not count.
_PROBE = """
#include "strip.cuh"
namespace exl3 {
template <int K2, int Tiles> __global__ void probe(float* out) {
    extern __shared__ uint32_t shared[];
    float acc[4] = {};
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        uint32_t a[4];
        fragment<K2, kMul1>(shared + 64 + t * Rate<K2>::words, threadIdx.x & 31, a);
        mma(acc, a, reinterpret_cast<const uint2*>(shared)[threadIdx.x + 16 * t]);
    }
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = acc[i];
}
}
"""
_PROBE_TILES = (16, 48)


def instructions_per_tile(arch: str, nvcc: str = "nvcc") -> dict[str, float]:
    """Machine instructions of a warp for a tile of 16 x 16 weights and eight rows, codebook mul1, by bits per weight."""
    rates = [int(2 * rate) for rate in RATES]
    source = _PROBE + "".join(f"template __global__ void exl3::probe<{k2}, {tiles}>(float*);\n" for k2 in rates for tiles in _PROBE_TILES)
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder) / "probe.cu", Path(folder) / "probe.cubin"
        file.write_text(source)
        target = f"-gencode=arch=compute_{arch[3:]},code={arch}"
        subprocess.run([nvcc, "-O3", "-std=c++17", target, f"-I{SOURCES}", "-cubin", str(file), "-o", str(cubin)], check=True)
        sizes = {}
        for name, size in _code_sizes(cubin.read_bytes()).items():
            if found := re.search(r"probeILi(\d+)ELi(\d+)E", name):
                sizes[int(found[1]), int(found[2])] = size / 16  # bytes of an instruction
    few, many = _PROBE_TILES
    return {f"{k2 / 2:g}": round((sizes[k2, many] - sizes[k2, few]) / (many - few), 1) for k2 in rates}


def _code_sizes(elf: bytes) -> dict[str, int]:
    """Sizes of the .text sections of a 64-bit ELF file, by name."""
    (table,), (width, count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * width) for i in range(count)]
    strings = headers[names][4]
    sections = {elf[strings + header[0] : elf.index(b"\0", strings + header[0])].decode(): header[5] for header in headers}
    return {name.removeprefix(".text."): size for name, size in sections.items() if name.startswith(".text.")}


def build(output: Path, architectures: tuple[str, ...] = ARCHITECTURES, nvcc: str = "nvcc") -> dict[str, Any]:
    """Compiles all sources to `output`. Returns the resources of each kernel by architecture."""
    report: dict[str, Any] = {arch: {} for arch in architectures}
    targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in architectures]

    def compiled(source: Path, target: Path) -> str:
        # Files and targets are compiled beside each other, but not the kernels of a file (--split-compile): registers and spills
        # would depend on the machine that builds.
        command = [nvcc, "-O3", "-std=c++17", "--threads=0", *targets, "-Xptxas", "-v", "-Xcompiler", "-fPIC"]
        done = subprocess.run([*command, "-c", str(source), "-o", str(target)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name}: nvcc failed\n{done.stderr}")
        return done.stderr

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        sources = sorted(SOURCES.glob("*.cu"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        for log in pool.map(compiled, sources, objects):
            for arch in architectures:
                own = "\n".join(part for part in re.split(r"(?=ptxas info\s*: Compiling)", log) if f"'{arch}'" in part)
                report[arch].update(_kernels(own))
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([nvcc, "-shared", *map(str, objects), "-o", str(output)], check=True)
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
    parser.add_argument("--report", type=Path, help="write what the kernels take of each target here")
    parser.add_argument("--check", type=Path, help="build, and say whether such a report is of these sources and this compiler")
    options = parser.parse_args()
    architectures = tuple(options.arch or ARCHITECTURES)
    kernels = build(options.output, architectures)
    if options.report or options.check:
        done = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
        content = {
            "nvcc": done.stdout.split("release ")[1].split(", V")[1].split()[0],
            "sources_sha256": digest(),
            "instructions_per_tile": {arch: instructions_per_tile(arch) for arch in architectures},
            "kernels": kernels,
        }
        if options.report:
            options.report.write_text(json.dumps(content, indent=1) + "\n")
        if options.check and json.loads(options.check.read_text()) != content:
            raise SystemExit(f"{options.check}: not what this compiler makes of these sources; write it anew with --report")
    print(options.output)


if __name__ == "__main__":
    main()
