# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The power supply of one nspawn host: mounts its disk, boots it, and boots it again when it asks for a reboot.

Run by nspawn.py inside the host's control group and in a private mount namespace: `python -m tests.lab.supervise STATE/HOST`.
Every mount made here is gone when the last process of the host is, so there is nothing to unmount after a crash.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .cgroups import HostGroup
from .network import Network
from .overlay import INIT

REBOOT_STATUS = 133  # systemd-nspawn's exit status for "the container wants to be started again"
# sysctls of the whole machine; a host gets files of its own in their place (guest/init puts back what is per namespace)
_SHADOWED = ("vm", "fs", "kernel", "net/core")
_PROC_SYS = Path("/proc/sys")
# No host may set the machine's clock, load modules or reach hardware.
_DROPPED = "CAP_SYS_TIME,CAP_SYS_MODULE,CAP_SYS_RAWIO"
# Below /var/lib: an engine's storage is an overlay itself, which cannot lie on an overlay.
_ENGINE_STORAGE = ("containers", "docker", "containerd")
_TIMEOUT_S = 60


def main() -> int:
    os.umask(0o022)
    directory = Path(sys.argv[1])
    description = json.loads((directory / "host.json").read_text())
    only_one = (directory / "supervisor.lock").open("wb")
    fcntl.flock(only_one, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a second one would mount the same disk
    root = Path(description["root"])
    _mount_disk(directory, root)
    group = HostGroup(description["group"])
    for boot in itertools.count(1):
        _shadow_sysctls(directory / "sysctl")
        host = subprocess.Popen(_nspawn(directory, description), preexec_fn=lambda part=f"boot{boot}": group.join(part))
        status = host.wait()
        Network.unplug_namespace(Path(description["namespace"]).name)
        print(f"supervise: {description['name']} ended with status {status}", flush=True)
        if status != REBOOT_STATUS:
            break
    return status


def _mount_disk(directory: Path, root: Path) -> None:
    """Mount the host's disk at `disk` and the root file system with that disk over it at `root`."""
    disk, whole = directory / "disk", directory / "root"
    for place in (disk, whole, directory / "sysctl"):
        place.mkdir(exist_ok=True)
    _run("mount", "-o", "loop,noatime", str(directory / "disk.img"), str(disk))
    device = _run("findmnt", "--noheadings", "--output=SOURCE", str(disk)).strip()
    _run("losetup", "--direct-io=on", device)  # else every block is cached twice and writing is ten times slower
    for name in ("upper", "work", *_ENGINE_STORAGE):
        (disk / name).mkdir(exist_ok=True)
    if not (disk / "seeded").exists():
        shutil.copytree(directory / "seed", disk / "upper", symlinks=True, dirs_exist_ok=True)
        (disk / "seeded").touch()
    layers = f"lowerdir={root},upperdir={disk}/upper,workdir={disk}/work"
    _run("mount", "-t", "overlay", "-o", layers, "overlay", str(whole))
    # nspawn keeps a tree here that must be on a tmpfs, or a reboot dies with "attempted to remove disk file system".
    Path("/run/systemd/nspawn").mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", "/run/systemd/nspawn")
    _run("mount", "-t", "tmpfs", "tmpfs", str(directory / "sysctl"))


def _shadow_sysctls(place: Path) -> None:
    """Files with the machine's present values: a host can set and read them, and nothing else is touched."""
    for part in _SHADOWED:
        shutil.rmtree(place / part, ignore_errors=True)
        for source in (_PROC_SYS / part).rglob("*"):
            target = place / source.relative_to(_PROC_SYS)
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.write_bytes(source.read_bytes())
            except OSError:  # write-only or not readable here
                target.touch()


def _nspawn(directory: Path, description: dict[str, str]) -> list[str]:
    return [
        "systemd-nspawn", "--quiet", "--console=pipe", f"--directory={directory}/root", f"--machine={description['group']}",
        f"--hostname={description['name']}", "--register=no", "--keep-unit", "--resolv-conf=off", "--timezone=off", "--link-journal=no",
        f"--network-namespace-path={description['namespace']}", "--kill-signal=SIGRTMIN+3", "--capability=all", f"--drop-capability={_DROPPED}",
        f"--bind={directory}/sysctl:/run/gb10-lab-sysctl",
        *(f"--bind={directory}/disk/{name}:/var/lib/{name}" for name in _ENGINE_STORAGE),
        # What a container engine needs and nspawn forbids.
        "--system-call-filter=@mount @keyring bpf",
        INIT,
    ]  # fmt: skip


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL).stdout


if __name__ == "__main__":
    sys.exit(main())
