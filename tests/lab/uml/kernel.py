# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts' kernel, from Debian's own sources: User-Mode Linux with RDMA in software, an NFS server, netem and ZFS.

Sources come by apt with apt's own verification, from the backports of the suite that the hosts are of. The build wants 2.5 GB for as
long as it lasts; what stays is the kernel (15 MB) and its modules (8 MB). Nothing newer than the pinned pair is taken by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .. import cache
from ..progress import run_long, say, step
from ..rootfs import SUITE, root_filesystem

BACKPORTS = f"{SUITE}-backports"
# The newest pair of that suite that fits together: ZFS 2.4 knows kernels up to 7.2.
LINUX = "linux-source-7.2"
ZFS = "zfs-dkms"
PREREQUISITES = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "patch": "patch",
    "xz": "xz-utils",
}  # command -> Debian package that brings it
_HERE = Path(__file__).parent
_MAKE = ["nice", "-n", "10", "make", "--silent"]


def kernel() -> Path:
    """A directory of the cache with the kernel, `linux`, and the tree of its modules, `modules/lib/modules/<release>`."""
    inputs = {"linux": LINUX, "zfs": ZFS, "config": _HERE / "kernel.config", "patch": _HERE / "vector.patch"}
    return cache.build("uml-kernel", inputs, _build)


def mirror(root: Path) -> str:
    """The package archive that a root file system was made from, as an address."""
    words = (root / "etc/apt/sources.list").read_text().split()
    return next(word for word in words if "://" in word)


def _build(destination: Path) -> None:
    workshop = destination / "workshop"
    with step("sources of kernel and ZFS"):
        source, zfs = _sources(workshop)
    objects = workshop / "objects"
    objects.mkdir()
    jobs = f"--jobs={len(os.sched_getaffinity(0))}"
    make = [*_MAKE, f"--directory={source}", "ARCH=um", f"O={objects}"]
    with step("kernel"):
        run_long([*make, "defconfig"], title="kernel: configuration")
        with (objects / ".config").open("a") as config:
            config.write((_HERE / "kernel.config").read_text())
        run_long([*make, "olddefconfig"], title="kernel: configuration")
        # Without --silent: its lines are the progress.
        run_long([word for word in make if word != "--silent"] + [jobs], title="kernel")
        shutil.copy(objects / "linux", destination / "linux")
        install = [f"INSTALL_MOD_PATH={destination}/modules", "INSTALL_MOD_STRIP=1", "modules_install"]
        run_long([*make, *install], title="kernel: modules")
    with step("ZFS"):
        options = ["--with-config=kernel", f"--with-linux={source}", f"--with-linux-obj={objects}", "KERNEL_ARCH=um"]
        run_long(["nice", "-n", "10", "sh", "./configure", *options], title="ZFS: configuration", cwd=zfs)
        run_long([*_MAKE[:-1], jobs, "--directory=module"], title="ZFS", cwd=zfs)
        (release,) = (destination / "modules/lib/modules").iterdir()
        extra = release / "extra"
        extra.mkdir()
        for module in (zfs / "module").glob("*.ko"):
            shutil.copy(module, extra)
        run_long(["strip", "--strip-debug", *map(str, extra.glob("*.ko"))], title="ZFS: modules")
        for link in ("build", "source"):
            (release / link).unlink(missing_ok=True)
    shutil.rmtree(workshop)


def _sources(workshop: Path) -> tuple[Path, Path]:
    """Kernel and ZFS source trees below `workshop`, ours patched."""
    packages = workshop / "packages"
    for place in ("lists/partial", "cache/archives/partial", "packages", "unpacked"):
        (workshop / place).mkdir(parents=True)
    # A configuration of apt's own, so that the machine's sources and lists stay what they are.
    sources = workshop / "sources.list"
    sources.write_text(f"deb {mirror(root_filesystem())} {BACKPORTS} main contrib\n")
    places = {"Dir::Etc::sourcelist": sources, "Dir::State::lists": workshop / "lists", "Dir::Cache": workshop / "cache"}
    apt = ["apt-get", "--quiet", "-o", "Dir::Etc::sourceparts=/dev/null"]
    for name, place in places.items():
        apt += ["-o", f"{name}={place}"]
    run_long([*apt, "update"], title="sources: lists")
    run_long([*apt, "download", LINUX, ZFS], title="sources: packages", cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        say(f"sources: {package.name}")
        run_long(["dpkg-deb", "--extract", str(package), str(workshop / "unpacked")], title="sources: packages")
    place = workshop / "unpacked/usr/src"
    run_long(["tar", "--extract", f"--file={place}/{LINUX}.tar.xz", f"--directory={workshop}"], title="sources: unpacking")
    source = workshop / LINUX
    with (_HERE / "vector.patch").open() as change:
        subprocess.run(["patch", "--strip=1", "--silent", f"--directory={source}"], check=True, stdin=change, timeout=60)
    (zfs,) = place.glob("zfs-*")
    return source, zfs
