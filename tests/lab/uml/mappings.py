# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many mappings a process of this machine may have: as many pages as a process of a host touches, for few lie side by side.

Beyond the kernel's default, 65530 or 256 MiB, a page of a host's process cannot be mapped, and that process faults on it for ever.
"""

from __future__ import annotations

from pathlib import Path

from ..progress import LabError

NEEDED = 1 << 20  # 4 GiB in pages: more than a host has
SETTING = Path("/proc/sys/vm/max_map_count")
BEFORE = Path("/run/gb10-lab-max_map_count")
"""The machine's own value, while it is another."""


def allow() -> None:
    """Raise the machine's limit to what hosts need. Raises LabError where that is refused."""
    machines = int(SETTING.read_text())
    if machines >= NEEDED:
        return
    if not BEFORE.exists():
        BEFORE.write_text(f"{machines}\n")
    try:
        SETTING.write_text(f"{NEEDED}\n")
    except OSError as error:
        raise LabError(
            f"vm.max_map_count is {machines} and cannot be raised ({error.strerror}): set it to {NEEDED} on this machine"
        ) from None


def give_back() -> None:
    """The machine's own value again; nothing where it never was another."""
    if BEFORE.exists():
        SETTING.write_text(BEFORE.read_text())
        BEFORE.unlink()
