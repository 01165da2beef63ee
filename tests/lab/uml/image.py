# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The disk that every full-kernel host starts from: what the shared root of the other hosts has, and what a kernel of one's own allows.

It holds no identity and no kernel module: those come with a host's first boot (backend.py), so neither a new kernel nor a new lab makes
a new image.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .. import cache
from ..progress import run_long
from ..rootfs import PACKAGES, SUITE, root_filesystem
from .kernel import BACKPORTS, mirror

DISK_BYTES = 16 << 30  # sparse: what a host sees as the size of its disk
INIT = "/usr/local/lib/gb10-lab/init"
_MORE = (
    "udev", "e2fsprogs", "util-linux",
    "nfs-kernel-server", "nfs-common",
    "rdma-core", "ibverbs-utils", "ibverbs-providers", "perftest",
    "zfsutils-linux",
)  # fmt: skip
# Of the release that the kernel's ZFS modules are of; backports are not taken otherwise.
_PIN = f"Package: *zfs* *nvpair* *uutil* *zpool*\\nPin: release n={BACKPORTS}\\nPin-Priority: 990\\n"
# Started by who needs them; at boot they would only cost time.
_DISABLED = (
    "nfs-server.service", "nfs-blkmap.service", "rpc-statd-notify.service", "nfs-client.target",
    "zfs-import-cache.service", "zfs-import-scan.service", "zfs-mount.service", "zfs-share.service", "zfs-volume-wait.service",
    "zfs-zed.service", "zfs-load-module.service", "zfs.target", "podman.service", "podman-restart.service", "podman.socket",
)  # fmt: skip
_UNWANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
_GUEST = Path(__file__).parent / "guest"


def image() -> Path:
    """A directory of the cache with the image, `disk.img`; two minutes the first time."""
    return cache.build("uml-image", {"suite": SUITE, "packages": PACKAGES, "init": _GUEST / "init"}, _build)


def _build(destination: Path) -> None:
    root = destination / "root"
    archive = mirror(root_filesystem())
    options = ["--mode=root", "--variant=minbase", f"--include={','.join((*PACKAGES, *_MORE))}"]
    options += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"']
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNWANTED]
    options += [f"--setup-hook=printf '{_PIN}' > \"$1/etc/apt/preferences.d/zfs\""]
    options += [f'--customize-hook=chroot "$1" systemctl disable {" ".join(_DISABLED)}']
    sources = [f"deb {archive} {SUITE} main contrib", f"deb {archive} {BACKPORTS} main contrib"]
    run_long(["mmdebstrap", *options, SUITE, str(root), *sources], title="disk image: packages")
    for secret in (root / "etc/ssh").glob("ssh_host_*"):
        secret.unlink()
    for name in ("etc/machine-id", "etc/hostname", "etc/resolv.conf", "etc/hostid"):
        (root / name).unlink(missing_ok=True)
    (root / "etc/resolv.conf").touch()
    init = root / INIT.lstrip("/")
    init.parent.mkdir(parents=True)
    shutil.copy(_GUEST / "init", init)
    init.chmod(0o755)
    disk = destination / "disk.img"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    options = ["-q", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", "-d", str(root)]
    run_long(["mkfs.ext4", *options, str(disk)], title="disk image")
    shutil.rmtree(root)
