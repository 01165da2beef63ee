# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Engram tables: the split, the rows' numbers, and packed files made from real shards, also by runs that are killed."""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _engram
from ansible_collections.gb10.cluster.plugins.module_utils._engram import EngramError, Layout, Packed
from ansible_collections.gb10.cluster.plugins.modules import engram_pack
from hypothesis import given
from hypothesis import strategies as st

PUBLISHED = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_vocab_size": 16_000_000,
    "engram_n_heads": 8,
    "engram_max_ngram_size": 4,
    "engram_head_dim": 256,
}
"""Of the release's config.json."""


@pytest.fixture(scope="module")
def published() -> list[Layout]:
    return _engram.layouts({"text_config": PUBLISHED})


def test_the_rule_of_the_primes_gives_the_published_tables(published: list[Layout]) -> None:
    assert [(table.layer, table.rows) for table in published] == [(1, 384_006_168), (14, 384_016_682)]
    assert len({size for table in published for size in table.buckets}) == 48


@pytest.mark.parametrize(
    ("ranks", "layer", "stops"),
    [
        (2, 0, [192_001_740, 384_006_168]),
        (3, 0, [128_000_880, 256_002_934, 384_006_168]),
        (3, 1, [128_004_290, 256_009_984, 384_016_682]),
    ],
)
def test_ranks_own_the_published_ranges(published: list[Layout], ranks: int, layer: int, stops: list[int]) -> None:
    rows = [published[layer].rows_of(rank, ranks) for rank in range(ranks)]
    assert [part.stop for part in rows] == stops
    assert [part.start for part in rows] == [0, *stops[:-1]]


@pytest.mark.parametrize(("ranks", "columns"), [(2, 12), (3, 8), (4, 6), (8, 3)])
def test_ranks_own_whole_columns(published: list[Layout], ranks: int, columns: int) -> None:
    for rank in range(ranks):
        own = published[0].buckets[rank * columns : (rank + 1) * columns]
        assert len(published[0].rows_of(rank, ranks)) == sum(own)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=24), st.integers(1, 30))
def test_every_row_has_one_owner_or_the_split_is_refused(buckets: list[int], ranks: int) -> None:
    layout = Layout(0, tuple(buckets))
    try:
        parts = [layout.rows_of(rank, ranks) for rank in range(ranks)]
    except EngramError as error:
        assert "leave ranks without any" in str(error)
        return
    assert [row for part in parts for row in part] == list(range(layout.rows))
    assert all(parts)


def test_a_packed_file_is_the_published_one(published: list[Layout]) -> None:
    packed = Packed(published[0], 0, 2)
    assert (packed.name, packed.size, _engram.STEP) == ("engram-l1-r0of2.bin", 50_688_463_456, 512)
    header = packed.header()
    assert header[:8] == b"DSV1EN41"
    assert struct.unpack("<6Q", header[:48]) == (0x31344E4531565344, 1, 0, 192_001_740, 384_006_168, 264)
    assert (len(header), header[48:].strip(b"\0")) == (4096, b"")
    assert packed.offset(0) == 4096
    assert Packed(published[1], 2, 3).problem(Packed(published[1], 1, 3).header(), packed.size).endswith("(its header differs)")


def test_every_byte_is_the_number_that_numpy_makes_of_its_fields() -> None:
    """Against the definition of e4m3fn in floating point, by another way than the module's."""
    codes = numpy.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = numpy.where(exponent == 0, numpy.ldexp(mantissa / 8, -6), numpy.ldexp(1 + mantissa / 8, exponent - 7))
    values = numpy.where(codes & 0x80, -magnitude, magnitude)
    values[(codes & 0x7F) == 0x7F] = numpy.nan
    row = bytes(range(256)) + bytes([127] * 8)
    numpy.testing.assert_array_equal(numpy.array(_engram.decode(row)), values)
    assert numpy.nanmax(numpy.array(_engram.decode(row))) == 448


@given(st.integers(0, 255), st.lists(st.integers(0, 255), min_size=8, max_size=8))
def test_a_scale_is_an_exponent_of_its_32_columns(code: int, scales: list[int]) -> None:
    values = _engram.decode(bytes([code] * 256 + scales))
    one = _engram.decode(bytes([code] * 256 + [127] * 8))[0]
    factors = [{0: 0.0, 255: float("inf")}.get(scale, 2.0 ** (scale - 127)) for scale in scales]
    numpy.testing.assert_array_equal(values, [one * factor for factor in factors for _column in range(32)])


