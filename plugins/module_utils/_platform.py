# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel, driver and firmware of a member against those that public reports call good or broken.

Sources: masquerator-coder and christopherowen (driver and kernel pairs, `kho=off`), NVIDIA/NV-Kernels#590 and
MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#259 (memory registration on kernel 7.0). A host that has no NVIDIA driver is
judged by nothing here but the known fault of an NVIDIA kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _host
from ._findings import REFUSE, WARN, Finding

# (kernel, driver) with which fabrics are reported to work; an empty driver where the report names none.
KNOWN_GOOD = (
    ("6.17.0-1031-nvidia", "580.173.02"),
    # Named beside 1031 as the way back from kernel 7.0.
    ("6.17.0-1032-nvidia", ""),
    # DGX OS 26.09; only with kho=off, see registration_fault.
    ("7.0.0-1019-nvidia", "580.178.04"),
)
# Seen on Sparks whose fabric works. A ConnectX-7 has the part number 28 in front.
KNOWN_FIRMWARE = ("28.45.4028",)

_NVIDIA_KERNEL = re.compile(r"(\d+)\.(\d+)\.\S*-nvidia\b")
_SPARK_FIRMWARE = "28."


def read_platform(procfs_root: str = "/proc", sysfs_root: str = "/sys") -> dict[str, Any]:
    """The facts that `judge_platform` takes, without those that the host does not have.

    `kernel`, `driver`: versions as text; `firmware`: version by HCA; `cmdline`: the kernel's; `cma_total_kib`, `cma_free_kib`.
    """
    proc, system = Path(procfs_root), Path(sysfs_root)
    hcas = system / "class/infiniband"
    facts: dict[str, Any] = {
        "kernel": _host.read(proc / "sys/kernel/osrelease"),
        "driver": _host.read(system / "module/nvidia/version"),
        "cmdline": _host.read(proc / "cmdline"),
        "firmware": {name: text for name in _host.names(hcas) if (text := _host.read(hcas / name / "fw_ver"))},
    }
    for key, field in (("cma_total_kib", "CmaTotal"), ("cma_free_kib", "CmaFree")):
        match = re.search(rf"^{field}:\s+(\d+) kB$", _host.read(proc / "meminfo") or "", re.MULTILINE)
        facts[key] = int(match[1]) if match else None
    return {key: value for key, value in facts.items() if value is not None}


def judge_platform(facts: Mapping[str, Any]) -> list[Finding]:
    """What stands against serving on a host with these facts (`read_platform`); what is not known is not judged."""
    findings = []
    if fault := registration_fault(facts):
        findings.append(Finding(REFUSE, "kernel-registration", fault))
    kernel, driver = facts.get("kernel"), facts.get("driver")
    if kernel and driver and not {(kernel, driver), (kernel, "")} & set(KNOWN_GOOD):
        findings.append(
            Finding(
                WARN,
                "platform-unknown",
                f"kernel {kernel} with driver {driver} is in no public report of a working fabric: go on, "
                f"and suspect the pair first when something fails (known good: {' with '.join(KNOWN_GOOD[0])})",
            )
        )
    for hca, version in sorted(facts.get("firmware", {}).items()):
        if version.startswith(_SPARK_FIRMWARE) and version not in KNOWN_FIRMWARE:
            findings.append(
                Finding(
                    WARN,
                    "firmware-unknown",
                    f"HCA {hca} has firmware {version}, which is in no public report (known good: {', '.join(KNOWN_FIRMWARE)}): "
                    "go on, and keep it the same on all members",
                )
            )
    return findings


def registration_fault(facts: Mapping[str, Any]) -> str:
    """The sentence on the known fault of memory registration, or an empty one.

    Kernel 7.0's handover (KHO) marks its scratch memory as CMA without counting it: CmaTotal is 0 and CmaFree is more, and
    ibv_reg_mr fails with ENOMEM even for 1 KB. `kho=off` or a kernel 6.17 cures it.
    """
    kernel = facts.get("kernel", "")
    match = _NVIDIA_KERNEL.match(kernel)
    total, free = facts.get("cma_total_kib"), facts.get("cma_free_kib", 0)
    if not match or total is None or "kho=off" in facts.get("cmdline", "").split():
        return ""
    cure = "boot with kho=off, or the kernel 6.17.0-1031-nvidia"
    if free > total:
        return f"kernel {kernel} counts {free} kB of CMA as free out of {total} kB, so RDMA cannot register memory: {cure}"
    if total == 0:
        return f"kernel {kernel} has no CMA (CmaTotal is 0), so RDMA cannot register memory: {cure}"
    return ""


def differences(members: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Kernels, drivers and firmwares that are not the same on all members: a suspect when one of them is slow (graham33)."""
    findings = []
    for key in ("kernel", "driver", "firmware"):
        values = {name: _one(facts[key]) for name, facts in members.items() if facts.get(key)}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            findings.append(Finding(WARN, f"{key}-differs", f"the members' {key} differs ({listed}): bring them to the same version"))
    return findings


def _one(value: Any) -> str:
    """A version, or all versions of a member's HCAs."""
    return " and ".join(sorted(set(value.values()))) if isinstance(value, Mapping) else str(value)
