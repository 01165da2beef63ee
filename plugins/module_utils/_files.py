# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that a role keeps on a member: written whole, compared by content, remembered so that `absent` removes just these."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import _host

MANIFESTS = Path("/var/lib/gb10/files")
"""One JSON list of paths per owner: what apply wrote is what absent removes."""


@dataclass(frozen=True)
class ManagedFile:
    """A wanted file. `secret` content shows in no diff."""

    path: str
    content: bytes
    mode: int = 0o644
    secret: bool = False


@dataclass(frozen=True)
class Change:
    """One difference between a member and what is wanted; `after` is None for a file that goes. `secret`: shown in no diff."""

    path: str
    before: bytes | None
    after: ManagedFile | None
    secret: bool = False

    def diff(self) -> dict[str, str]:
        """The change as Ansible's `--diff` shows it."""

        def text(content: bytes | None) -> str:
            if content is None:
                return ""
            if self.secret or b"\0" in content:
                return "(not shown)\n"
            return content.decode("utf-8", "replace")

        return {
            "before_header": self.path,
            "after_header": self.path,
            "before": text(self.before),
            "after": text(self.after.content if self.after else None),
        }


@dataclass(frozen=True)
class Edit(Change):
    """A change of a file that stays."""

    after: ManagedFile


class FileSet:
    """The files of one owner (a role's concern) below `root`."""

    def __init__(self, owner: str, wanted: Iterable[ManagedFile], root: str = "/", manifests: Path = MANIFESTS) -> None:
        self._root = Path(root)
        self._manifest = self._host_path(manifests / f"{owner}.json")
        self.wanted = list(wanted)
        self._owned: list[str] = json.loads(_host.read(self._manifest) or "[]")
        self.changes = self._compare()

    def _host_path(self, path: str | Path) -> Path:
        return self._root / str(path).lstrip("/")

    def _compare(self) -> list[Change]:
        changes = []
        for file in self.wanted:
            path = self._host_path(file.path)
            before = _host.read_bytes(path)
            if before != file.content or stat.S_IMODE(os.stat(path).st_mode) != file.mode:
                changes.append(Change(file.path, before, file, file.secret))
        kept = {file.path for file in self.wanted}
        for path_name in self._owned:
            path = self._host_path(path_name)
            before = _host.read_bytes(path)
            if path_name not in kept and before is not None:
                # What it was is not remembered, but a secret is written for its owner alone.
                changes.append(Change(path_name, before, None, secret=not os.stat(path).st_mode & 0o077))
        return changes

    def apply(self) -> None:
        """Write and remove; the manifest names every file before the first is written, so that a killed run is still undone."""
        paths = sorted({file.path for file in self.wanted} | {change.path for change in self.changes})
        self._remember(paths)
        for change in self.changes:
            if change.after is None:
                self._host_path(change.path).unlink(missing_ok=True)
            else:
                _host.write(self._host_path(change.path), change.after.content, change.after.mode)
        self._remember(sorted(file.path for file in self.wanted))

    def paths(self) -> list[str]:
        """Every path that `apply` may write or remove: what a roll-back has to keep."""
        return [*(change.path for change in self.changes), "/" + str(self._manifest.relative_to(self._root))] if self.changes else []

    def _remember(self, paths: list[str]) -> None:
        if paths:
            content = (json.dumps(paths, indent=1) + "\n").encode()
            if _host.read_bytes(self._manifest) != content:
                _host.write(self._manifest, content)
        else:
            self._manifest.unlink(missing_ok=True)


class Borrowed:
    """Files of others that a role has to edit: what they held before is kept beside them all, and goes back byte for byte.

    The copy is renewed when somebody else has changed the file since and it has to be edited again: the last bytes that were not ours
    are what is given back.
    """

    def __init__(self, owner: str, root: str = "/", manifests: Path = MANIFESTS) -> None:
        self._root = Path(root)
        self._index = manifests / f"{owner}-edited.json"
        self._copies = manifests / f"{owner}-before"
        self._written: dict[str, str] = json.loads(_host.read(self._host_path(self._index)) or "{}")

    def _host_path(self, path: str | Path) -> Path:
        return self._root / str(path).lstrip("/")

    def _copy(self, path: str) -> Path:
        return self._host_path(f"{self._copies}/{path.lstrip('/')}")

    def edits(self, contents: Mapping[str, bytes]) -> list[Edit]:
        """The changes that bring files to new content; `contents` has only files that exist."""
        befores = {path: _host.read_bytes(self._host_path(path)) for path in contents}
        return [self._change(path, self._host_path(path), content) for path, content in contents.items() if befores[path] != content]

    def returns(self) -> list[Edit]:
        """The changes that give every edited file back."""
        return [self._change(path, self._copy(path), self._copy(path).read_bytes()) for path in self._written]

    def _change(self, path: str, like: Path, content: bytes) -> Edit:
        """From what is there to other content, with the mode of the file `like`."""
        return Edit(path, _host.read_bytes(self._host_path(path)), ManagedFile(path, content, stat.S_IMODE(os.stat(like).st_mode)))

    def strangers(self) -> dict[str, str]:
        """Edited files that somebody has changed or removed since, with the path of the bytes that were kept."""
        found = {}
        for path, digest in self._written.items():
            content = _host.read_bytes(self._host_path(path))
            if content is None or hashlib.sha256(content).hexdigest() != digest:
                found[path] = "/" + str(self._copy(path).relative_to(self._root))
        return found

    def paths(self, changes: Iterable[Edit]) -> list[str]:
        """Every path that `edit` or `give_back` of these changes may write or remove."""
        paths = [change.path for change in changes]
        return [*paths, *(f"{self._copies}/{path.lstrip('/')}" for path in paths), str(self._index)] if paths else []

    def edit(self, changes: Iterable[Edit]) -> None:
        """Keep what is there, then write; a copy and its entry are there before the file changes."""
        for change in changes:
            before = change.before or b""
            if self._written.get(change.path) != hashlib.sha256(before).hexdigest():
                _host.write(self._copy(change.path), before, change.after.mode)
            self._remember(self._written | {change.path: hashlib.sha256(change.after.content).hexdigest()})
            _host.write(self._host_path(change.path), change.after.content, change.after.mode)

    def give_back(self, changes: Iterable[Edit]) -> None:
        """Write what was kept, and forget it."""
        for change in changes:
            _host.write(self._host_path(change.path), change.after.content, change.after.mode)
            self._remember({path: digest for path, digest in self._written.items() if path != change.path})
            self._copy(change.path).unlink(missing_ok=True)
        if not self._written:
            shutil.rmtree(self._host_path(self._copies), ignore_errors=True)

    def _remember(self, written: dict[str, str]) -> None:
        self._written = written
        if written:
            _host.write(self._host_path(self._index), (json.dumps(written, indent=1, sort_keys=True) + "\n").encode())
        else:
            self._host_path(self._index).unlink(missing_ok=True)
