#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's Engram rows as files of its own."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_pack
short_description: Keep a rank's rows of the Engram tables in files on a local disk
version_added: 0.1.0
description:
  - Reads the native tables of DeepSeek V4.1 (C(layers.N.engram.embed.weight) and C(.scale)) and writes, for every layer, the rows of one rank to
    one file, weight and scale together, so that a lookup is one direct read of the local disk.
  - A file is written beside its place and renamed when it is whole and on the disk. Whatever ends the run leaves the old file or the new one.
  - Files that are there are held against what they should be, header and size of every layer and some rows of each, so that running it again
    before a start is the check that nothing serves from a wrong file. Files of other ranks or sizes are removed last.
  - Two layers at two ranks are 94 GiB on each member. Nothing is written when the disk has no room for them.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  source:
    description:
      - A directory with the release's config.json and the safetensors files that hold the tables, see M(gb10.cluster.engram_source).
      - Needed for O(state=present).
    type: path
  path:
    description: The directory of the packed files, on a local disk that can be read directly (O_DIRECT). It is made where it does not exist.
    type: path
    required: true
  rank:
    description: The rank, from 0. Needed for O(state=present).
    type: int
  ranks:
    description: The tensor-parallel size. Needed for O(state=present).
    type: int
  deep:
    description: Compare every row of a file that is there, instead of some.
    type: bool
    default: false
  jobs:
    description: Threads.
    type: int
    default: 4
  state:
    description: V(absent) removes all packed files of the directory.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gb10.cluster.engram_source
"""

EXAMPLES = r"""
- name: Pack the rows of this member's rank
  gb10.cluster.engram_pack:
    source: /var/lib/gb10/models/deepseek-v4.1-flash-engram
    path: /var/lib/gb10/engram
    rank: 0
    ranks: 2
"""

RETURN = r"""
packed:
  description: Names of the files that were written, or would be in check mode.
  returned: success
  type: list
  elements: str
removed:
  description: Names of the files that were removed, or would be in check mode.
  returned: success
  type: list
  elements: str
files:
  description: Every file as it should be, for a check before a start.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: Its path.
      type: str
    size:
      description: Its size in bytes.
      type: int
    header:
      description: Its first 48 bytes in hexadecimal; the rest of the first page is zero.
      type: str
bytes:
  description: Bytes written.
  returned: success
  type: int
seconds:
  description: How long the writing took.
  returned: success
  type: float
"""

import errno
import fcntl
import json
import mmap
import os
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _engram, _host
from ..module_utils._engram import PAGE, ROW, SCALES, STEP, WIDTH, EngramError, Packed, Table
from ..module_utils._survey import free_bytes, tensor_headers

JOBS = 4
"""Threads by default, also on fewer processors: they wait for the disk most of the time, and more do not make it faster."""
ROWS = 16 * STEP
"""Rows that are read and written at a time: whole pages, 2 MiB, which stay in a processor's cache."""
VECTOR = 1024
"""Pieces per vectored read, the kernel's limit (IOV_MAX)."""
BEHIND = 64 * 2**20
"""How much of the source may stay in memory behind the reading; pages are the memory that the GPU needs."""
SAMPLES = 256
"""Rows of a file that are compared without `deep`."""
CUT = (".", ".new")
"""What the name of a file that is not whole yet begins and ends with."""


class Buffer:
    """Memory for some rows, page-aligned as O_DIRECT wants it, and the places in it of every row's weights and of all scales."""

    def __init__(self, count: int) -> None:
        self.rows = memoryview(mmap.mmap(-1, count * ROW))
        self.weights = [self.rows[start : start + WIDTH] for start in range(0, count * ROW, ROW)]
        self.scales = memoryview(bytearray(count * SCALES))
        self._words, self._scale_words = self.rows.cast("Q"), self.scales.cast("Q")

    def put_scales(self, count: int) -> None:
        """Bring the scales of that many rows, 8 bytes each, behind their weights."""
        step = ROW // SCALES
        self._words[step - 1 : step * count : step] = self._scale_words[:count]


