# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swap, kernel and other settings of a member, as pure functions over the text of the files that hold them.

Why no swap: an overrun then kills one rank; with swap it pages out the whole member, which needs a power cycle (system A).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ._files import ManagedFile

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


ZRAM_SERVICES = ("zramswap.service", "zram-config.service")
"""Services that make and switch on swap without a swap unit: of Debian's zram-tools, and Ubuntu's zram-config."""


def swap_units(units: Mapping[str, str]) -> list[str]:
    """Units that may switch swap on by themselves, such as zram's, from each unit's text (empty where it is masked).

    Units made from fstab are left out: the fstab decides about those.
    """
    return sorted(name for name, text in units.items() if text and "SourcePath=/etc/fstab" not in text)


def never_started(unit: str) -> ManagedFile:
    """A drop-in by which a unit is skipped, wherever the unit itself is from. Unlike a mask it is a file that can be taken away again."""
    text = "# Written by gb10.cluster (role fabric).\n[Unit]\nConditionPathExists=!/\n"
    return ManagedFile(f"/etc/systemd/system/{unit}.d/90-gb10.conf", text.encode())


def leg_sysctls(netdevs: Iterable[str]) -> dict[str, str]:
    """ARP of the legs: both halves of a cage see the same wire, and Linux would answer for either address from either.

    Source: graham33/nixos-dgx-spark. udev sets them again whenever a device appears (99-systemd.rules).
    """
    wanted = (("arp_ignore", "1"), ("arp_announce", "2"))
    return {f"net/ipv4/conf/{netdev}/{key}": value for netdev in netdevs for key, value in wanted}


MEMLOCK_FILE = ManagedFile(
    "/etc/systemd/system.conf.d/90-gb10.conf", b"# Written by gb10.cluster (role fabric).\n[Manager]\nDefaultLimitMEMLOCK=infinity\n"
)
"""Locked memory of services, of ssh and of what they start: with 8 MiB, RDMA registration fails with ENOMEM (graham33/nixos-dgx-spark).

Of systemd and not of pam_limits, which shuts the user out where a limit may not be raised.
"""

HOTPLUG_FILE = "/etc/nvidia/cx7-hotplug-enabled"
"""While it is there, the reboot of a neighbour can take the local ConnectX off the PCI bus (masquerator-coder)."""
HOTPLUG_ASIDE = f"{HOTPLUG_FILE}.off-by-gb10"

WIFI_FILE = ManagedFile(
    "/etc/NetworkManager/conf.d/90-gb10-wifi.conf",
    # 2 is "disable" (nm-settings: 802-11-wireless.powersave). The section wins over a distribution's [connection].
    b"# Written by gb10.cluster (role fabric).\n[connection-gb10-wifi]\nmatch-device=type:wifi\nwifi.powersave=2\n",
)
"""Power save of Wi-Fi loses packets silently, and Ansible or the ranks may meet there (FujitsuPolycom/sparkring)."""

UFW_COMMENT = "gb10.cluster"
_UFW_LEG = re.compile(r"^### tuple ### allow any any 0\.0\.0\.0/0 any 0\.0\.0\.0/0 in_(\S+)(?: comment=([0-9a-f]+))?$", re.MULTILINE)


def ufw_allowed(user_rules: str) -> dict[str, str]:
    """Devices from which ufw takes everything, with the rule's comment, from the text of its user.rules."""
    return {match[1]: bytes.fromhex(match[2] or "").decode("utf-8", "replace") for match in _UFW_LEG.finditer(user_rules)}
