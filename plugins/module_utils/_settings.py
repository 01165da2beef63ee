# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swap and kernel settings of a member, as pure functions over the text of the files that hold them.

Why no swap: an overrun then kills one rank; with swap it pages out the whole member, which needs a power cycle (system A).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SYSCTL_FILE = "/etc/sysctl.d/90-gb10.conf"
SWAP_MARK = "#gb10-swap# "
"""Prefix of an fstab line that was switched off: `absent` finds it and gives it back."""


def sysctl_file(settings: Mapping[str, str]) -> str:
    """Content of the sysctl.d file."""
    return "# Written by gb10.cluster (role fabric).\n" + "".join(f"{key} = {value}\n" for key, value in sorted(settings.items()))


def sysctl_path(key: str) -> str:
    """Path below /proc/sys of a key in dotted form; keys with a slash keep dots inside names, as sysctl.d(5) has it."""
    return key if "/" in key else key.replace(".", "/")


def normal(value: str) -> str:
    """A sysctl's value as it compares: white space between numbers is the kernel's own choice."""
    return " ".join(value.split())


def active_swaps(proc_swaps: str) -> list[str]:
    """Devices and files in use, from the text of /proc/swaps."""
    return [line.split()[0] for line in proc_swaps.splitlines()[1:] if line.strip()]


def fstab_without_swap(fstab: str) -> str:
    """The fstab with each active swap entry marked as switched off."""
    return "\n".join(SWAP_MARK + line if re.match(r"^\s*[^#\s]\S*\s+\S+\s+swap\s", line) else line for line in fstab.split("\n"))


def fstab_with_swap(fstab: str) -> str:
    """The fstab with the marked entries given back."""
    return "\n".join(line.removeprefix(SWAP_MARK) for line in fstab.split("\n"))


def swap_units(unit_files: str) -> list[str]:
    """Swap units that may start by themselves, from `systemctl list-unit-files --type=swap` (name, state per line), e.g. zram's.

    Units made from fstab are "generated": the fstab decides about those.
    """
    rows = (line.split() for line in unit_files.splitlines())
    return [row[0] for row in rows if len(row) >= 2 and row[0].endswith(".swap") and row[1] not in ("masked", "generated")]
