# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the lab keeps things: one shared cache of built artefacts and one state directory per lab."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .progress import LabError

# Not a virtual environment's link: a running lab must outlive the environment that started it.
PYTHON = os.path.realpath(sys.executable)
REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_LAB = "lab"
# No dash: kernel objects of a lab are found by the prefix `gb10-<lab>-`, which must not match another lab's.
_LAB_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")


def home() -> Path:
    """Root of everything that the lab keeps (`$XDG_CACHE_HOME/gb10-cluster`, else `~/.cache/gb10-cluster`)."""
    base = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME') or '/root'}/.cache"
    return Path(base) / "gb10-cluster"


def cache_directory() -> Path:
    """Built artefacts, shared by all labs of this user."""
    return home() / "cache"


def lab_name() -> str:
    """The lab that this command is about: `$GB10_LAB`, else `lab`. Raises LabError on a name that cannot be one."""
    name = os.environ.get("GB10_LAB") or DEFAULT_LAB
    if not _LAB_NAME.fullmatch(name):
        raise LabError(f"GB10_LAB={name!r} is no name of a lab: use a letter and then at most 11 letters or digits, all lower case")
    return name


def state_directory(lab: str) -> Path:
    """Everything of one lab: disks, keys, consoles, ssh_config. Gone after `down`."""
    return home() / "labs" / lab


def remove_tree(path: Path) -> None:
    """Delete a tree that we made. Raises LabError if anything is mounted below it (the files there are not ours)."""
    mounted = [point for point in mount_points() if Path(point).is_relative_to(path.absolute())]
    if mounted:
        raise LabError(f"{mounted[0]} is still mounted, so {path} is left as it is: unmount it and run this again")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mount_points() -> list[str]:
    """Mount points of this process's mount namespace (field 5 of mountinfo, octal escapes undone)."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4]) for line in lines]
