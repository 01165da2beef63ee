# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a member really runs, read from its live processes and not from its configuration: the other half of every figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _host, _image, _nccl_library, _proof

OWN_TO_A_START = ("HOSTNAME", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM", "VLLM_HOST_IP")
"""Variables that say which member or which start it is, not how it runs."""


def hashed(environ: bytes) -> dict[str, str]:
    """The variables of a process (procfs's `environ`), each as the first 12 digits of its value's SHA-256: two runs tell which one differs."""
    named = _proof.environment_of(environ)
    kept = {name: value for name, value in named.items() if name not in OWN_TO_A_START and not _proof.is_secret(name)}
    return {name: hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in sorted(kept.items())}


def read(engine: str, group: str, checkpoint: str, procfs_root: str = "/proc", var: str = "/var/lib/gb10") -> dict[str, Any]:
    """Image, arguments, environment, checkpoint, kernel, driver and NCCL of this member's rank. What is not known is an empty text."""
    proc = Path(procfs_root)
    pid, image = _proof.container(_host.run(_proof.container_argv(engine, f"gb10-{group}")).out)
    argv = _proof.arguments_of(_host.read_bytes(proc / str(pid) / "cmdline") or b"") if pid else []
    loaded = [library for process in _nccl_library.processes(procfs_root) for library in process.libraries] if pid else []
    return {
        "image": _image.plain_id(image),
        "arguments": argv,
        "environment": hashed(_host.read_bytes(proc / str(pid) / "environ") or b"") if pid else {},
        "checkpoint": checkpoint_digest(_host.read(f"{var}/stamps/{checkpoint}.json") or ""),
        "kernel": (_host.read(proc / "sys/kernel/osrelease") or "").strip(),
        "driver": (_host.read(proc / "driver/nvidia/version") or "").partition("\n")[0],
        "nccl": sorted({f"{library.version} {library.sha256[:12]}" for library in loaded}),
    }


def checkpoint_digest(stamps: str) -> str:
    """One SHA-256 of a checkpoint's files and their hashes, as verification left them; empty where it left none."""
    try:
        files: Mapping[str, Any] = json.loads(stamps)["files"]
        listing = "".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files))
    except (ValueError, KeyError, TypeError):
        return ""
    return hashlib.sha256(listing.encode()).hexdigest()
