# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files below a directory with their hashes, and the memory (stamps) that spares reading them again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import _host
from ._checkpoint import ORIGINAL, Found, Problem, is_hidden
from ._safetensors import LENGTH_BYTES, FormatError, Tensor, header_length, parse_header

STAMPS = Path("/var/lib/gb10/stamps")
"""One JSON file per directory, by its last name: what was hashed, and what the file looked like then."""

MAX_JOBS = 8
"""Threads by default at most: a Spark's disk is busy with fewer than its cores."""
BLOCK = 4 * 2**20
"""Bytes per read: long enough for the disk, short enough for a processor's cache."""


@dataclass(frozen=True)
class Survey:
    """The files by their path relative to the directory, how many had to be read, and the disk's free bytes."""

    found: dict[str, Found]
    hashed: int
    free: int


def survey(directory: Path, sizes: Mapping[str, int] | None, deep: bool, jobs: int | None, stamps: Path | None) -> Survey:
    """Look at a directory, which need not exist.

    Hashed are the files of `sizes` that have the size given there, or without `sizes` all that are not hidden; with
    `deep` all of these are read, else those whose stamp in the folder `stamps` does not fit. The stamps are brought up
    to date; None leaves them as they are.
    """
    present = dict(_walk(directory))
    memory = Stamps(directory, stamps or STAMPS)
    found: dict[str, Found] = {}
    unread: list[str] = []
    for path, status in present.items():
        if not stat.S_ISREG(status.st_mode):
            found[path] = Found(status.st_size, fault="it is not a regular file; a container could not follow a link")
        elif is_hidden(path) if sizes is None else sizes.get(path.removesuffix(ORIGINAL)) != status.st_size:
            found[path] = Found(status.st_size)
        elif not deep and (known := memory.recall(path, status)):
            found[path] = Found(status.st_size, known)
        else:
            unread.append(path)
    # The largest first, so that no thread is left alone with one at the end.
    unread.sort(key=lambda path: -present[path].st_size)
    with ThreadPoolExecutor(jobs or min(MAX_JOBS, os.cpu_count() or 1)) as pool:
        for path, (read, status) in zip(unread, pool.map(lambda path: read_file(directory / path), unread), strict=True):
            found[path] = read
            memory.remember(path, status, read.sha256)
    if stamps:
        memory.keep(set(present))
    return Survey(found, len(unread), free_bytes(directory))


def tensor_headers(directory: Path, paths: Iterable[str]) -> tuple[dict[str, dict[str, Tensor]], list[Problem]]:
    """The tensors of these files, by the files' paths, and what is wrong with those that have none."""
    headers: dict[str, dict[str, Tensor]] = {}
    problems: list[Problem] = []
    for path in sorted(paths):
        try:
            headers[path] = read_header(directory / path)
        except FormatError as error:
            problems.append(Problem("corrupt", path, str(error)))
    return headers, problems


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises FormatError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(LENGTH_BYTES), size)
            return parse_header(file.read(length), size)
    except OSError as error:
        raise FormatError(f"cannot be read ({error.strerror})") from None


def free_bytes(directory: Path) -> int:
    """Free bytes where the directory is or would be made."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a directory that is no directory itself. Links are not followed."""
    for folder, folders, files in os.walk(directory):
        for name in files + [name for name in folders if Path(folder, name).is_symlink()]:
            path = Path(folder, name)
            yield str(path.relative_to(directory)), path.lstat()


def _identity(status: os.stat_result) -> list[int]:
    """What changes with every write. The change time tells also of a write whose modification time was set back."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def read_file(path: Path) -> tuple[Found, os.stat_result | None]:
    """A file's hash, and its status where that was the same before and after.

    What is in memory is written and dropped first, so that it is the disk's content that is hashed, and dropped again
    afterwards, so that a checkpoint of 200 GB does not push everything else out of memory.
    """
    digest = hashlib.sha256()
    block = memoryview(bytearray(BLOCK))
    size = 0
    try:
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while count := file.readinto(block):
                digest.update(block[:count])
                size += count
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            after = os.fstat(file.fileno())
    except OSError as error:
        return Found(size, fault=error.strerror or str(error)), None
    return Found(size, digest.hexdigest()), after if _identity(before) == _identity(after) else None


class Stamps:
    """Hashes by path, each with the identity of the file that it was read from."""

    def __init__(self, directory: Path, folder: Path) -> None:
        self._directory = str(directory)
        self._file = folder / f"{directory.name}.json"
        self._stamps: dict[str, dict[str, object]] = {}
        with suppress(ValueError, KeyError, TypeError):  # a damaged memory is no memory
            kept = json.loads(_host.read(self._file) or "{}")
            if kept["directory"] == self._directory:
                self._stamps = dict(kept["files"])

    def recall(self, path: str, status: os.stat_result) -> str:
        stamp = self._stamps.get(path, {})
        return str(stamp["sha256"]) if stamp.get("identity") == _identity(status) else ""

    def remember(self, path: str, status: os.stat_result | None, sha256: str) -> None:
        self._stamps.pop(path, None)
        if status:
            self._stamps[path] = {"identity": _identity(status), "sha256": sha256}

    def keep(self, present: set[str] | None) -> None:
        """Write what changed, of the files that are present (None: of all).

        On a full disk, or one that may not be written, the files are read again next time.
        """
        files = {path: stamp for path, stamp in sorted(self._stamps.items()) if present is None or path in present}
        content = (json.dumps({"directory": self._directory, "files": files}, indent=1) + "\n").encode()
        if files and _host.read_bytes(self._file) != content:
            with suppress(OSError):
                _host.write(self._file, content)
