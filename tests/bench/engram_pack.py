# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast engram_pack packs, against dd on the same disk and the same bytes: python -m tests.bench.engram_pack FOLDER [MIB] [ROUNDS]

Makes a synthetic table of random rows in FOLDER, packs rank 0 of 2, and copies as many bytes with dd, with and without the page cache for what it
writes, in turn; source files are dropped from memory before every run. Prints one JSON line per round, and the medians. Nothing stays in FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ansible/collections"))

from ansible_collections.gb10.cluster.plugins.module_utils import _engram
from ansible_collections.gb10.cluster.plugins.modules import engram_pack


def release(folder: Path, mib: int) -> Path:
    """A shard with one layer's table, of which rank 0 of 2 owns `mib` MiB."""
    primes = _engram._primes(mib * 2**20 // _engram.ROW // 12)
    layout = _engram.Layout(1, tuple(next(primes) for _column in range(24)))
    names = dict(zip(_engram.tensor_names(1), (("F8_E4M3", 256), ("F8_E8M0", 8)), strict=True))
    header, end = {}, 0
    for name, (dtype, width) in names.items():
        begin, end = end, end + layout.rows * width
        header[name] = {"dtype": dtype, "shape": [layout.rows, width], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    block = random.Random(1).randbytes(2**20)
    path = folder / "model-00047-of-00048.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _block in range(end // len(block)):
            file.write(block)
        file.write(block[: end % len(block)])
        os.fsync(file.fileno())
    config = {
        "engram_layer_ids": [1],
        "engram_num_embeddings": [layout.rows],
        "engram_vocab_size": mib * 2**20 // _engram.ROW // 12,
        "engram_n_heads": 8,
        "engram_max_ngram_size": 4,
        "engram_head_dim": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return path


def seconds(work: Callable[[], object], source: Path) -> float:
    """How long, with a source that is not in memory and everything else on the disk."""
    os.sync()
    with source.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.monotonic()
    work()
    return time.monotonic() - started


def main(folder: str, mib: str = "1024", rounds: str = "3") -> None:
    """Measure in turn."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        source = release(place, int(mib))
        [(reader, packed)] = engram_pack.plan(place, 0, 2)
        count = packed.size // 2**20
        copy = ["dd", f"if={source}", f"of={place / 'copy'}", "bs=1M", f"count={count}", "status=none", "conv=fsync"]
        ways: dict[str, Callable[[], object]] = {
            "engram_pack": lambda: engram_pack.write(reader, packed, place, engram_pack.JOBS),
            "dd": lambda: subprocess.run(copy, check=True),
            "dd oflag=direct": lambda: subprocess.run([*copy, "oflag=direct"], check=True),
        }
        results: dict[str, list[float]] = {way: [] for way in ways}
        for _round in range(int(rounds)):
            for way, work in ways.items():
                results[way].append(packed.size / 2**20 / seconds(work, source))
            print(json.dumps({way: round(rates[-1]) for way, rates in results.items()} | {"unit": "MiB/s"}), flush=True)
        medians = {way: statistics.median(rates) for way, rates in results.items()}
        ratio = medians["engram_pack"] / max(rate for way, rate in medians.items() if way != "engram_pack")
        print(json.dumps({"median MiB/s": {way: round(rate) for way, rate in medians.items()}, "pack / faster dd": round(ratio, 2)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
