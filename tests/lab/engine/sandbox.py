# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a command inside the engine's file system on this machine, where no container engine is.

The tree is an overlay of the image's layers in a mount namespace of its own, and the network is a namespace of its own with nothing but
loopback: nothing mounted outlives the command, and nothing that the engine listens on or asks for leaves the machine.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..progress import run_long

_SETUP = """
set -eu
ip link set lo up
mount -t overlay overlay -o "$OVERLAY" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/dev/shm"
mount -t tmpfs tmpfs "$ROOT/tmp"
mount -t tmpfs tmpfs "$ROOT/models"
for pair in $BINDS; do
  target="$ROOT/models/${pair##*:}"
  mkdir "$target" && mount --bind "${pair%:*}" "$target"
done
cd /
exec chroot "$ROOT" /usr/bin/env -i HOME=/tmp "$@"
"""


def run(
    layers: Sequence[Path],
    argv: Sequence[str],
    *,
    title: str,
    environment: Mapping[str, str],
    folders: Mapping[str, Path] | None = None,
    writable: Path | None = None,
) -> None:
    """Run `argv` in the layers (lowest first), with `folders` under /models by name; what it writes goes to `writable` or nowhere.

    `writable` is a directory of the host that becomes the top layer; a directory `<writable>.work` beside it is made for the kernel.
    Raises LabError with the end of the output when the command fails.
    """
    lower = ":".join(str(layer) for layer in reversed(layers))
    overlay = f"lowerdir={lower}"
    with tempfile.TemporaryDirectory(prefix="gb10-engine-") as root:
        if writable is not None:
            work = writable.with_name(f"{writable.name}.work")
            work.mkdir(exist_ok=True)
            overlay += f",upperdir={writable},workdir={work}"
        variables = {
            "ROOT": root, "OVERLAY": overlay,
            "BINDS": " ".join(f"{path}:{name}" for name, path in (folders or {}).items()),
        }  # fmt: skip
        settings = [f"{name}={value}" for name, value in environment.items()]
        script = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items()) + _SETUP
        run_long(["unshare", "--net", "sh", "-c", script, "sh", *settings, *argv], title=title)