def test_reading_the_bytes_as_whole_numbers_is_caught() -> None:
    """The published accident: a uint8 view gives positive numbers far too large, and fluent nonsense."""
    row = random.Random(1).randbytes(256).replace(b"\x7f", b"\x10").replace(b"\xff", b"\x90") + bytes(
        [119, 120, 121, 122, 118, 117, 119, 120]
    )
    right = _engram.decode(row)
    assert _engram.misreading(row, right) == ""
    as_uint8 = [byte * 2.0 ** (row[256 + index // 32] - 127) for index, byte in enumerate(row[:256])]
    assert "read as whole numbers" in _engram.misreading(row, as_uint8)
    assert "are not those of the row" in _engram.misreading(row, right[::-1])
    assert min(right) < 0 <= min(as_uint8)


class Release:
    """A small release: two layers of Engram tables in two shards, with other tensors before and after them. Synthetic rows."""

    def __init__(self, directory: Path, write: Callable[..., Path], seed: int = 1) -> None:
        self.directory, self.write = directory, write
        primes = [number for number in range(500, 1000) if all(number % divisor for divisor in range(2, 32))]
        sizes = [sum(primes[:24]), sum(primes[24:48])]
        self.config: dict[str, Any] = {**PUBLISHED, "engram_vocab_size": 500, "engram_num_embeddings": sizes}
        self.layouts = _engram.layouts({"text_config": self.config})
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"text_config": self.config}))
        generator = random.Random(seed)
        self.rows: dict[int, tuple[bytes, bytes]] = {}
        for number, layer in enumerate(self.layouts):
            weight, scale = generator.randbytes(layer.rows * 256), generator.randbytes(layer.rows * 8)
            self.rows[layer.layer] = weight, scale
            names = _engram.tensor_names(layer.layer)
            tensors = {
                "norm": ("BF16", (3,)),
                names[0]: ("F8_E4M3", (layer.rows, 256)),
                names[1]: ("F8_E8M0", (layer.rows, 8)),
                "q": ("U8", (5,)),
            }
            write(directory / f"model-{47 + number:05d}-of-00048.safetensors", tensors, b"normal" + weight + scale + b"query")

    def packed(self, layer: int, rank: int, ranks: int) -> bytes:
        """The file's bytes, put together row by row."""
        layout = next(layout for layout in self.layouts if layout.layer == layer)
        weight, scale = self.rows[layer]
        rows = layout.rows_of(rank, ranks)
        body = b"".join(weight[row * 256 : row * 256 + 256] + scale[row * 8 : row * 8 + 8] for row in rows)
        return Packed(layout, rank, ranks).header() + body


@pytest.fixture
def release(tmp_path: Path, write_tensors: Callable[..., Path]) -> Release:
    return Release(tmp_path / "release", write_tensors)


@pytest.fixture
def pack(release: Release, tmp_path: Path, run_module: Callable[..., Any]) -> Callable[..., Any]:
    def run(**options: Any) -> dict[str, Any]:
        return run_module(
            "engram_pack", **{"source": release.directory, "path": tmp_path / "packed", "rank": 0, "ranks": 2, "jobs": 3, **options}
        )

    return run


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_its_rows(release: Release, pack: Callable[..., Any], tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        result = pack(path=tmp_path / f"packed{rank}", rank=rank, ranks=ranks)
        names = [f"engram-l{layer}-r{rank}of{ranks}.bin" for layer in (1, 14)]
        assert result["packed"] == names
        for layer, name in zip((1, 14), names, strict=True):
            assert (tmp_path / f"packed{rank}" / name).read_bytes() == release.packed(layer, rank, ranks)
        assert not pack(path=tmp_path / f"packed{rank}", rank=rank, ranks=ranks, deep=True)["changed"]


def test_a_reader_past_the_page_cache_finds_every_row(release: Release, pack: Callable[..., Any], tmp_path: Path) -> None:
    """As the engine reads: whole pages at page-aligned places, the last page as far as the file goes."""
    pack(rank=1)
    path = tmp_path / "packed/engram-l14-r1of2.bin"
    expected = release.packed(14, 1, 2)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    pages = mmap.mmap(-1, 8192)
    try:
        for offset in range(4096, len(expected), 264):
            start = offset // 4096 * 4096
            got = os.preadv(descriptor, [pages], start)
            assert got >= min(offset + 264, len(expected)) - start
            assert pages[offset - start : offset - start + 264] == expected[offset : offset + 264]
    finally:
        os.close(descriptor)


def test_a_check_makes_nothing(pack: Callable[..., Any], tmp_path: Path) -> None:
    result = pack(check=True)
    assert (result["changed"], len(result["packed"])) == (True, 2)
    assert "engram-l1-r0of2.bin is missing" in result["diff"]["before"]
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("damage", "deep"),
    [
        (lambda content: content[:-1], False),
        (lambda content: content + b"x", False),
        (lambda content: b"\0" * 8 + content[8:], False),
        (lambda content: content[:4096] + bytes([content[4096] ^ 1]) + content[4097:], False),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), False),
        (lambda content: content[:-300] + bytes([content[-300] ^ 1]) + content[-299:], True),
    ],
)
def test_a_wrong_file_of_the_second_layer_is_noticed_and_made_anew(
    release: Release, pack: Callable[..., Any], tmp_path: Path, damage: Callable[[bytes], bytes], deep: bool
) -> None:
    pack()
    path = tmp_path / "packed/engram-l14-r0of2.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert pack(deep=deep)["packed"] == [path.name]
    assert path.read_bytes() == release.packed(14, 0, 2)
    assert not pack(deep=True)["changed"]


