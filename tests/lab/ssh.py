# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way into the hosts: keys of this lab alone and an ssh_config that works from anywhere on this machine.

Its ProxyCommand opens every connection inside the controller's namespace, so an ssh that uses the file cannot leave by the
machine's own interface: without the lab it fails.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from .paths import PYTHON
from .progress import LabError
from .topology import Topology

_TIMEOUT_S = 30
_SOCKET_PATH_MAX = 107  # sun_path, linux/un.h, less its terminating zero
_CONTROL_NAME = 40 + 17  # %C is 40 digits; ssh adds a dot and 16 letters while it makes the socket
RELAY = Path(__file__).parent / "relay.py"


@dataclass(frozen=True)
class Keys:
    """Texts of the lab's keys; private ones are in the state directory too, mode 0600."""

    client_public: str
    host_private: dict[str, str]
    host_public: dict[str, str]


def control_directory(state: Path) -> Path:
    """Where ssh keeps its shared connections. Raises LabError when a socket's path would be too long for the kernel."""
    directory = state / "cm"
    excess = len(str(directory)) + 1 + _CONTROL_NAME - _SOCKET_PATH_MAX
    if excess > 0:
        raise LabError(f"{directory} is {excess} characters too long for ssh's sockets: set XDG_CACHE_HOME to a shorter path")
    return directory


def make_keys(state: Path, topology: Topology) -> Keys:
    """The keys of this lab, made at the first call."""
    directory = state / "keys"
    directory.mkdir(mode=0o700, exist_ok=True)
    private, public = {}, {}
    for name in ("client", *(host.name for host in topology.hosts)):
        file = directory / name
        if not file.with_suffix(".pub").exists():  # written last
            file.unlink(missing_ok=True)
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {name}", "-f", str(file)]
            subprocess.run(command, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        private[name], public[name] = file.read_text(), file.with_suffix(".pub").read_text()
    client = public.pop("client")
    del private["client"]
    return Keys(client, private, public)


def write_config(state: Path, topology: Topology, keys: Keys, namespace: Path) -> Path:
    """Write `ssh_config` and `known_hosts` of the lab; returns the former."""
    control_directory(state).mkdir(mode=0o700, exist_ok=True)
    (state / "known_hosts").write_text(known_hosts(topology, keys))
    path = state / "ssh_config"
    path.write_text(config(state, topology, namespace))
    return path


def known_hosts(topology: Topology, keys: Keys) -> str:
    """One line per host: a connection to anything else than the lab's own host is refused."""
    return "".join(f"{host.name},{host.address} {' '.join(keys.host_public[host.name].split()[:2])}\n" for host in topology.hosts)


def config(state: Path, topology: Topology, namespace: Path) -> str:
    """Text of the ssh_config. `namespace` is the path of the controller's network namespace."""
    names = [host.name for host in topology.hosts]
    relay = f"nsenter --net={namespace} -- {PYTHON} -I -S {RELAY} %h %p"
    lines = [f"Host {host.name}\n  HostName {host.address}\n" for host in topology.hosts]
    options = {
        "User": "root",
        "IdentityFile": state / "keys/client",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": state / "known_hosts",
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "ProxyCommand": relay,
        "ControlMaster": "auto",
        "ControlPersist": "300s",
        "ControlPath": control_directory(state) / "%C",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "10",
        "ServerAliveCountMax": "3",
    }
    lines.append(f"Host {' '.join(names)} 10.99.0.1*\n" + "".join(f"  {name} {value}\n" for name, value in options.items()))
    return "\n".join(lines)


def close_shared_connections(state: Path) -> None:
    """End every connection that ssh keeps open for this lab."""
    for socket in sorted((state / "cm").glob("*")):
        command = ["ssh", "-F", str(state / "ssh_config"), "-o", f"ControlPath={socket}", "-O", "exit", "lab"]
        subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S)
