# SPDX-License-Identifier: Apache-2.0
"""python -m gb10_vllm.selfcheck: seconds, in an image, before it serves. Exit status 0, or 1 with the line that failed.

vLLM is the qualified one; rows read from disk are those of a table, bit for bit, and on a GPU in a CUDA graph as well.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gb10_vllm import qualification
from gb10_vllm.engram import source
from gb10_vllm.engram.rows import Reader
from gb10_vllm.engram.table import RowsOnDisk
from gb10_vllm.errors import OverlayError

ROWS, FIRST, LAST, COUNT = 5000, 1000, 4000, 777


def vllm() -> str:
    """The installed vLLM."""
    version, folder = qualification.installed()
    qualification.check(version, folder, qualification.table())
    return f"vLLM {version} is qualified"


def _expected(table: Tensor, ids: Tensor) -> Tensor:
    """Rows [n, 264] bytes -> [n, 256] bfloat16 by PyTorch's own types; zeros for numbers that are not this rank's."""
    rows = table[ids.clamp(0, ROWS - 1)]
    values = rows[:, : source.WIDTH].contiguous().view(torch.float8_e4m3fn).float()
    powers = (rows[:, source.WIDTH :].int() << 23).view(torch.float32).repeat_interleave(source.WIDTH // source.SCALES, 1)
    inside = (ids >= FIRST) & (ids < LAST)
    return torch.where(inside[:, None], values * powers, 0.0).to(torch.bfloat16)


def rows_of_a_table() -> str:
    """Eager, and on a GPU replayed from a graph with other numbers than it was captured with."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator().manual_seed(1)
    # No bytes that are no numbers, for those are not equal to themselves; scales about 1.
    table = torch.randint(0, 126, (ROWS, source.ROW), generator=random, dtype=torch.uint8)
    table[:, source.WIDTH :] = torch.randint(120, 134, (ROWS, source.SCALES), generator=random, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.packed_name(1, 1, 3)
        header = struct.pack("<6Q", source.MAGIC, 1, FIRST, LAST, ROWS, source.ROW).ljust(source.PAGE, b"\0")
        path.write_bytes(header + table[FIRST:LAST].numpy().tobytes())
        reader = Reader(source.find(Path(folder), 1, 1, 3, FIRST, LAST, ROWS), 8)
        rows = RowsOnDisk(reader, COUNT, device)
        ids, out = (
            torch.empty(COUNT, dtype=torch.int64, device=device),
            torch.empty(COUNT, source.WIDTH, dtype=torch.bfloat16, device=device),
        )

        def look_up() -> None:
            rows.lookup(ids, out)

        def check(run: Callable[[], None], what: str) -> None:
            numbers = torch.randint(-5, ROWS, (COUNT,), generator=random)
            ids.copy_(numbers)
            run()
            if not torch.equal(out.cpu(), _expected(table, numbers)):
                raise OverlayError(f"Engram rows read {what} are not those of the table: do not serve with this image")

        check(look_up, "eagerly")
        how = "O_DIRECT" if reader.direct else "buffered"
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                look_up()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                look_up()
            for _time in range(3):
                check(graph.replay, "in a CUDA graph")
            how += ", in a CUDA graph too"
        reader.close()
    return f"Engram rows from disk are right ({how})"


def main() -> None:
    """The command line."""
    if not torch.cuda.is_available():
        import gb10_vllm.reference  # noqa: F401
    for check in (vllm, rows_of_a_table):
        try:
            print(f"ok      {check()}", flush=True)
        except OverlayError as error:
            print(f"FAILED  {error}", flush=True)
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