def test_a_newer_release_is_noticed(pack: Callable[..., Any], tmp_path: Path, write_tensors: Callable[..., Path]) -> None:
    pack()
    newer = Release(tmp_path / "release", write_tensors, seed=2)
    assert len(pack()["packed"]) == 2
    assert (tmp_path / "packed/engram-l1-r0of2.bin").read_bytes() == newer.packed(1, 0, 2)


def test_files_of_other_ranks_and_everything_go(pack: Callable[..., Any], tmp_path: Path) -> None:
    pack()
    (tmp_path / "packed/notes.txt").write_text("the owner's")
    assert pack(ranks=3)["removed"] == ["engram-l1-r0of2.bin", "engram-l14-r0of2.bin"]
    assert pack(state="absent")["removed"] == ["engram-l1-r0of3.bin", "engram-l14-r0of3.bin"]
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["notes.txt"]
    assert not pack(state="absent")["changed"]


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.2, 0.3])
def test_a_killed_run_leaves_the_old_file_or_the_new_one(
    release: Release, pack: Callable[..., Any], tmp_path: Path, write_tensors: Callable[..., Path], seconds: float
) -> None:
    """The writer is another process, killed from outside while it replaces old files by new ones; then the next run finishes."""
    pack()
    folder = tmp_path / "packed"
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    newer = Release(tmp_path / "release", write_tensors, seed=2)
    new = {f"engram-l{layer}-r0of2.bin": newer.packed(layer, 0, 2) for layer in (1, 14)}
    ready = "import sys, json; from pathlib import Path\n"
    code = (
        ready
        + "from ansible_collections.gb10.cluster.plugins.modules import engram_pack as module\n"
        + "work = module.plan(Path(sys.argv[1]), 0, 2)\nprint('ready', flush=True)\n"
        + "while True:\n for reader, packed in work:\n  module.write(reader, packed, Path(sys.argv[2]), 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(release.directory), str(folder)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(seconds)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    for name in old:
        assert (folder / name).read_bytes() in (old[name], new[name])
    pack()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")} == new
    pack()


def test_a_disk_that_fills_while_it_is_written_leaves_the_old_files(
    release: Release, pack: Callable[..., Any], tmp_path: Path, write_tensors: Callable[..., Path]
) -> None:
    """The kernel refuses to let a file grow past a limit, in the middle of the writing."""
    pack()
    folder = tmp_path / "packed"
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    newer = Release(tmp_path / "release", write_tensors, seed=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        assert "cannot be packed into" in pack()["msg"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == old
    pack()
    assert (folder / "engram-l14-r0of2.bin").read_bytes() == newer.packed(14, 0, 2)


def test_what_a_killed_run_left_goes_and_counts_as_room(pack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack()
    for name in ("engram-l1-r0of2.bin", "engram-l14-r0of2.bin"):
        (tmp_path / "packed" / name).rename(tmp_path / f"packed/.{name}.new")
    monkeypatch.setattr(engram_pack, "free_bytes", lambda _directory: 2**20)
    assert pack()["removed"] == [".engram-l1-r0of2.bin.new", ".engram-l14-r0of2.bin.new"]
    assert not pack(deep=True)["changed"]


def test_a_filesystem_without_direct_reads_is_refused(release: Release, tmp_path: Path) -> None:
    """There the engine would read the tables another way, and say nothing. A ramfs is such a one."""
    target = tmp_path / "ram"
    target.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from ansible_collections.gb10.cluster.plugins.modules import engram_pack as module\n"
        "reader, packed = module.plan(Path(sys.argv[1]), 0, 2)[0]\n"
        "try:\n module.write(reader, packed, Path(sys.argv[2]), 1)\n"
        "except module.EngramError as error:\n print(error, list(Path(sys.argv[2]).iterdir()))\n"
    )
    script = 'mount -t ramfs none "$3" && exec "$0" -c "$1" "$2" "$3"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, code, str(release.directory), str(target)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    assert "is on a filesystem without direct reads (O_DIRECT): choose a local disk for the packed files []" in done.stdout


def test_two_runs_at_once_are_one_run(pack: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    with engram_pack.alone(tmp_path / "packed"):
        assert "another run packs into" in pack()["msg"]
    assert pack()["changed"]


def test_a_full_disk_is_told_before_a_byte_is_written(pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engram_pack, "free_bytes", lambda _directory: 4096)
    assert "of disk space left and needs" in pack()["msg"]
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engram_num_embeddings": [1, 2]}, "of another kind"),
        ({"engram_vocab_size": "many"}, "does not describe Engram tables"),
        ({"engram_head_dim": 128}, "rows of 128 columns, and the packed format 256"),
        ({"engram_layer_ids": [2, 14]}, "no file holds the tensor layers.2.engram.embed.weight"),
    ],
)
def test_a_config_of_other_tables_is_refused(release: Release, pack: Callable[..., Any], change: dict[str, Any], words: str) -> None:
    (release.directory / "config.json").write_text(json.dumps({"text_config": {**release.config, **change}}))
    assert words in pack()["msg"]


def test_tables_of_another_type_place_or_length_are_refused(
    release: Release, pack: Callable[..., Any], write_tensors: Callable[..., Path]
) -> None:
    layer = release.layouts[0]
    shard = release.directory / "model-00047-of-00048.safetensors"
    weight, scale = _engram.tensor_names(1)
    write_tensors(shard, {weight: ("U8", (layer.rows, 256)), scale: ("F8_E8M0", (layer.rows, 8))})
    assert "is U8 [" in pack()["msg"]
    write_tensors(shard, {weight: ("F8_E4M3", (layer.rows, 256))})
    write_tensors(release.directory / "other.safetensors", {scale: ("U8", (layer.rows, 8))})
    assert "lie in two files" in pack()["msg"]
    os.truncate(shard, 5000)
    assert "model-00047-of-00048.safetensors is short" in pack()["msg"]
    (release.directory / "config.json").unlink()
    assert "no readable config.json" in pack()["msg"]
    assert "there is no rank 2 of 2" in pack(rank=2)["msg"]


@pytest.fixture
def slim(release: Release, tmp_path: Path, run_module: Callable[..., Any]) -> Callable[..., Any]:
    def run(**options: Any) -> dict[str, Any]:
        return run_module("engram_source", **{"source": release.directory, "path": tmp_path / "slim", **options})

    return run


def test_the_slim_directory_takes_no_room_and_holds_what_serves(
    release: Release,
    slim: Callable[..., Any],
    pack: Callable[..., Any],
    run_module: Callable[..., Any],
    tmp_path: Path,
    write_tensors: Callable[..., Path],
) -> None:
    write_tensors(release.directory / "model-00001-of-00048.safetensors", {"embed": ("U8", (9,))})
    assert slim(check=True)["changed"]
    assert not (tmp_path / "slim").exists()
    slim()
    folder = tmp_path / "slim"
    shards = ["model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", *shards, "model.safetensors.index.json"]
    assert all((folder / name).samefile(release.directory / name) for name in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: shards[number] for number, layer in enumerate((1, 14)) for name in _engram.tensor_names(layer)}
    assert not slim()["changed"]
    assert run_module("checkpoint_verify", check=True, path=folder)["ok"]
    assert pack(source=folder)["changed"]


def test_a_shard_that_was_fetched_again_is_linked_again(
    release: Release, slim: Callable[..., Any], tmp_path: Path, write_tensors: Callable[..., Path]
) -> None:
    slim()
    for path in release.directory.glob("*.safetensors"):
        path.unlink()
    Release(release.directory, write_tensors, seed=2)
    assert len(slim()["files"]) == 2
    assert not slim()["changed"]
    assert slim(state="absent")["changed"]
    assert not (tmp_path / "slim").exists()
    assert len(list(release.directory.glob("*.safetensors"))) == 2
    assert not slim(state="absent")["changed"]


def test_another_filesystem_is_no_copy(slim: Callable[..., Any]) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == Path("/tmp").stat().st_dev:
        pytest.skip("needs a second filesystem")
    folder = shm / f"gb10-test-{os.getpid()}"
    try:
        assert "a copy would take" in slim(path=folder)["msg"]
        assert not list(folder.iterdir())
    finally:
        folder.rmdir()


def test_the_tables_do_not_replace_their_own_source(release: Release, slim: Callable[..., Any]) -> None:
    assert "would lose its own index" in slim(path=release.directory)["msg"]
