# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory lines and what gives memory back, on the real kernel."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
from gb10_vllm import levers, log, memory
from gb10_vllm.errors import OverlayError


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said."""
    said: list[str] = []
    monkeypatch.setattr(log._LOGGER, "info", lambda form, *words: said.append(form % words))
    return said


def proven(lever: levers.Lever, said: list[str]) -> bool:
    return any(line.startswith(levers.PREFIX) and re.search(lever.proof, line) for line in said)


def cached(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        size = len(view)
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        anchor = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), pages)
        del anchor
        assert not failed
        return sum(page & 1 for page in pages)


@pytest.mark.parametrize("on", [True, False])
def test_shards_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], on: bool) -> None:
    monkeypatch.setenv(levers.DROP_CACHE.variable, str(int(on)))
    shard, other = tmp_path / "model-1.safetensors", tmp_path / "config.json"
    for path in (shard, other):
        path.write_bytes(bytes(1 << 20))
        with path.open("rb+") as file:
            memory.os.fsync(file.fileno())
            file.read()
    before = cached(shard)
    assert before
    assert memory.drop_page_cache(tmp_path) == int(on)
    assert (cached(shard) == 0) == on
    assert cached(other)
    assert proven(levers.DROP_CACHE, lines) == on


@pytest.mark.parametrize("on", [True, False])
def test_a_phase_says_what_is_free(monkeypatch: pytest.MonkeyPatch, lines: list[str], on: bool) -> None:
    monkeypatch.setenv(levers.MEMORY_LOG.variable, str(int(on)))
    with memory.phase("build"):
        pass
    assert proven(levers.MEMORY_LOG, lines) == on
    assert len(lines) == 2 * on


def test_the_allocator_is_asked_between_chunks_and_below_the_margin(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    free = memory.meminfo()["MemAvailable"]
    for margin, tokens, requests, expected in (
        (0, 8192, 1, False),
        (2 * free, 8192, 1, True),
        (2 * free, 12, 2, False),
        (1, 8192, 1, False),
    ):
        monkeypatch.setenv(levers.PREFILL_RELEASE.variable, str(margin))
        lines.clear()
        release = memory.PrefillRelease()
        assert proven(levers.PREFILL_RELEASE, lines) == (margin > 0)
        assert release.before_step(tokens, requests) == expected


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(levers.PREFILL_RELEASE.variable, "-5")
    with pytest.raises(OverlayError, match="GB10_PREFILL_RELEASE_MIB is '-5': it must be a whole number, 0 or more"):
        memory.PrefillRelease()
