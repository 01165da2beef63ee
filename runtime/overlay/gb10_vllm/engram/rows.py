# SPDX-License-Identifier: Apache-2.0
"""The readers of rows.c. `python -m gb10_vllm.engram.rows build` compiles them beside the source, as an image wants it.

`python -m gb10_vllm.engram.rows bench FILE [--seconds S] [--threads N]` times reads of rows at random places of a packed file.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import tempfile
import time
from array import array
from functools import cache
from pathlib import Path

from gb10_vllm.engram.source import PAGE, ROW, SCALES, WIDTH, Rows
from gb10_vllm.errors import OverlayError

SOURCE = Path(__file__).with_name("rows.c")
LIBRARY = Path(__file__).with_name("librows.so")
_LONG, _PTR = ctypes.c_int64, ctypes.c_void_p


class _Table(ctypes.Structure):
    """rows.c: struct table."""

    _fields_ = [
        ("fd", ctypes.c_int32), ("direct", ctypes.c_int32), ("first", _LONG), ("last", _LONG), ("weights", _LONG), ("weight_stride", _LONG),
        ("scales", _LONG), ("scale_stride", _LONG), ("slots", _LONG), ("keys", _PTR), ("kept", _PTR), ("stripes", _PTR),
        ("looked_up", _LONG), ("found", _LONG), ("reads", _LONG),
    ]  # fmt: skip


class Work(ctypes.Structure):
    """rows.c: struct work. Addresses are of host memory that stays where it is."""

    _fields_ = [("table", ctypes.POINTER(_Table)), ("ids", _PTR), ("weights", _PTR), ("scales", _PTR), ("count", _LONG)]


def build(output: Path) -> None:
    """Raises OverlayError where there is no compiler."""
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-pthread", "-o", str(output), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or error
        raise OverlayError(f"{SOURCE.name} cannot be compiled ({detail}): install a C compiler, or build it with the image") from None


@cache
def _library() -> ctypes.CDLL:
    if LIBRARY.exists():
        library = ctypes.CDLL(str(LIBRARY))
    else:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder) / LIBRARY.name)
            library = ctypes.CDLL(str(Path(folder) / LIBRARY.name))
    library.gb10_open.argtypes = [ctypes.POINTER(_Table), ctypes.c_char_p]
    library.gb10_close.argtypes = [ctypes.POINTER(_Table)]
    library.gb10_read.argtypes = [ctypes.POINTER(Work)]
    return library


class Reader:
    """A table's rows through the shared threads. `direct`: whether the page cache is passed by."""

    def __init__(self, rows: Rows, threads: int, cache_bytes: int = 0) -> None:
        self.rows = rows
        self._table = _Table(
            first=rows.first, last=rows.last, weights=rows.weights, weight_stride=rows.weight_stride, scales=rows.scales,
            scale_stride=rows.scale_stride, slots=cache_bytes // (ROW + 8),
        )  # fmt: skip
        failure = _library().gb10_open(ctypes.byref(self._table), os.fsencode(rows.path)) or _library().gb10_threads(max(1, threads))
        if failure:
            raise OverlayError(f"{rows.path} cannot be opened for reading rows ({os.strerror(failure)}): see the file and the disk")
        self.direct = bool(self._table.direct)

    def work(self, ids: int, weights: int, scales: int, count: int) -> Work:
        """A read from addresses of `count` row numbers (int64) to those of their weights and scales; rows of other ranks become zeros."""
        return Work(ctypes.pointer(self._table), ids, weights, scales, count)

    def read(self, work: Work) -> None:
        """Does it. Raises OverlayError for a row that cannot be read."""
        failure = _library().gb10_read(ctypes.byref(work))
        if failure:
            raise OverlayError(f"{self.rows.path}: a row cannot be read ({os.strerror(failure)}): see the file and the disk")

    @staticmethod
    def function() -> int:
        """Address of the C function that does a work and ends the process where it cannot: for cudaLaunchHostFunc."""
        return ctypes.cast(_library().gb10_read_or_abort, ctypes.c_void_p).value or 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows looked up, found in the cache, and reads of the file."""
        return {name: getattr(self._table, name) for name in ("looked_up", "found", "reads")}

    def close(self) -> None:
        """Closes the file; no work may be left."""
        _library().gb10_close(ctypes.byref(self._table))


def bench(path: Path, seconds: float, threads: int, batch: int = 65536) -> dict[str, float]:
    """Reads per second of rows at random places of a file of rows that begin at its second page."""
    last = (path.stat().st_size - PAGE) // ROW
    reader = Reader(Rows(path, True, 0, last, PAGE, ROW, PAGE + WIDTH, ROW), threads)
    ids = array("q", bytes(8 * batch))
    weights, scales = array("b", bytes(WIDTH * batch)), array("b", bytes(SCALES * batch))
    work = reader.work(*(buffer.buffer_info()[0] for buffer in (ids, weights, scales)), batch)
    passed, done = 0.0, 0
    while passed < seconds:
        for index in range(batch):
            ids[index] = random.randrange(last)
        begin = time.monotonic()
        reader.read(work)
        passed += time.monotonic() - begin
        done += batch
    reader.close()
    return {"rows_per_s": done / passed, "direct": reader.direct, "threads": threads}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "bench"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--threads", type=int, default=32)
    options = parser.parse_args()
    if options.action == "build":
        build(LIBRARY)
    elif options.file is None:
        parser.error("bench takes FILE")
    else:
        print(bench(options.file, options.seconds, options.threads))


if __name__ == "__main__":
    main()
