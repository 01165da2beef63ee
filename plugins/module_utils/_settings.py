# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swap and kernel settings of a member, as pure functions over the text of the files that hold them.

Why no swap: an overrun then kills one rank; with swap it pages out the whole member, which needs a power cycle (system A).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SYSCTL_FILE = "/etc/sysctl.d/90-gb10.conf"
UNIT_DIRECTORIES = (
    "/usr/lib/systemd/system",
    "/usr/local/lib/systemd/system",
    "/run/systemd/generator",
    "/run/systemd/system",
    "/etc/systemd/system",
)
"""Where systemd finds units, a later place before an earlier one."""
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


def swap_units(units: Mapping[str, str]) -> list[str]:
    """Swap units that may start by themselves, such as zram's, from each unit's text (empty where it is masked).

    Units made from fstab are left out: the fstab decides about those.
    """
    return sorted(name for name, text in units.items() if text and "SourcePath=/etc/fstab" not in text)