class Reader:
    """A rank's rows of a table, in the packed form, range by range.

    A vectored read puts the weights of every row where they belong: the kernel interleaves them, outside of Python and its lock.
    """

    def __init__(self, source: Path, table: Table) -> None:
        self.table, self.name = table, str(source / table.file)
        self.descriptor = os.open(self.name, os.O_RDONLY)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def fill(self, buffer: Buffer, rows: range) -> None:
        """Read rows into a buffer."""
        begin = self.table.weight.begin + rows.start * WIDTH
        for first in range(0, len(rows), VECTOR):
            self._read(buffer.weights[first : min(first + VECTOR, len(rows))], begin + first * WIDTH)
        self._read([buffer.scales[: len(rows) * SCALES]], self.table.scale.begin + rows.start * SCALES)
        buffer.put_scales(len(rows))
        # Far enough behind that no thread still reads there, and in long steps: a call per read would cost more than it frees.
        if begin // BEHIND != (begin + len(rows) * WIDTH) // BEHIND:
            os.posix_fadvise(self.descriptor, max(0, begin - 2 * BEHIND), BEHIND, os.POSIX_FADV_DONTNEED)

    def row(self, row: int) -> bytes:
        """One packed row."""
        weight, scale = self.table.weight, self.table.scale
        return os.pread(self.descriptor, WIDTH, weight.begin + row * WIDTH) + os.pread(self.descriptor, SCALES, scale.begin + row * SCALES)

    def _read(self, pieces: list[memoryview], begin: int) -> None:
        size = sum(map(len, pieces))
        if os.preadv(self.descriptor, pieces, begin) != size:
            raise EngramError(f"{self.name} ends before byte {begin + size}: run checkpoint_verify and fetch it again")


