# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which NCCL libraries a running process has loaded, and what they know.

A library ignores variables that it does not know, so the strings in the file decide, not its version: builds of one version differ and
patched ones keep it. A process can hold two: torch loads its own, vLLM the one that VLLM_NCCL_SO_PATH names (NestuFNG, sparkring).
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import _host
from ._findings import REFUSE, WARN, Finding
from ._nccl import SKIP_TREES, SUBNET_ROUTING, Requirement

FEATURES = (SUBNET_ROUTING, SKIP_TREES)

_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ [1-9]\d* +(/.*/libnccl\.so[.\d]*)( \(deleted\))?$", re.MULTILINE)
_VERSION = re.compile(rb"NCCL version (\d[\w.+-]*)")
_CHOOSING = ("LD_PRELOAD=", "VLLM_NCCL_SO_PATH=")
_MEMLOCK = re.compile(r"^Max locked memory +(\d+|unlimited)", re.MULTILINE)


@dataclass(frozen=True)
class Library:
    """One file: its path as the process sees it, its version, which of FEATURES it holds, its SHA-256 (empty where it is gone)."""

    path: str
    version: str = ""
    features: tuple[str, ...] = ()
    sha256: str = ""


@dataclass(frozen=True)
class Process:
    """A process with NCCL in it; `memlock` is its limit of locked memory in bytes, none when there is no limit.

    `torch` and `vllm` are the paths of the library that torch.distributed calls and of the one that vLLM's own communicator does,
    empty where two are loaded and nothing tells.
    """

    pid: int
    name: str
    libraries: tuple[Library, ...]
    memlock: int | None
    torch: str = ""
    vllm: str = ""


def inspect(file: Path) -> Library:
    """What a library file holds."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            version = _VERSION.search(content)
            held = tuple(feature for feature in FEATURES if content.find(f"NCCL_{feature}\0".encode()) >= 0)
            return Library(str(file), version[1].decode() if version else "", held, hashlib.sha256(content).hexdigest())
    except (OSError, ValueError):
        return Library(str(file))


def mapped(maps: str) -> list[str]:
    """The NCCL libraries in the text of /proc/PID/maps, each once."""
    return sorted({match[1] for match in _MAPPED.finditer(maps)})


def processes(procfs_root: str = "/proc") -> list[Process]:
    """All processes that have a NCCL library loaded. Each path is looked up as the process sees it, in its container's files."""
    root = Path(procfs_root)
    known: dict[tuple[int, int], Library] = {}
    found = []
    for pid in sorted((name for name in _host.names(root) if name.isdigit()), key=int):
        paths = {path: _identity(root, pid, path) for path in mapped(_host.read(root / pid / "maps") or "")}
        if not paths:
            continue
        for path, identity in paths.items():
            if identity and identity not in known:
                known[identity] = inspect(Path(f"{root}/{pid}/root{path}"))
        libraries = tuple(replace(known[identity], path=path) if identity else Library(path) for path, identity in paths.items())
        torch, vllm = _callers(root, pid, paths)
        limit = _MEMLOCK.search(_host.read(root / pid / "limits") or "")
        memlock = int(limit[1]) if limit and limit[1] != "unlimited" else None
        found.append(Process(int(pid), _host.read(root / pid / "comm") or "", libraries, memlock, torch, vllm))
    return found


def _identity(root: Path, pid: str, path: str) -> tuple[int, int] | None:
    """Device and inode of a file as a process sees it; none when it is gone."""
    try:
        status = Path(f"{root}/{pid}/root{path}").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _callers(root: Path, pid: str, paths: Mapping[str, tuple[int, int] | None]) -> tuple[str, str]:
    """Which loaded library torch calls and which one vLLM: a preloaded one takes torch's calls, vLLM opens the one that it is told.

    Of the process's environment, which holds secrets, two variables are read.
    """
    if len(paths) == 1:
        (only,) = paths
        return only, only
    settings = dict(item.split("=", 1) for item in (_host.read(root / pid / "environ") or "").split("\0") if item.startswith(_CHOOSING))

    def loaded(variable: str) -> str:
        wanted = [_identity(root, pid, item) for item in re.split("[ :]", settings.get(variable, "")) if item.startswith("/")]
        return next((path for path, identity in paths.items() if identity and identity in wanted), "")

    vllm, preloaded = loaded("VLLM_NCCL_SO_PATH"), loaded("LD_PRELOAD")
    others = [path for path in paths if path != vllm]
    return preloaded or (others[0] if vllm and len(others) == 1 else ""), vllm


def judge_libraries(running: Iterable[Process], required: Sequence[Requirement]) -> list[Finding]:
    """What the loaded libraries lack, and processes that hold two of them."""
    findings = []
    for process in running:
        lacks = [(library, each) for library in process.libraries for each in required if each.feature not in library.features]
        for library, each in lacks:
            which = f"{library.path} ({library.version or 'gone'}), loaded by {process.name},"
            sentence = f"{which} does not know NCCL_{each.feature}: {each.reason}"
            findings.append(Finding(REFUSE, "library-lacks", sentence, f"pid {process.pid}"))
        if len(process.libraries) > 1:
            callers = (
                {process.torch: " for torch", process.vllm: " for vLLM"} if process.torch != process.vllm else {process.torch: " in use"}
            )
            listed = " and ".join(
                f"{library.path} ({library.version or 'gone'}{callers.get(library.path, '')})" for library in process.libraries
            )
            findings.append(
                Finding(
                    REFUSE if lacks else WARN,
                    "library-twice",
                    f"{process.name} has {len(process.libraries)} NCCL libraries loaded, {listed}: "
                    "set LD_PRELOAD and VLLM_NCCL_SO_PATH to the same file",
                    f"pid {process.pid}",
                )
            )
    return findings
