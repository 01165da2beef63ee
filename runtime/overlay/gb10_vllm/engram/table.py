# SPDX-License-Identifier: Apache-2.0
"""Rows of a table on disk as a tensor: row numbers leave the GPU, threads read, bytes come back, the GPU turns them into bfloat16.

All of it is work of one stream at fixed addresses, the read included (a host function), so it is the same inside a CUDA graph and out of it.
"""

from __future__ import annotations

import ctypes
from functools import cache

import gb10_exl3.ops  # noqa: F401  (registers torch.ops.gb10_exl3)  # pylint: disable=unused-import
import torch

from gb10_vllm.engram.rows import Reader, Work
from gb10_vllm.engram.source import SCALES, WIDTH
from gb10_vllm.errors import OverlayError


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return driver


class RowsOnDisk:
    """Looks up to `most` rows up at a time. Buffers are allocated here and nowhere else."""

    def __init__(self, reader: Reader, most: int, device: torch.device) -> None:
        self.reader, self.most, self.device = reader, most, device
        cuda = device.type == "cuda"
        host = {"device": "cpu", "pin_memory": cuda}  # a model may be built under torch.device("cuda")
        self._host = (
            torch.empty(most, dtype=torch.int64, **host),
            torch.empty(most, WIDTH, dtype=torch.uint8, **host),
            torch.empty(most, SCALES, dtype=torch.uint8, **host),
        )
        self._places = torch.arange(most, dtype=torch.int64, device=device)
        self._staged = tuple(torch.empty_like(tensor, device=device) for tensor in self._host[1:]) if cuda else self._host[1:]
        self._works: dict[int, Work] = {}

    def _work(self, count: int) -> Work:
        """One for each count, kept: a graph has its address."""
        if count not in self._works:
            self._works[count] = self.reader.work(*(tensor.data_ptr() for tensor in self._host), count)
        return self._works[count]

    def lookup(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [r, 256] bfloat16 = rows ids [r] int64 of the table; zeros for rows of other ranks and for negative numbers."""
        count = ids.shape[0]
        if count > self.most:
            raise OverlayError(
                f"{count} Engram rows are asked for at a time, and there is room for {self.most}: lower max-num-batched-tokens"
            )
        if not count:
            return
        numbers, *host = (tensor[:count] for tensor in self._host)
        weights, scales = (tensor[:count] for tensor in self._staged)
        work = self._work(count)
        if self.device.type == "cuda":
            numbers.copy_(ids, non_blocking=True)
            stream = torch.cuda.current_stream(self.device).cuda_stream
            failure = _driver().cuLaunchHostFunc(stream, self.reader.function(), ctypes.addressof(work))
            if failure:
                raise OverlayError(f"the GPU's driver does not take a host function (cuLaunchHostFunc: {failure}): see its log")
            weights.copy_(host[0], non_blocking=True)
            scales.copy_(host[1], non_blocking=True)
        else:
            numbers.copy_(ids)
            self.reader.read(work)
        # The bytes must be typed: taken as numbers they are positive, thirty times too large, and the model's answers fluent nonsense.
        torch.ops.gb10_exl3.engram_gather_out(
            weights.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), self._places[:count], 0, out
        )
