# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank says which levers are on, by the lines that gb10_vllm.levers promises, and says nothing of the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _levers
from gb10_vllm import levers

from tests.overlay import engine

pytestmark = pytest.mark.usefixtures("plugin")
# The model state, which is made with the first requests, says this one: see test_memory.
LATER = {levers.PREFILL_RELEASE.name}


def _said(rank: int, count: int, port: int, config: Any) -> list[str]:
    from gb10_vllm import log

    lines: list[str] = []
    log._LOGGER.info = lambda form, *words: lines.append(form % words)
    with engine.Rank(rank, count, port, config) as one:
        one.load(one.build())
    return lines


def proven(lines: list[str]) -> set[str]:
    return {lever.name for lever in levers.LEVERS for line in lines if line.startswith(levers.PREFIX) and re.search(lever.proof, line)}


def awaited(**variables: str) -> set[str]:
    """What a plan waits for."""
    data = json.loads((Path(__file__).resolve().parents[2] / _levers.LEVERS).read_text())
    return set(_levers.proofs({"VLLM_PLUGINS": "gb10_vllm", **variables}, data))


def test_all_on(checkpoint: Any) -> None:
    folder, _tensors = checkpoint("native")
    on = {
        "GB10_VIRTUAL_TP": "3", "GB10_ENGRAM_DIR": str(folder), "GB10_ENGRAM_THREADS": "3", "GB10_ENGRAM_CACHE_MIB": "1",
        "GB10_MEMORY_LOG": "1", "GB10_DROP_PAGE_CACHE": "1", "GB10_INDEXER_FACTOR": "1", "GB10_INDEXER_SPLIT": "64",
    }  # fmt: skip
    everything = {lever.name for lever in levers.LEVERS} - LATER
    for lines in engine.run(3, _said, folder, **on):
        assert proven(lines) == everything == awaited(**on) - LATER


def test_all_off(checkpoint: Any) -> None:
    folder, _tensors = checkpoint("native")
    off = {"GB10_MEMORY_LOG": "0", "GB10_DROP_PAGE_CACHE": "0"}
    (lines,) = engine.run(1, _said, folder, **off)
    assert proven(lines) == set() == awaited(**off) and lines == []


def test_nothing_said(checkpoint: Any) -> None:
    folder, _tensors = checkpoint("native")
    (lines,) = engine.run(1, _said, folder)
    assert proven(lines) == awaited() == {levers.MEMORY_LOG.name, levers.DROP_CACHE.name}


def _buffers(rank: int, count: int, port: int, config: Any) -> tuple[int, list[tuple[int, int]]]:
    from vllm.models.deepseek_v41.attention import DeepseekV4Indexer
    from vllm.v1.attention.backends.mla import indexer

    with engine.Rank(rank, count, port, config) as one:
        layers = [layer for layer in one.build().modules() if isinstance(layer, DeepseekV4Indexer)]
        return indexer.get_max_prefill_buffer_size(config), [(layer.compress_ratio, layer.max_total_seq_len) for layer in layers]


def test_the_indexers_layer_and_the_splitting_of_steps_agree_on_a_smaller_buffer(checkpoint: Any) -> None:
    folder, _tensors = checkpoint("native")
    sizes = {}
    for factor in ("0", "1", "3"):
        ((sizes[factor], layers),) = engine.run(1, _buffers, folder, GB10_INDEXER_FACTOR=factor)
        assert layers and all(total == sizes[factor] // ratio for ratio, total in layers)
    assert sizes["3"] == 3 * sizes["1"] and sizes["0"] == 40 * sizes["1"]
