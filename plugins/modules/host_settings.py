#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Swap off and kernel settings on, now and after a reboot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_settings
short_description: Switch swap off and set kernel parameters, now and after a reboot
version_added: 0.1.0
description:
  - Switches off every swap in use, marks the swap entries of C(/etc/fstab) as off, and masks swap units that would start by themselves.
  - Writes the kernel parameters to one file in C(/etc/sysctl.d) and sets those that differ in the running kernel.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  sysctls:
    description: Kernel parameters by dotted name.
    type: dict
    default: {}
  swap:
    description: V(false) switches swap off and keeps it off; V(true) leaves swap as it is.
    type: bool
    default: false
  state:
    description: V(absent) removes the sysctl file and gives the swap entries of C(/etc/fstab) back; both take effect at the next boot.
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

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _settings
from ..module_utils._files import FileSet, ManagedFile

FSTAB = "/etc/fstab"


def swap_unit_texts() -> dict[str, str]:
    """Every swap unit's text. Reading the directories takes a hundredth of what asking systemctl does."""
    paths = (
        Path(directory) / name for directory in _settings.UNIT_DIRECTORIES for name in _host.names(directory) if name.endswith(".swap")
    )
    return {path.name: _host.read(path) or "" for path in paths}


def main() -> None:
    """Compare, and where it is no check, act."""
    module = AnsibleModule(
        argument_spec={
            "sysctls": {"type": "dict", "default": {}},
            "swap": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "procfs_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    proc = Path(module.params["procfs_root"])
    present = module.params["state"] == "present"
    sysctls = {key: _settings.normal(str(value)) for key, value in module.params["sysctls"].items()} if present else {}
    keep_swap_off = present and not module.params["swap"]

    unknown = [key for key in sysctls if not (proc / "sys" / _settings.sysctl_path(key)).is_file()]
    if unknown:
        module.fail_json(msg=f"this kernel has no parameter {', '.join(unknown)}: correct fabric_sysctls")

    files = FileSet("host-settings", [ManagedFile(_settings.SYSCTL_FILE, _settings.sysctl_file(sysctls).encode())] if sysctls else [])
    fstab = _host.read_bytes(FSTAB)
    fstab_text = (fstab or b"").decode()
    new_fstab = _settings.fstab_without_swap(fstab_text) if keep_swap_off else _settings.fstab_with_swap(fstab_text)
    swaps = _settings.active_swaps(_host.read(proc / "swaps") or "") if keep_swap_off else []
    units = _settings.swap_units(swap_unit_texts()) if keep_swap_off else []
    live = {key: _settings.normal(_host.read(proc / "sys" / _settings.sysctl_path(key)) or "") for key in sysctls}
    wrong = {key: value for key, value in sysctls.items() if live[key] != value}

    actions = [f"{'write' if change.after else 'remove'} {change.path}" for change in files.changes]
    actions += [f"set {key} to {value} (was {live[key]})" for key, value in wrong.items()]
    actions += [f"switch off swap {swap}" for swap in swaps] + [f"mask {unit}" for unit in units]
    actions += [f"mark swap entries in {FSTAB}"] if new_fstab != fstab_text else []
    diffs = [change.diff() for change in files.changes]
    if new_fstab != fstab_text:
        diffs.append({"before_header": FSTAB, "after_header": FSTAB, "before": fstab_text, "after": new_fstab})

    if not module.check_mode:
        for swap in swaps:
            done = _host.run(["swapoff", swap], timeout=600)
            if done.status:
                module.fail_json(msg=f"swap {swap} cannot be switched off ({done.message}): free memory on this member and run again")
        if units:
            _host.run(["systemctl", "mask", *units])
        if new_fstab != fstab_text:
            _host.write(FSTAB, new_fstab.encode(), Path(FSTAB).stat().st_mode & 0o7777)
        if files.changes:
            files.apply()
        for key, value in wrong.items():
            try:
                (proc / "sys" / _settings.sysctl_path(key)).write_text(value, encoding="ascii")
            except OSError as error:
                module.fail_json(msg=f"the kernel refuses {key} = {value} ({error.strerror}): correct fabric_sysctls")
    module.exit_json(changed=bool(actions), actions=actions, diff=diffs)


if __name__ == "__main__":
    main()
