# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which checkpoints of a member may go: known to this collection, in nobody's use, and older than those that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

PREFIX = ".reclaimed-"
"""A directory that is going is called so first; a run that was cut is finished by the next."""


@dataclass(frozen=True)
class Candidate:
    """A directory below the storage root: bytes that only it holds, the time of its newest file, and who uses it (empty: nobody)."""

    name: str
    size: int
    newest: float
    use: str


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: the device, the mounted part of its filesystem, and where it is mounted."""

    device: str
    root: str
    point: str


def choose(candidates: Iterable[Candidate], keep: int | None) -> list[Candidate]:
    """Those that go, the oldest first: of what nobody uses, all but the newest `keep`; none without a number."""
    unused = sorted((candidate for candidate in candidates if not candidate.use), key=lambda candidate: (-candidate.newest, candidate.name))
    return [] if keep is None else unused[keep:][::-1]


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts of a process (proc_pid_mountinfo(5)); blanks in paths are octal there."""
    return [Mount(*(_unescape(word) for word in fields[2:5])) for fields in map(str.split, text.splitlines()) if len(fields) > 4]


def place(path: str, own: Sequence[Mount]) -> tuple[str, str]:
    """A directory's device and its path inside that filesystem, by the mounts of this process."""
    mount = max((mount for mount in own if _is_inside(path, mount.point)), key=lambda mount: len(mount.point), default=Mount("", "/", "/"))
    relative = PurePosixPath(path).relative_to(mount.point)
    return mount.device, str(PurePosixPath(mount.root) / relative)


def is_mounted(device: str, inside: str, others: Iterable[Mount]) -> bool:
    """Whether some process has this directory, or a part of it, mounted for itself, as a container has."""
    return any(mount.device == device and _is_inside(mount.root, inside) for mount in others)


def directories_of(rank_json: str) -> list[str]:
    """The directories that a rank's container mounts. A damaged file names none."""
    try:
        return [volume["source"] for volume in json.loads(rank_json)["container"]["volumes"]]
    except (ValueError, KeyError, TypeError):
        return []


def user_of(path: str, configured: Mapping[str, Sequence[str]]) -> str:
    """Which group is configured to mount this directory, or something in it."""
    return next(
        (group for group, directories in sorted(configured.items()) if any(_is_inside(directory, path) for directory in directories)), ""
    )


def _is_inside(inner: str, outer: str) -> bool:
    return PurePosixPath(inner).is_relative_to(outer)


def _unescape(word: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, sign)
    return word
