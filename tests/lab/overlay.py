# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What makes the shared root file system one particular host: the files that are laid over it before its first boot."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

from .ssh import Keys
from .topology import HCA_OF, MANAGEMENT_NETDEV, Host, Topology

SYSFS_ROOT = "/run/gb10-lab/sys"
_PROGRAMS = "/usr/local/lib/gb10-lab"
# podman warns at every call where the machine still has one control group tree per controller
QUIET_PODMAN = "PODMAN_IGNORE_CGROUPSV1_WARNING"
INIT = f"{_PROGRAMS}/init"
_HCA = f"{_PROGRAMS}/hca"
_OCI_CLAMP = f"{_PROGRAMS}/oci-clamp"
_SOURCES = Path(__file__).parent / "guest"

# Cannot work in a namespace, or would only cost time: each boot of three hosts on two cores counts.
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
    "getty.target", "console-getty.service", "netavark-dhcp-proxy.socket", "netavark-dhcp-proxy.service", "podman-auto-update.timer",
    "systemd-networkd-wait-online.service",
)  # fmt: skip

_HCA_UNIT = """\
[Unit]
Description=RDMA devices of the legs, as a ConnectX would show them

[Service]
Type=notify
RuntimeDirectory=gb10-lab
ExecStart={program} {root} {ports}

[Install]
WantedBy=multi-user.target
"""

_UDEV_UNITS = ("systemd-udevd.service", "systemd-udevd-control.socket", "systemd-udevd-kernel.socket")
# udevd would not start where /sys is read-only, and `netplan apply` wants it to answer.
_UDEV_ANYWAY = "[Unit]\nConditionPathIsReadWrite=\n"

# Swap is the machine's, and lab hosts share its kernel; the line is what a fabric that keeps swap off has to find here.
_FSTAB = "# <file system> <mount point> <type> <options> <dump> <pass>\n/swap.img none swap sw 0 0\n"

# The last two: a test that often connects and leaves would be shut out for a while.
_SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
UseDNS no
PerSourcePenalties no
MaxStartups 100
"""

# An engine in a host of this lab. nproc and nofile: nothing here may raise a limit above the machine's own (guest/oci_clamp.py).
_CONTAINERS = """\
[containers]
default_ulimits = ["nofile={nofile}", "nproc={nproc}"]

[engine]
runtime = "crun-clamp"

[engine.runtimes]
crun-clamp = ["{program}"]
"""


# Without a limit of its own for a container: the daemon's are the machine's.
_DOCKER = """\
{{"default-runtime": "crun-clamp", "runtimes": {{"crun-clamp": {{"path": "{program}"}}}}}}
"""


def identity(host: Host, topology: Topology, keys: Keys) -> dict[str, tuple[int, str]]:
    """Path in the host -> (mode, text) for what any host of the lab is given, whatever it is made of."""
    names = "".join(f"{other.address} {other.name}\n" for other in topology.hosts)
    return {
        "/etc/hostname": (0o644, f"{host.name}\n"),
        "/etc/machine-id": (0o444, hashlib.sha256(keys.host_public[host.name].encode()).hexdigest()[:32] + "\n"),
        "/etc/hosts": (0o644, f"127.0.0.1 localhost\n::1 localhost\n{names}"),
        "/etc/ssh/ssh_host_ed25519_key": (0o600, keys.host_private[host.name]),
        "/etc/ssh/ssh_host_ed25519_key.pub": (0o644, keys.host_public[host.name]),
        "/etc/ssh/sshd_config.d/10-lab.conf": (0o644, _SSHD),
        "/root/.ssh/authorized_keys": (0o600, keys.client_public),
        # newer than /usr, so that a first boot does not rebuild the caches of ld.so, the journal and the hardware database
        "/etc/.updated": (0o644, ""),
        "/var/.updated": (0o644, ""),
    }


def files(host: Host, topology: Topology, keys: Keys, engine: str = "podman") -> dict[str, tuple[int, str]]:
    """Path in the host -> (mode, text) for everything that is laid over the root file system."""
    ports = " ".join(f"{netdev}={hca}" for netdev, hca in HCA_OF.items())
    return {
        **identity(host, topology, keys),
        "/etc/fstab": (0o644, _FSTAB),
        "/etc/systemd/network/00-management.network": (0o644, f"[Match]\nName={MANAGEMENT_NETDEV}\n\n[Link]\nUnmanaged=yes\n"),
        "/etc/systemd/system/gb10-lab-hca.service": (0o644, _HCA_UNIT.format(program=_HCA, root=SYSFS_ROOT, ports=ports)),
        **_engine_settings(engine),
        **{f"/etc/systemd/system/{unit}.d/10-lab.conf": (0o644, _UDEV_ANYWAY) for unit in _UDEV_UNITS},
        "/etc/environment": (0o644, f"{QUIET_PODMAN}=1\n"),
        "/etc/systemd/system.conf.d/10-lab.conf": (0o644, f"[Manager]\nDefaultEnvironment={QUIET_PODMAN}=1\n"),
        INIT: (0o755, (_SOURCES / "init").read_text()),
        _HCA: _program("hca.py"),
        _OCI_CLAMP: _program("oci_clamp.py"),
    }


def _engine_settings(engine: str) -> dict[str, tuple[int, str]]:
    if engine == "docker":
        return {"/etc/docker/daemon.json": (0o644, _DOCKER.format(program=_OCI_CLAMP))}
    limits = {"nofile": _own_limit(resource.RLIMIT_NOFILE), "nproc": _own_limit(resource.RLIMIT_NPROC)}
    return {"/etc/containers/containers.conf.d/10-lab.conf": (0o644, _CONTAINERS.format(**limits, program=_OCI_CLAMP))}


def links() -> dict[str, str]:
    """Path in the host -> target: units enabled and masked."""
    wants = "/etc/systemd/system/multi-user.target.wants"
    return {
        f"{wants}/gb10-lab-hca.service": "/etc/systemd/system/gb10-lab-hca.service",
        f"{wants}/systemd-networkd.service": "/usr/lib/systemd/system/systemd-networkd.service",
        **{f"/etc/systemd/system/{unit}": "/dev/null" for unit in MASKED},
    }


def write(directory: Path, host: Host, topology: Topology, keys: Keys, engine: str = "podman") -> None:
    """Write the overlay of one host as a tree below `directory`, with the modes that it will have there."""
    directory.mkdir()
    directory.chmod(0o755)  # becomes the host's `/`, whatever the umask here is
    for path, (mode, text) in files(host, topology, keys, engine).items():
        target = directory / path.lstrip("/")
        _parents(directory, target)
        target.touch(mode=mode)
        target.write_text(text)
        target.chmod(mode)
    for path, destination in links().items():
        target = directory / path.lstrip("/")
        _parents(directory, target)
        target.symlink_to(destination)


def _parents(directory: Path, target: Path) -> None:
    """Directories of an overlay hide the mode of those below: root's own stay closed."""
    for parent in reversed(target.relative_to(directory).parents[:-1]):
        place = directory / parent
        if not place.exists():
            place.mkdir()
            place.chmod(0o700 if parent.parts[0] == "root" else 0o755)


def _program(source: str) -> tuple[int, str]:
    """A Python program of guest/ as an executable; the interpreter's path is that of the hosts, so it is not in the source."""
    return 0o755, f"#!/usr/bin/python3\n{(_SOURCES / source).read_text()}"


def _own_limit(which: int) -> str:
    hard = resource.getrlimit(which)[1]
    return "-1:-1" if hard == resource.RLIM_INFINITY else f"{hard}:{hard}"
