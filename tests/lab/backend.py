# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a lab needs from its hosts, whatever they are made of."""

from __future__ import annotations

import enum
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import cgroups
from .cgroups import HostGroup
from .network import Network
from .progress import LabError
from .ssh import Keys
from .topology import Host, Topology

BOOT_S = 120.0
_POLL_S = 0.1


class State(enum.Enum):
    """What a host is doing."""

    OFF = "off"
    STARTING = "starting"
    RUNNING = "running"
    DEGRADED = "degraded"  # booted, but a unit has failed
    HUNG = "hung"

    @property
    def booted(self) -> bool:
        return self in (State.RUNNING, State.DEGRADED)


class Backend(ABC):
    """The hosts of one lab. Namespaces and cables are made before (network.py); a host finds its ports in its own."""

    prerequisites: Mapping[str, str] = {}  # command -> Debian package that brings it, beyond what every lab needs
    own_kernel = False  # a host is a process with sockets on its ports, and not a user of its network namespace

    def __init__(self, lab: str, state: Path) -> None:
        """The hosts of the lab `lab`, with what is theirs under `state`."""
        self._prefix = f"gb10-{lab}-"
        self._state = state
        self._network = Network(lab)

    def _group(self, host: Host) -> HostGroup:
        """The control group that is the host: what is in it is all of the host that runs."""
        return HostGroup(self._prefix + host.name)

    def _directory(self, host: Host) -> Path:
        """What is the host's own under the state directory."""
        return self._state / host.name

    @abstractmethod
    def prepare(self, topology: Topology, keys: Keys) -> None:
        """Build what hosts are made of, and give each host that has none a disk of its own. Idempotent."""

    @abstractmethod
    def power_on(self, host: Host) -> None:
        """Start a host that is off; returns at once."""

    def power_off(self, host: Host) -> None:
        """Cut the power: everything of the host is gone at one instant, its disk stays."""
        self._group(host).kill()
        self._network.unplug(host.name)

    def hang(self, host: Host) -> None:
        """Stop the host where it stands: it answers nothing, its links keep their carrier."""
        if not self.state(host).booted:
            raise LabError(f"{host.name} is {self.state(host).value}, so it cannot be made to hang: `on {host.name}` starts it")
        self._group(host).freeze()

    def resume(self, host: Host) -> None:
        """Let a hung host go on."""
        self._group(host).thaw()

    def state(self, host: Host) -> State:
        """What the host is doing now."""
        group = self._group(host)
        if not group.pids():
            return State.OFF
        if group.frozen():
            return State.HUNG
        try:
            word = self.exec(host, ["systemctl", "is-system-running"], capture=True).stdout.strip()
        except LabError:  # not up to answering yet, or it ended, or is too busy
            return State.STARTING
        return State(word) if word in ("running", "degraded") else State.STARTING

    def memory_bytes(self, host: Host) -> int:
        """Memory that the host occupies on this machine, page cache included."""
        return self._group(host).memory_bytes()

    @abstractmethod
    def exec(self, host: Host, argv: Sequence[str], *, stdin: int | None = None, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command inside the host, not by way of its legs. Raises LabError unless the host is on and not hung."""

    @abstractmethod
    def links(self, host: Host) -> list[dict]:
        """The host's network devices and addresses, as `ip -json address` tells them."""

    def console(self, host: Host) -> Path:
        """File with what the host printed while booting."""
        return self._directory(host) / "console.log"

    def down(self) -> None:
        """End every host of the lab, also those of an earlier run, and remove all that is theirs outside the state directory."""
        for name in cgroups.groups(self._prefix):
            group = HostGroup(name)
            group.kill()
            group.remove()

    def leftovers(self) -> list[str]:
        """What of the hosts is still on this machine, in words."""
        return [f"control group {name}" for name in cgroups.groups(self._prefix)]

    def wait(self, hosts: Sequence[Host], timeout_s: float = BOOT_S) -> None:
        """Return when all hosts have booted. Raises LabError with the end of the console of one that has not."""
        deadline = time.monotonic() + timeout_s
        for host in hosts:
            while not (state := self.state(host)).booted:
                if time.monotonic() > deadline or state is State.OFF:
                    tail = "\n".join(self.console(host).read_text(errors="replace").splitlines()[-15:])
                    raise LabError(f"{host.name} is {state.value} instead of running; the end of {self.console(host)}:\n{tail}")
                time.sleep(_POLL_S)
