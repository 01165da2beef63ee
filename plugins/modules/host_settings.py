#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a member's host needs besides its legs, now and after a reboot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_settings
short_description: Prepare a member's host, now and after a reboot
version_added: 0.1.0
description:
  - Switches off every swap in use, marks the swap entries of C(/etc/fstab) as off, and keeps units from starting that would switch swap on.
  - Writes the kernel parameters to one file in C(/etc/sysctl.d) and sets those that differ in the running kernel.
  - Lets services lock as much memory as they want (C(DefaultLimitMEMLOCK) of systemd), for those that start afterwards.
  - Moves C(/etc/nvidia/cx7-hotplug-enabled) aside, switches the power save of Wi-Fi off, and lets ufw take everything that comes over a leg.
    What a host does not have is left out.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  sysctls:
    description: Kernel parameters by dotted name.
    type: dict
    default: {}
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)); each answers ARP for its own address only, and ufw lets it in.
    type: list
    elements: dict
    default: []
  swap:
    description: V(false) switches swap off and keeps it off; V(true) leaves swap as it is.
    type: bool
    default: false
  hotplug:
    description: V(false) moves the file aside that lets a ConnectX leave the PCI bus; V(true) leaves it.
    type: bool
    default: false
  wifi_power_save:
    description: V(false) switches the power save of Wi-Fi off; V(true) leaves it as it is.
    type: bool
    default: false
  state:
    description:
      - V(absent) takes all of it back. Swap, kernel parameters and limits are as they were after the next boot.
    choices: [present, absent]
    default: present
    type: str
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Keep a reserve of free memory and no swap
  gb10.cluster.host_settings:
    sysctls:
      vm.min_free_kbytes: "1048576"
      vm.watermark_scale_factor: "200"
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _settings
from ..module_utils._files import FileSet, ManagedFile

FSTAB = Path("/etc/fstab")
UFW_RULES = Path("/etc/ufw/user.rules")
NETWORK_MANAGER = Path("/etc/NetworkManager/conf.d")

Step = tuple[list[str], Callable[[], "str | None"]]
"""What is done, in sentences, and its doing, which returns another when it fails."""


def command(*argv: str, timeout: float = 60, cure: str = "") -> Callable[[], str | None]:
    """A step's doing: run a command."""

    def run() -> str | None:
        done = _host.run(argv, timeout=timeout)
        return f"{' '.join(argv)} failed ({done.message}){cure}" if done.status else None

    return run


def unit_texts(suffix: str, names: tuple[str, ...] = ()) -> dict[str, str]:
    """Every unit's text by its name. Reading the directories takes a hundredth of what asking systemctl does."""
    paths = (Path(directory) / name for directory in _settings.UNIT_DIRECTORIES for name in _host.names(directory))
    return {path.name: _host.read(path) or "" for path in paths if path.is_file() and (path.suffix == suffix or path.name in names)}


def wireless() -> list[str]:
    """The wireless devices."""
    return [name for name in _host.names("/sys/class/net") if Path("/sys/class/net", name, "phy80211").exists()]