def in_ranges(reader: Reader, packed: Packed, jobs: int, use: Callable[[int, memoryview], None]) -> None:
    """Call `use(offset in the packed file, rows)` for all rows, from several threads."""
    buffers: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
    for _job in range(jobs):
        buffers.put(Buffer(ROWS))

    def one(start: int) -> None:
        buffer = buffers.get()
        try:
            rows = range(start, min(start + ROWS, packed.rows.stop))
            reader.fill(buffer, rows)
            use(packed.offset(start), buffer.rows[: len(rows) * ROW])
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(one, start) for start in packed.rows[::ROWS]]
        try:
            for done in work:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write(reader: Reader, packed: Packed, directory: Path, jobs: int) -> None:
    """Make the file of one layer."""
    temporary = directory / f"{CUT[0]}{packed.name}{CUT[1]}"
    descriptor = open_direct(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def put(offset: int, rows: memoryview) -> None:
        if len(rows) % PAGE:  # the last range: whole pages are written, and the file is cut to its size afterwards
            last = memoryview(mmap.mmap(-1, _ceil(len(rows))))
            last[: len(rows)] = rows
            rows = last
        if os.pwrite(descriptor, rows, offset) != len(rows):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        in_ranges(reader, packed, jobs, put)
        page = mmap.mmap(-1, PAGE)
        page[:] = packed.header()
        os.pwrite(descriptor, page, 0)
        os.ftruncate(descriptor, packed.size)
        os.fsync(descriptor)
        os.replace(temporary, directory / packed.name)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def open_direct(path: Path, flags: int) -> int:
    """Open for reads and writes that go past the page cache. Raises EngramError where the filesystem has none, for no rank could read there."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        raise EngramError(
            f"{path.parent} is on a filesystem without direct reads (O_DIRECT): choose a local disk for the packed files"
        ) from None


def problem(reader: Reader, packed: Packed, directory: Path, deep: bool, jobs: int) -> str:
    """Why the file of one layer must be written, as a sentence's end; empty when it is right."""
    path = directory / packed.name
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    different: list[int] = []

    def compare(offset: int, rows: memoryview) -> None:
        if os.pread(descriptor, len(rows), offset) != rows:
            different.append(offset)
        os.posix_fadvise(descriptor, offset, len(rows), os.POSIX_FADV_DONTNEED)

    try:
        wrong = packed.problem(os.pread(descriptor, PAGE, 0), os.fstat(descriptor).st_size)
        if wrong:
            return wrong
        if deep:
            in_ranges(reader, packed, jobs, compare)
        else:
            for row in packed.samples(SAMPLES):
                compare(packed.offset(row), memoryview(reader.row(row)))
    finally:
        os.close(descriptor)
    return f"has other rows than the table (from byte {min(different)})" if different else ""


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold the directory; a second run is refused."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EngramError(f"another run packs into {directory}: wait for it to end") from None
    finally:
        os.close(descriptor)


def _ceil(size: int) -> int:
    return -(-size // PAGE) * PAGE


def plan(source: Path, rank: int, ranks: int) -> list[tuple[Reader, Packed]]:
    """Every layer's table and this rank's file of it. Raises EngramError."""
    if not 0 <= rank < ranks:
        raise EngramError(f"there is no rank {rank} of {ranks}: ranks count from 0")
    try:
        config = json.loads(_host.read(source / "config.json") or "")
    except ValueError:
        raise EngramError(f"{source} has no readable config.json, which says how the tables are laid out: fetch the release's") from None
    headers, broken = tensor_headers(source, [path.name for path in source.glob("*.safetensors")])
    if broken:
        raise EngramError(_checkpoint.verdict(str(source), broken))
    tables = _engram.tables(headers, _engram.layouts(config))
    return [(Reader(source, table), Packed(table.layout, rank, ranks)) for table in tables]


def main() -> None:
    """Compare, and where it is no check, act."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path"},
            "path": {"type": "path", "required": True},
            "rank": {"type": "int"},
            "ranks": {"type": "int"},
            "deep": {"type": "bool", "default": False},
            "jobs": {"type": "int", "default": JOBS},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("source", "rank", "ranks"))],
        supports_check_mode=True,
    )
    directory = Path(module.params["path"])
    jobs = max(1, module.params["jobs"])
    seconds = 0.0
    try:
        present = module.params["state"] == "present"
        work = plan(Path(module.params["source"]), module.params["rank"], module.params["ranks"]) if present else []
        problems = {packed.name: problem(reader, packed, directory, module.params["deep"], jobs) for reader, packed in work}
        todo = [(reader, packed) for reader, packed in work if problems[packed.name]]
        there = _host.names(directory)
        surplus = [name for name in there if _engram.NAME.fullmatch(name) and name not in problems]
        cut = [name for name in there if name.endswith(CUT[1]) and _engram.NAME.fullmatch(name.removeprefix(CUT[0]).removesuffix(CUT[1]))]
        need = sum(_ceil(packed.size) for _reader, packed in todo) - sum((directory / name).stat().st_blocks * 512 for name in cut)
        shortage = _checkpoint.shortage(str(directory), need, free_bytes(directory))
        if shortage:
            raise EngramError(shortage)
        if not module.check_mode and (todo or surplus or cut):
            directory.mkdir(parents=True, exist_ok=True)
            started = time.monotonic()
            with alone(directory):
                for name in cut:
                    (directory / name).unlink(missing_ok=True)
                for reader, packed in todo:
                    write(reader, packed, directory, jobs)
                for name in surplus:
                    (directory / name).unlink(missing_ok=True)
            seconds = time.monotonic() - started
    except EngramError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"the Engram rows cannot be packed into {directory} ({error.strerror}): free or repair the disk and run again")
    names = [packed.name for _reader, packed in todo]
    module.exit_json(
        changed=bool(todo or surplus or cut),
        packed=names,
        removed=[*cut, *surplus],
        files=[
            {"path": str(directory / packed.name), "size": packed.size, "header": packed.header()[:48].hex()} for _reader, packed in work
        ],
        bytes=sum(packed.size for _reader, packed in todo) if not module.check_mode else 0,
        seconds=seconds,
        diff={
            "before_header": str(directory),
            "after_header": str(directory),
            "before": "".join(f"{name} {problems.get(name, 'serves no rank here')}\n" for name in [*names, *cut, *surplus]),
            "after": "".join(f"{packed.name} ({_checkpoint.size_text(packed.size)})\n" for _reader, packed in todo),
        },
    )


if __name__ == "__main__":
    main()
