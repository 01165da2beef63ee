# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint as a list of files with their sizes and hashes, and what a directory lacks to be it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

VERSION = 1
KINDS = ("missing", "short", "corrupt", "extra")
CURES = {
    "missing": "put the file there",
    "short": "finish its copy",
    "corrupt": "remove the file and copy it again from where the checkpoint comes from",
    "extra": "move the file away",
}

_PLAIN_PATH = re.compile(r"[^\x00-\x1f\x7f*?\[\]\\]+")
"""No control characters, and none that rsync takes for a pattern."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A manifest that cannot be used; the message is one sentence: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class File:
    """A file as it should be: path relative to the checkpoint's directory, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Found:
    """A file as it is. `sha256` is empty where the size already tells; `fault` says why the content cannot be had."""

    size: int
    sha256: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Problem:
    """One file that is not as it should be; `detail` goes on from its path to a sentence."""

    kind: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path} {self.detail}"


def parse_manifest(data: Mapping[str, Any]) -> tuple[File, ...]:
    """The files of `{"version": 1, "files": [{"path", "size", "sha256"}]}`, by path.

    Raises ManifestError, also for every path that could reach out of the checkpoint's directory.
    """
    if not data:
        raise ManifestError(
            "there is no manifest: set storage_manifest_file to the checkpoint's; checkpoint_verify without a manifest makes one"
        )
    if data.get("version") != VERSION or not isinstance(data.get("files"), list) or set(data) != {"version", "files"}:
        raise ManifestError(f'the manifest is not {{"version": {VERSION}, "files": [...]}}: make it again')
    files = sorted((_file(entry, index) for index, entry in enumerate(data["files"])), key=lambda file: file.path)
    if not files:
        raise ManifestError("the manifest names no files: make it again from the whole checkpoint")
    for file, following in pairwise(files):
        if file.path == following.path:
            raise ManifestError(f"the manifest names {file.path} twice: keep the right entry")
    return tuple(files)


def as_found(found: Mapping[str, Found]) -> tuple[File, ...]:
    """The files as they are; hidden ones, such as a downloader's notes, are no part of a checkpoint."""
    return tuple(File(path, file.size, file.sha256) for path, file in sorted(found.items()) if not is_hidden(path))


def manifest_of(files: Iterable[File]) -> dict[str, Any]:
    """The manifest of these files."""
    return {"version": VERSION, "files": [asdict(file) for file in files]}


def is_hidden(path: str) -> bool:
    """Whether the file or a folder above it has a name with a leading dot: no engine loads such files."""
    return any(part.startswith(".") for part in PurePosixPath(path).parts)


def compare(files: Iterable[File], found: Mapping[str, Found], allow_extra: bool = False) -> list[Problem]:
    """What tells the found files from the wanted ones, by path. Hidden files that nobody wants are let be."""
    wanted = {file.path: file for file in files}
    extra = [] if allow_extra else [path for path in found if path not in wanted and not is_hidden(path)]
    problems = [Problem("extra", path, "is no part of the checkpoint") for path in extra]
    for file in wanted.values():
        kind, detail = _difference(file, found.get(file.path))
        if kind:
            problems.append(Problem(kind, file.path, detail))
    return sorted(problems, key=lambda problem: problem.path)


def to_copy(files: Iterable[File], problems: Iterable[Problem]) -> list[File]:
    """The files that must be brought here to cure the problems."""
    wrong = {problem.path for problem in problems if problem.kind != "extra"}
    return [file for file in files if file.path in wrong]


def growth(files: Iterable[File], found: Mapping[str, Found]) -> int:
    """Bytes that the disk must still take for these files: they are written in place, so what is there counts."""
    return sum(max(0, file.size - found[file.path].size) if file.path in found else file.size for file in files)


def shortage(directory: str, need: int, free: int) -> str:
    """The sentence for a disk that cannot take `need` more bytes; empty when it can."""
    if need <= free:
        return ""
    return f"{directory} has {size_text(free)} of disk space left and needs {size_text(need)} more: free {size_text(need - free)} there"


def verdict(directory: str, problems: Sequence[Problem]) -> str:
    """One sentence about the first problem, how many more there are, and the cure; empty when there is none."""
    if not problems:
        return ""
    first, others = problems[0], len(problems) - 1
    more = f" ({others} more problem{'s' if others > 1 else ''})" if others else ""
    return f"{directory}/{first}{more}: {CURES[first.kind]}"


def report(problems: Sequence[Problem]) -> dict[str, Any]:
    """The problems as modules return them: sentences, and the paths by kind."""
    by_kind = {kind: [problem.path for problem in problems if problem.kind == kind] for kind in KINDS}
    return {"ok": not problems, "problems": [str(problem) for problem in problems], **by_kind}


def size_text(size: int) -> str:
    """A size for people, in the largest binary unit that it fills."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _file(entry: Any, index: int) -> File:
    where = f"files[{index}] of the manifest"
    if not isinstance(entry, Mapping) or set(entry) != {"path", "size", "sha256"}:
        raise ManifestError(f"{where} has not exactly the keys path, size and sha256: make the manifest again")
    path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
    if not isinstance(path, str) or not _PLAIN_PATH.fullmatch(path) or not _stays_inside(path):
        raise ManifestError(f"{where}: path {path!r} is not a plain path below the checkpoint's directory: correct it")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ManifestError(f"{where}: size {size!r} is no number of bytes: correct it")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ManifestError(f"{where}: sha256 {sha256!r} is no SHA-256 in lower-case hex: correct it")
    return File(path, size, sha256)


def _stays_inside(path: str) -> bool:
    """Relative, in its shortest form, and never upwards."""
    return path == str(PurePosixPath(path)) and path != "." and ".." not in path.split("/") and path[0] != "/"


def _difference(file: File, found: Found | None) -> tuple[str, str]:
    if found is None:
        return "missing", "is missing"
    if found.fault:
        return "corrupt", f"cannot be read ({found.fault})"
    if found.size < file.size:
        return "short", f"is short ({found.size} bytes, expected {file.size})"
    if found.size > file.size:
        return "corrupt", f"is corrupt ({found.size} bytes, expected {file.size})"
    if found.sha256 != file.sha256:
        return "corrupt", f"is corrupt (SHA-256 {found.sha256}, expected {file.sha256})"
    return "", ""
