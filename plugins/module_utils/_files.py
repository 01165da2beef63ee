# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files that a role keeps on a member: written whole, compared by content, remembered so that `absent` removes just these."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
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
    """One difference between a member and what is wanted; `after` is None for a file that goes."""

    path: str
    before: bytes | None
    after: ManagedFile | None

    def diff(self) -> dict[str, str]:
        """The change as Ansible's `--diff` shows it."""

        def text(content: bytes | None) -> str:
            if content is None:
                return ""
            if (self.after and self.after.secret) or b"\0" in content:
                return "(not shown)\n"
            return content.decode("utf-8", "replace")

        return {
            "before_header": self.path,
            "after_header": self.path,
            "before": text(self.before),
            "after": text(self.after.content if self.after else None),
        }


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
                changes.append(Change(file.path, before, file))
        kept = {file.path for file in self.wanted}
        for path_name in self._owned:
            before = _host.read_bytes(self._host_path(path_name))
            if path_name not in kept and before is not None:
                changes.append(Change(path_name, before, None))
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

    def restore(self) -> None:
        """Put back what the changes replaced, byte for byte."""
        for change in self.changes:
            path = self._host_path(change.path)
            if change.before is None:
                path.unlink(missing_ok=True)
            else:
                _host.write(path, change.before, change.after.mode if change.after else 0o644)
        self._remember(self._owned)

    def _remember(self, paths: list[str]) -> None:
        if paths:
            content = (json.dumps(paths, indent=1) + "\n").encode()
            if _host.read_bytes(self._manifest) != content:
                _host.write(self._manifest, content)
        else:
            self._manifest.unlink(missing_ok=True)
