# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What makes the shared image one particular host: an archive that its first boot unpacks (guest/init)."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from ..overlay import MASKED, identity
from ..ssh import Keys
from ..topology import HCA_OF, MANAGEMENT_NETDEV, MANAGEMENT_PREFIX_LENGTH, Host, Topology

_RDMA = "/usr/local/lib/gb10-lab/rdma"
_SOURCES = Path(__file__).parent / "guest"

_FSTAB = """\
# <file system> <mount point> <type> <options> <dump> <pass>
/dev/ubda / ext4 defaults,noatime 0 0
/swap.img none swap sw 0 0
"""

_MANAGEMENT = """\
[Match]
Name={netdev}

[Network]
Address={address}/{prefix_length}
LinkLocalAddressing=no
IPv6AcceptRA=no
"""

# A driver leaves its devices with 1500 bytes, whatever they are capable of.
_LINK = "[Match]\nMACAddress={mac}\n\n[Link]\nName={netdev}\nMTUBytes=1500\n"

_RDMA_UNIT = """\
[Unit]
Description=The RDMA devices of the legs
Wants={devices}
After={devices} systemd-modules-load.service
Before=network-pre.target
Wants=network-pre.target
DefaultDependencies=no

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={program} {ports}

[Install]
WantedBy=multi-user.target
"""


def files(host: Host, topology: Topology, keys: Keys) -> dict[str, tuple[int, str]]:
    """Path in the host -> (mode, text)."""
    netdevs = {MANAGEMENT_NETDEV: host.management_mac, **legs(host, topology)}
    devices = " ".join(f"sys-subsystem-net-devices-{netdev}.device" for netdev in HCA_OF)
    ports = " ".join(f"{netdev}={hca}" for netdev, hca in HCA_OF.items())
    management = _MANAGEMENT.format(netdev=MANAGEMENT_NETDEV, address=host.address, prefix_length=MANAGEMENT_PREFIX_LENGTH)
    return {
        **identity(host, topology, keys),
        "/etc/fstab": (0o644, _FSTAB),
        "/etc/systemd/network/00-management.network": (0o644, management),
        **{f"/etc/systemd/network/10-{name}.link": (0o644, _LINK.format(netdev=name, mac=mac)) for name, mac in netdevs.items()},
        "/etc/systemd/system/gb10-lab-rdma.service": (0o644, _RDMA_UNIT.format(devices=devices, program=_RDMA, ports=ports)),
        _RDMA: (0o755, (_SOURCES / "rdma").read_text()),
    }


def links() -> dict[str, str]:
    """Path in the host -> target: units enabled and masked."""
    wants = "/etc/systemd/system/multi-user.target.wants"
    return {
        f"{wants}/gb10-lab-rdma.service": "/etc/systemd/system/gb10-lab-rdma.service",
        f"{wants}/systemd-networkd.service": "/usr/lib/systemd/system/systemd-networkd.service",
        **{f"/etc/systemd/system/{unit}": "/dev/null" for unit in MASKED},
    }


def legs(host: Host, topology: Topology) -> dict[str, str]:
    """Device -> MAC address of a host's ports, in their order."""
    return {port.netdev: port.mac for port in topology.ports() if port.host == host}


def write(archive: Path, host: Host, topology: Topology, keys: Keys, modules: Path) -> None:
    """Write the archive of one host: its files, and the modules of its kernel (the tree `lib/modules` of a build)."""
    with tarfile.open(archive, "w") as tar:
        for path, (mode, text) in files(host, topology, keys).items():
            _directories(tar, path)
            entry = tarfile.TarInfo(path.lstrip("/"))
            body = text.encode()
            entry.mode, entry.size = mode, len(body)
            tar.addfile(entry, io.BytesIO(body))
        for path, target in links().items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        # /lib is a link to usr/lib there: an archive that holds `lib/` would put a directory in its place.
        tar.add(modules, "usr/lib/modules")
    with archive.open("ab") as file:  # a block device ends with a whole sector
        file.truncate(-(-archive.stat().st_size // 4096) * 4096)


def _directories(tar: tarfile.TarFile, path: str) -> None:
    """sshd refuses keys in a directory that others could have written to: the only one whose mode matters."""
    if path.startswith("/root/.ssh/"):
        entry = tarfile.TarInfo("root/.ssh")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(entry)
