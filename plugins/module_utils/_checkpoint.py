# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint as a list of files with their sizes and hashes, and what a directory lacks to be it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
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

ORIGINAL = ".orig-hf"
"""Suffix of the copy that a preparation keeps of a file that it edits (LLMKube's name for it)."""


class ManifestError(ValueError):
    """A manifest that cannot be used; the message is one sentence: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class File:
    """A file as it should be: path relative to the checkpoint's directory, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Known:
    """What is known of a checkpoint before its first fetch: `None` for a size or hash that nobody published.

    `complete`: no other files belong to it.
    """

    files: Mapping[str, tuple[int | None, str | None]]
    complete: bool


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
    known = parse_known(data)
    if has_gaps(known):
        unknown = [path for path, facts in known.files.items() if None in facts]
        what = f"says no size or no sha256 of {unknown[0]}" if unknown else "is not complete"
        raise ManifestError(f"the manifest {what}: fetch the checkpoint once, which pins it, and use the pinned manifest")
    return tuple(File(path, size or 0, sha256 or "") for path, (size, sha256) in sorted(known.files.items()))


def parse_known(data: Mapping[str, Any]) -> Known:
    """A manifest that may still have gaps: `size` and `sha256` may be null, and `"complete": false` says that files may be missing in it.

    Raises ManifestError.
    """
    if not data:
        raise ManifestError(
            "there is no manifest: set storage_manifest_file to the checkpoint's; checkpoint_verify without a manifest makes one"
        )
    complete = data.get("complete", True)
    well_formed = data.get("version") == VERSION and isinstance(data.get("files"), list) and isinstance(complete, bool)
    if not well_formed or set(data) - {"complete"} != {"version", "files"}:
        raise ManifestError(f'the manifest is not {{"version": {VERSION}, "files": [...]}}: make it again')
    entries = sorted((_entry(entry, index) for index, entry in enumerate(data["files"])), key=lambda entry: entry[0])
    if not entries:
        raise ManifestError("the manifest names no files: make it again from the whole checkpoint")
    for (path, _facts), (following, _others) in pairwise(entries):
        if path == following:
            raise ManifestError(f"the manifest names {path} twice: keep the right entry")
    return Known(dict(entries), complete)


def has_gaps(known: Known) -> bool:
    """Whether something is still to be learned."""
    return not known.complete or any(None in facts for facts in known.files.values())


def learn(known: Known, found: Mapping[str, Found]) -> tuple[tuple[File, ...], list[Problem]]:
    """The checkpoint as it is now known, with what was found in place of every gap, and what contradicts that which was known before.

    Every found file must have been hashed.
    """
    present = {file.path: file for file in as_found(found)}
    files = {path: file for path, file in present.items() if not (known.complete or _is_original(path, present))}
    for path, (size, sha256) in known.files.items():
        candidates = [present[name] for name in (path, path + ORIGINAL) if name in present]
        seen = next((file for file in candidates if file.size == size), candidates[0] if candidates else None)
        files[path] = File(path, _first(size, seen and seen.size, 0), _first(sha256, seen and seen.sha256, ""))
    wanted = tuple(file for _path, file in sorted(files.items()))
    return wanted, compare(wanted, found, allow_extra=not known.complete)


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
    """What tells the found files from the wanted ones, by path. Hidden files that nobody wants are let be.

    A preparation edits a file and keeps the original beside it (ORIGINAL): such a file is right when its original is.
    """
    wanted = {file.path: file for file in files}
    extra = [] if allow_extra else [path for path in found if not (path in wanted or is_hidden(path) or _is_original(path, wanted))]
    problems = [Problem("extra", path, "is no part of the checkpoint") for path in extra]
    for file in wanted.values():
        kind, detail = _difference(file, found.get(file.path))
        if kind and not is_prepared(file, found):
            problems.append(Problem(kind, file.path, detail))
    return sorted(problems, key=lambda problem: problem.path)


def is_prepared(file: File, found: Mapping[str, Found]) -> bool:
    """Whether the file is there in an edited form, with the wanted one kept beside it."""
    seen, original = found.get(file.path), found.get(file.path + ORIGINAL)
    return seen is not None and not seen.fault and original is not None and not _difference(file, original)[0]


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


def _entry(entry: Any, index: int) -> tuple[str, tuple[int | None, str | None]]:
    where = f"files[{index}] of the manifest"
    if not isinstance(entry, Mapping) or set(entry) != {"path", "size", "sha256"}:
        raise ManifestError(f"{where} has not exactly the keys path, size and sha256: make the manifest again")
    path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
    if not isinstance(path, str) or not _PLAIN_PATH.fullmatch(path) or not _stays_inside(path):
        raise ManifestError(f"{where}: path {path!r} is not a plain path below the checkpoint's directory: correct it")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise ManifestError(f"{where}: size {size!r} is no number of bytes: correct it")
    if sha256 is not None and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        raise ManifestError(f"{where}: sha256 {sha256!r} is no SHA-256 in lower-case hex: correct it")
    return path, (size, sha256)


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _is_original(path: str, wanted: Container[str]) -> bool:
    """Whether this is the kept original of a wanted file."""
    return path.endswith(ORIGINAL) and path.removesuffix(ORIGINAL) in wanted


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
