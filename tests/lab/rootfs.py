# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The read-only root file system that the hosts of labs share: Debian trixie, the Debian nearest to DGX OS 7.

systemd 257 and netplan 1.1 stand for the 255 and 1.x of Ubuntu 24.04. What differs between hosts and labs is no part of it (overlay.py).
"""

from __future__ import annotations

from pathlib import Path

from . import cache
from .progress import run_long

SUITE = "trixie"
_MACHINE = (
    # what makes it a machine
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "kmod", "openssh-server", "sudo",
    # what Ansible's modules and the collection use on a member
    "python3", "python3-apt", "rsync", "curl", "ca-certificates", "procps",
    # network
    "iproute2", "iputils-ping", "ethtool", "nftables", "netplan.io",
)  # fmt: skip
ENGINES = {
    "podman": ("podman", "crun", "netavark", "aardvark-dns"),
    "docker": ("docker.io", "docker-cli", "docker-buildx", "crun"),
}
"""Container engine -> packages: a host has one engine, so that nothing can fall back on the other."""
PACKAGES = (*_MACHINE, *ENGINES["podman"])
_UNWANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


def root_filesystem(engine: str = "podman") -> Path:
    """The root file system with this container engine, as a directory of the cache; about a minute the first time."""
    packages = (*_MACHINE, *ENGINES[engine])

    def build(destination: Path) -> None:
        _build(destination, packages)

    return cache.build(shelf(engine), {"suite": SUITE, "packages": packages}, build)


def shelf(engine: str) -> str:
    """Where the cache has those with this engine: one with the other may be in no use and yet wanted next."""
    return "rootfs" if engine == "podman" else f"rootfs-{engine}"


def _build(destination: Path, packages: tuple[str, ...]) -> None:
    options = ["--mode=root", "--variant=minbase", "--components=main", f"--include={','.join(packages)}"]
    options += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"']
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNWANTED]
    run_long(["mmdebstrap", *options, SUITE, str(destination)], title="root file system")
    # No identity in a shared root: a host key or machine-id here would be that of every host of every lab.
    for secret in (destination / "etc/ssh").glob("ssh_host_*"):
        secret.unlink()
    for name in ("etc/machine-id", "etc/hostname", "etc/resolv.conf"):
        (destination / name).unlink(missing_ok=True)
    (destination / "etc/resolv.conf").touch()
