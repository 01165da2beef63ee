# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows read from disk are those of the table, bit for bit: packed, from a shard, with and without a cache, by vLLM's model over ranks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ansible_collections.gb10.cluster.plugins.module_utils import _engram
from gb10_vllm.engram import rows as reading
from gb10_vllm.engram import source
from gb10_vllm.errors import OverlayError

from tests.overlay import checkpoints as made
from tests.overlay import engine, models

LAYOUT = _engram.Layout(1, tuple(models.SMALL_BUCKETS))


def pack(folder: Path, table: np.ndarray[Any, Any], rank: int, count: int) -> Path:
    """A rank's file, from [rows, 264] bytes."""
    packed = _engram.Packed(LAYOUT, rank, count)
    path = folder / packed.name
    path.write_bytes(packed.header() + table[packed.rows.start : packed.rows.stop].tobytes())
    return path


@pytest.fixture
def table() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, 256, (LAYOUT.rows, _engram.ROW), dtype=np.uint8)


def read(reader: reading.Reader, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[n, 264] bytes."""
    ids = np.ascontiguousarray(ids, np.int64)
    weights, scales = np.full((len(ids), 256), 7, np.uint8), np.full((len(ids), 8), 7, np.uint8)
    reader.read(reader.work(ids.ctypes.data, weights.ctypes.data, scales.ctypes.data, len(ids)))
    return np.concatenate([weights, scales], 1)


@pytest.mark.parametrize("cache", [0, 1 << 16, 1 << 24])
@pytest.mark.parametrize("threads", [1, 5])
def test_every_row_and_none_of_others(tmp_path: Path, table: np.ndarray[Any, Any], cache: int, threads: int) -> None:
    path = pack(tmp_path, table, 1, 3)
    own = LAYOUT.rows_of(1, 3)
    place = source.find(tmp_path, 1, 1, 3, own.start, own.stop, LAYOUT.rows)
    reader = reading.Reader(place, threads, cache)
    ids = np.arange(-3, LAYOUT.rows + 3)
    inside = (ids >= own.start) & (ids < own.stop)
    for _time in range(2):
        got = read(reader, ids)
        np.testing.assert_array_equal(got[inside], table[own.start : own.stop])
        assert not got[~inside].any()
    counts = reader.counts
    assert counts["looked_up"] == 2 * len(ids)
    assert counts["reads"] + counts["found"] == 2 * len(own)
    assert (counts["found"] > 0) == (cache > 0)
    assert path.stat().st_size == place.weights + own.stop * _engram.ROW
    reader.close()


def test_a_file_that_ends_early_is_no_row_of_zeros(tmp_path: Path, table: np.ndarray[Any, Any]) -> None:
    path = pack(tmp_path, table, 0, 1)
    place = source.find(tmp_path, 1, 0, 1, 0, LAYOUT.rows, LAYOUT.rows)
    os.truncate(path, path.stat().st_size - _engram.PAGE)
    reader = reading.Reader(place, 2)
    with pytest.raises(OverlayError, match="a row cannot be read"):
        read(reader, np.array([LAYOUT.rows - 1]))
    np.testing.assert_array_equal(read(reader, np.array([3])), table[3:4])
    reader.close()


def test_inside_of_a_graph_such_a_file_ends_the_process(tmp_path: Path, table: np.ndarray[Any, Any]) -> None:
    """What a CUDA graph calls has no way to refuse."""
    path = pack(tmp_path, table, 0, 1)
    os.truncate(path, _engram.PAGE)
    program = f"""
import ctypes
from array import array
from pathlib import Path
from gb10_vllm.engram import rows
from gb10_vllm.engram.source import PAGE, ROW, WIDTH, Rows
reader = rows.Reader(Rows(Path({str(path)!r}), True, 0, 10, PAGE, ROW, PAGE + WIDTH, ROW), 1)
ids, weights, scales = array("q", [4]), array("b", bytes(256)), array("b", bytes(8))
work = reader.work(*(buffer.buffer_info()[0] for buffer in (ids, weights, scales)), 1)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(reader.function())(ctypes.addressof(work))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode < 0 and "an Engram row cannot be read" in done.stderr


def test_without_o_direct_it_says_so(table: np.ndarray[Any, Any]) -> None:
    """/proc has none; a row of it is not asked for."""
    place = source.Rows(Path("/proc/version"), True, 0, 1, 0, _engram.ROW, 256, _engram.ROW)
    reader = reading.Reader(place, 1)
    assert not reader.direct
    reader.close()


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OverlayError, match="cannot be opened"):
        reading.Reader(source.Rows(Path("/nowhere"), True, 0, 1, 0, _engram.ROW, 256, _engram.ROW), 1)


