# SPDX-License-Identifier: Apache-2.0
"""vLLM's Engram with its table on disk.

vLLM's decoder layer names the class Engram itself, so that name is bound anew in its module; nothing else of it changes. The table says that it
is offloaded, which makes vLLM start each lookup at the beginning of a step, on a stream of its own, and wait for it where the rows are used.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.models.deepseek_v41.common.engram import Engram, EngramLayout
from vllm.models.deepseek_v41.nvidia import model as stock

from gb10_vllm.engram import source
from gb10_vllm.engram.rows import Reader
from gb10_vllm.engram.table import RowsOnDisk
from gb10_vllm.errors import OverlayError
from gb10_vllm.levers import ENGRAM_CACHE, ENGRAM_DISK, ENGRAM_THREADS
from gb10_vllm.log import say


def enabled() -> bool:
    """Whether tables are read from disk."""
    return bool(ENGRAM_DISK.value())


class DiskTable(nn.Module):
    """What vLLM's Engram asks of its table. A rank owns whole hash columns, as vLLM's own table splits them."""

    dp_size = 1
    cpu_offload = True

    def __init__(self, layer: int, rows: int, dim: int, buckets: tuple[int, ...], folder: Path, most_tokens: int) -> None:
        super().__init__()
        if dim != source.WIDTH:
            raise OverlayError(f"Engram rows of {dim} columns cannot be read from disk: these tables are of another kind")
        self.tp_size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.dim, self.n_hash_cols = dim, len(buckets)
        self.part_n_hash_cols = -(-self.n_hash_cols // self.tp_size)
        if (self.tp_size - 1) * self.part_n_hash_cols >= self.n_hash_cols:
            raise OverlayError(f"{self.n_hash_cols} hash columns leave ranks without any at {self.tp_size}: choose another number of ranks")
        self.head_start = rank * self.part_n_hash_cols
        first, last = sum(buckets[: self.head_start]), sum(buckets[: self.head_start + self.part_n_hash_cols])
        place = source.find(folder, layer, rank, self.tp_size, first, last, rows)
        cache, threads = ENGRAM_CACHE.amount(), ENGRAM_THREADS.amount()
        reader = Reader(place, threads, cache << 20)
        device = torch.empty(0).device
        self.rows = None if device.type == "meta" else RowsOnDisk(reader, most_tokens * self.part_n_hash_cols, device)
        how = (
            "O_DIRECT"
            if reader.direct
            else "buffered, for the file system has no O_DIRECT: its page cache is of the memory that weights need"
        )
        say(
            f"Engram from disk: layer {layer} rows {first} to {last} from {place.path} ({'packed' if place.packed else 'shard'}, {how}), "
            f"{threads} threads, cache {cache} MiB"
        )

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """out [tokens, own columns, 256] = the rows that indices [tokens, all columns] name."""
        own = indices[:, self.head_start : self.head_start + self.part_n_hash_cols]
        lacking = self.part_n_hash_cols - own.shape[1]
        if lacking:
            own = nn.functional.pad(own, (0, lacking), value=-1)
        self.rows.lookup(own.reshape(-1).long(), out.view(-1, self.dim))


class DiskEngram(Engram):
    """The one method that differs."""

    def _create_embedding(self, layout: EngramLayout, layer_hash_index: int) -> DiskTable:
        config = get_current_vllm_config()
        engram = config.engram_config
        if engram is not None and (engram.use_thp or engram.dp_shared_memory):
            raise OverlayError(f"engram-config keeps the tables in memory and {ENGRAM_DISK.variable} on disk: leave one of the two out")
        return DiskTable(
            layout.layer_ids[layer_hash_index],
            layout.num_embeddings[layer_hash_index],
            layout.head_dim,
            tuple(size for order in layout.primes[layer_hash_index] for size in order),
            Path(ENGRAM_DISK.value()),
            config.scheduler_config.max_num_batched_tokens,
        )


def install() -> None:
    """Binds the name in vLLM's module, or leaves it."""
    stock.Engram = DiskEngram if enabled() else Engram
