# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lower layer of the engine image: Debian 12's Python 3.11 and the few files that vLLM needs besides Python packages.

Debian 12 because its Python is the one for which every wheel of the lock exists. Packages are only unpacked, not configured: no
package manager, no log, no cache is left in the tree, so the same packages give the same bytes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .. import cache
from ..paths import remove_tree
from ..progress import run_long

SUITE = "bookworm"
PYTHON = "python3.11"
PACKAGES = (
    "base-files", "base-passwd", "coreutils", "dash", "libc-bin",
    PYTHON, "libpython3.11-stdlib",
    "libnuma1",    # vLLM's CPU kernels link it
    "util-linux",  # lscpu: vLLM's workers ask it which cores they may use, and die without it
    "libstdc++6",
)  # fmt: skip
_UNWANTED = (
    "/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/bash-completion/*",
    "/usr/share/perl/*", "/usr/share/perl5/*", "/usr/lib/*/perl/*", "/usr/lib/*/perl-base/*", "/usr/bin/perl*",  # for package scripts
    "/usr/lib/*/gconv/*",
)  # fmt: skip
# Of the machine that builds, or of a package manager that is not there.
_REMAINS = ("etc/hostname", "etc/resolv.conf", "etc/fstab", "etc/apt", "etc/dpkg", "var/lib/apt", "var/lib/dpkg", "var/cache", "var/log")


def base_tree() -> Path:
    """The root file system of the lower layer as a directory of the cache; some 20 s the first time."""
    return cache.build("engine-base", {"suite": SUITE, "packages": PACKAGES, "machine": os.uname().machine}, _build) / "root"


def _build(destination: Path) -> None:
    root = destination / "root"
    run_long(
        [
            "mmdebstrap", "--mode=root", "--variant=extract", "--components=main", f"--include={','.join(PACKAGES)}",
            "--aptopt=Acquire::Languages \"none\"", "--aptopt=APT::Install-Recommends \"false\"",
            *[f"--dpkgopt=path-exclude={pattern}" for pattern in _UNWANTED], SUITE, str(root),
        ],
        title="engine base",
    )  # fmt: skip
    for path in _REMAINS:
        remove_tree(root / path)
    # What the packages' own scripts would have done.
    for name in ("passwd", "group"):
        shutil.copyfile(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
    (root / "models").mkdir()
    (root / "usr/bin/python3").symlink_to(PYTHON)
    # The time of a source differs from build to build; a hash that nobody checks does not, and costs nothing at start.
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", f"/usr/lib/{PYTHON}"]
    run_long(["chroot", str(root), "/usr/bin/env", "PYTHONHASHSEED=0", f"/usr/bin/{PYTHON}", *compile_all], title="engine base: byte code")