class Preparation:
    """What is wanted of this host, and what has to be done for it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.parameters = module.params
        self.present = module.params["state"] == "present"
        self.proc = Path(module.params["procfs_root"])
        self.no_swap = self.present and not module.params["swap"]
        self.netdevs = [leg["netdev"] for leg in module.params["legs"]] if self.present else []
        self.sysctls: dict[str, str] = {}
        if self.present:
            wanted = _settings.leg_sysctls(self.netdevs) | module.params["sysctls"]
            self.sysctls = {key: _settings.normal(str(value)) for key, value in wanted.items()}
        self.files = FileSet("host-settings", self._files())
        fstab = (_host.read_bytes(FSTAB) or b"").decode()
        self.fstab = (fstab, _settings.fstab_without_swap(fstab) if self.no_swap else _settings.fstab_with_swap(fstab))

    def unknown(self) -> list[str]:
        """Kernel parameters that this kernel does not have."""
        return [key for key in self.sysctls if not self._live(key).is_file()]

    def _live(self, key: str) -> Path:
        return self.proc / "sys" / _settings.sysctl_path(key)

    def _files(self) -> Iterator[ManagedFile]:
        if self.sysctls:
            yield ManagedFile(_settings.SYSCTL_FILE, _settings.sysctl_file(self.sysctls).encode())
        if self.present:
            yield _settings.MEMLOCK_FILE
        if self.no_swap:
            yield from map(_settings.never_started, _settings.swap_units(unit_texts(".swap", _settings.ZRAM_SERVICES)))
        if self.present and not self.parameters["wifi_power_save"] and wireless() and NETWORK_MANAGER.is_dir():
            yield _settings.WIFI_FILE

    def diff(self) -> list[dict[str, str]]:
        """The changes of files as Ansible shows them."""
        before, after = self.fstab
        fstab = [{"before_header": str(FSTAB), "after_header": str(FSTAB), "before": before, "after": after}] if before != after else []
        return [change.diff() for change in self.files.changes] + fstab

    def steps(self) -> Iterator[Step]:
        """All that is to be done; nothing where the host is as wanted."""
        if self.no_swap:
            for swap in _settings.active_swaps(_host.read(self.proc / "swaps") or ""):
                cure = ": free memory on this member and run again"
                yield [f"switch off swap {swap}"], command("swapoff", swap, timeout=600, cure=cure)
        if self.fstab[0] != self.fstab[1]:
            yield [f"{'mark' if self.no_swap else 'give back'} swap entries in {FSTAB}"], self._write_fstab
        paths = [change.path for change in self.files.changes]
        if paths:
            yield [f"{'write' if change.after else 'remove'} {change.path}" for change in self.files.changes], self.files.apply
        if any(path.startswith("/etc/systemd/") for path in paths):
            yield ["have systemd read its files again"], command("systemctl", "daemon-reload")
        for key, value in self.sysctls.items():
            was = _settings.normal(_host.read(self._live(key)) or "")
            if was != value:
                yield [f"set {key} to {value} (was {was})"], lambda key=key, value=value: self._set(key, value)
        yield from self._hotplug()
        yield from self._wifi(paths)
        yield from self._firewall()

    def _write_fstab(self) -> None:
        _host.write(FSTAB, self.fstab[1].encode(), FSTAB.stat().st_mode & 0o7777)

    def _set(self, key: str, value: str) -> str | None:
        try:
            self._live(key).write_text(value, encoding="ascii")
        except OSError as error:
            return f"the kernel refuses {key} = {value} ({error.strerror}): correct fabric_sysctls_extra"
        return None

    def _hotplug(self) -> Iterator[Step]:
        aside, back = self.present and not self.parameters["hotplug"], not self.present
        source, target = (_settings.HOTPLUG_FILE, _settings.HOTPLUG_ASIDE)[:: -1 if back else 1]
        if (aside or back) and os.path.exists(source):
            yield [f"move {source} to {target}"], lambda: os.replace(source, target)

    def _wifi(self, paths: list[str]) -> Iterator[Step]:
        if _settings.WIFI_FILE.path in paths:
            yield ["have NetworkManager read its files again"], command("nmcli", "general", "reload", "conf")
        if self.present and not self.parameters["wifi_power_save"]:
            for device in wireless():
                if _host.run(["iw", "dev", device, "get", "power_save"]).out.strip().endswith("on"):
                    yield [f"switch the power save of {device} off"], command("iw", "dev", device, "set", "power_save", "off")

    def _firewall(self) -> Iterator[Step]:
        rules = _host.read(UFW_RULES)
        if rules is None:
            return
        allowed = _settings.ufw_allowed(rules)
        for netdev in self.netdevs:
            if netdev not in allowed:
                yield (
                    [f"let ufw take what comes over {netdev}"],
                    command("ufw", "allow", "in", "on", netdev, "comment", _settings.UFW_COMMENT),
                )
        for netdev, comment in allowed.items():
            if comment == _settings.UFW_COMMENT and netdev not in self.netdevs:
                yield [f"take ufw's rule for {netdev} back"], command("ufw", "delete", "allow", "in", "on", netdev)


def main() -> None:
    """Compare, and where it is no check, act."""
    arguments: dict[str, Any] = {name: {"type": "bool", "default": False} for name in ("swap", "hotplug", "wifi_power_save")}
    module = AnsibleModule(
        argument_spec={
            "sysctls": {"type": "dict", "default": {}},
            "legs": {"type": "list", "elements": "dict", "default": []},
            **arguments,
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "procfs_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    preparation = Preparation(module)
    if unknown := preparation.unknown():
        module.fail_json(msg=f"this kernel has no parameter {', '.join(unknown)}: correct fabric_sysctls_extra, or look for the device")
    steps, diff = list(preparation.steps()), preparation.diff()
    if not module.check_mode:
        for _actions, do in steps:
            if failure := do():
                module.fail_json(msg=failure)
    actions = [action for done, _do in steps for action in done]
    module.exit_json(changed=bool(actions), actions=actions, diff=diff)


if __name__ == "__main__":
    main()