def _lookup(rank: int, count: int, port: int, config: Any, ids: torch.Tensor) -> tuple[Any, list[str], Any]:
    with engine.Rank(rank, count, port, config) as one:
        model = one.build()
        opened = one.load(model) and one.opened
        table = model.language_model.model.layers[1].engram.embed_tokens
        out = torch.full((ids.shape[0], table.part_n_hash_cols, 256), 7, dtype=torch.bfloat16, device=engine.DEVICE)
        table.lookup(ids.to(engine.DEVICE), out)
        out = out.cpu()
        parts = [torch.empty_like(out) for _rank in range(count)]
        torch.distributed.all_gather(parts, out)
        return torch.cat(parts, 1)[:, : table.n_hash_cols].view(torch.int16).numpy(), opened, type(table).__name__


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(("count", "packed"), [(1, False), (2, True), (3, True), (3, False)])
def test_vllms_model_gets_the_tables_rows(checkpoint: Any, tmp_path: Path, count: int, packed: bool) -> None:
    folder, tensors = checkpoint("experts")
    weight, scale = tensors["layers.1.engram.embed.weight"], tensors["layers.1.engram.embed.scale"]
    where = folder
    if packed:
        where = tmp_path
        bytes_of = np.concatenate([engine.raw(weight), engine.raw(scale)], 1)
        for rank in range(count):
            pack(where, bytes_of, rank, count)
    starts = np.cumsum([0, *models.SMALL_BUCKETS[:-1]])
    random = np.random.default_rng(3)
    ids = torch.tensor(starts + random.integers(0, models.SMALL_BUCKETS, (17, 24)), dtype=torch.int32)
    ids[4, 5] = -1  # an image's token
    variables = {"GB10_ENGRAM_DIR": str(where), "GB10_ENGRAM_THREADS": "4", "GB10_VIRTUAL_TP": str(count) if made.GROUPS % count else "0"}
    for got, opened, kind in engine.run(count, _lookup, folder, ids, **variables):
        exponents = torch.from_numpy(engine.raw(scale).astype(np.int32) << 23).view(torch.float32)
        values = weight.float().view(-1, 8, 32) * exponents[:, :, None]
        expected = values.view(-1, 256).to(torch.bfloat16)[ids.long().clamp(0)]
        expected[4, 5] = 0
        np.testing.assert_array_equal(got, expected.view(torch.int16).numpy())
        assert kind == "DiskTable"
        assert opened == ["model-00001-of-00002.safetensors"]  # the table's own shard is never opened by vLLM


def test_the_structures_are_those_of_the_c_source(tmp_path: Path) -> None:
    program = tmp_path / "sizes.c"
    program.write_text(f'#include "{reading.SOURCE}"\nint main(void) {{ printf("%zu %zu", sizeof(struct table), sizeof(struct work)); }}\n')
    subprocess.run(["cc", "-pthread", "-o", str(tmp_path / "sizes"), str(program)], check=True)
    sizes = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout
    assert sizes == f"{ctypes.sizeof(reading._Table)} {ctypes.sizeof(reading.Work)}"
