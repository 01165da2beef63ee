# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's cables: one network namespace per host and one for the controller, joined by veth pairs.

Nothing is made in the root namespace, and no namespace has a way out: the addresses of a lab exist only inside it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .paths import mount_points
from .progress import LabError
from .topology import CONTROLLER, CONTROLLER_ADDRESS, MANAGEMENT_NETDEV, MANAGEMENT_PREFIX_LENGTH, PORTS, Port, Topology

_NETNS = Path("/run/netns")
_BRIDGE = "br0"
# Jumbo frames and more; a host with a kernel of its own chooses below that.
CABLE_MTU = 9216
_TIMEOUT_S = 30


class Network:
    """The namespaces of one lab."""

    def __init__(self, lab: str) -> None:
        self._prefix = f"gb10-{lab}-"

    def namespace(self, name: str) -> str:
        """Name of the namespace of a host or of the controller."""
        return self._prefix + name

    def namespace_path(self, name: str) -> Path:
        return _NETNS / self.namespace(name)

    def up(self, topology: Topology, *, sockets: bool = False) -> None:
        """Make all of it, from nothing: hosts get an address on the management network; their legs have none.

        With `sockets` a host is no user of its namespace but a process that has a raw socket on each device there: the devices
        are bare ends of cables, which take every frame and say nothing themselves.
        """
        control = self.namespace(CONTROLLER)
        for name in (CONTROLLER, *(host.name for host in topology.hosts)):
            _ip("netns", "add", self.namespace(name))
            _ip("-n", self.namespace(name), "link", "set", "lo", "up")
        _batch(
            control,
            f"link add {_BRIDGE} type bridge",
            f"addr add {CONTROLLER_ADDRESS}/{MANAGEMENT_PREFIX_LENGTH} dev {_BRIDGE}",
            f"link set {_BRIDGE} up",
        )
        for host in topology.hosts:
            here, patch = self.namespace(host.name), f"m-{host.name}"
            _batch(
                control,
                f"link add {patch} type veth peer name {MANAGEMENT_NETDEV} address {host.management_mac} netns {here}",
                f"link set {patch} master {_BRIDGE} up",
            )
            if not sockets:
                _batch(here, f"addr add {host.address}/{MANAGEMENT_PREFIX_LENGTH} dev {MANAGEMENT_NETDEV}")
            _batch(here, f"link set {MANAGEMENT_NETDEV} up")
        for a, b in topology.legs():
            peer = f"name {b.netdev} address {b.mac} netns {self.namespace(b.host.name)}"
            _batch(self.namespace(a.host.name), f"link add {a.netdev} address {a.mac} type veth peer {peer}")
        for port in topology.open_ports():
            # A veth cannot exist without a peer; one that stays down gives the port what an empty cage has: no carrier.
            peer = f"name {port.host.name}-{port.cage}{port.half} netns {control}"
            _batch(self.namespace(port.host.name), f"link add {port.netdev} address {port.mac} type veth peer {peer}")
        if sockets:
            for host in topology.hosts:
                devices = [MANAGEMENT_NETDEV, *(netdev for netdev, _hca in PORTS.values())]
                _batch(self.namespace(host.name), *(f"link set {device} addrgenmode none promisc on" for device in devices))
                _batch(self.namespace(host.name), *(f"link set {device} mtu {CABLE_MTU}" for device in devices[1:]))

    def complete(self, topology: Topology) -> bool:
        """Whether every namespace and every device that `up` makes is there."""
        present = set(self.existing())
        for host in topology.hosts:
            wanted = {MANAGEMENT_NETDEV, *(port.netdev for port in topology.ports() if port.host == host)}
            if host.name not in present or not wanted <= {link["ifname"] for link in self.links(host.name)}:
                return False
        return CONTROLLER in present and any(
            address.get("local") == CONTROLLER_ADDRESS for link in self.links(CONTROLLER) for address in link["addr_info"]
        )

    def existing(self) -> list[str]:
        """The names (without prefix) of this lab's namespaces that exist now."""
        return sorted(path.name.removeprefix(self._prefix) for path in _NETNS.glob(f"{self._prefix}*"))

    def links(self, name: str) -> list[dict]:
        """Devices and addresses of a namespace, as `ip -json address` tells them."""
        return json.loads(_ip("-n", self.namespace(name), "-json", "address") or "[]")

    def processes(self, name: str) -> list[int]:
        """Process ids in that namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace(name)).split()]

    def set_leg(self, port: Port, up: bool) -> None:
        """Take a leg down, or up again; its peer loses or regains the carrier."""
        _batch(self.namespace(port.host.name), f"link set {port.netdev} {'up' if up else 'down'}")

    def plug(self, name: str) -> None:
        """What the ports of a host do that has power: all legs up."""
        _batch(self.namespace(name), *(f"link set {netdev} up" for netdev, _hca in PORTS.values()))

    def unplug(self, name: str) -> None:
        """What a host's ports do when its power goes: all legs down, so that every neighbour loses the carrier."""
        self.unplug_namespace(self.namespace(name))

    @staticmethod
    def unplug_namespace(namespace: str) -> None:
        _batch(namespace, *(f"link set {netdev} down" for netdev, _hca in PORTS.values()))

    def enter(self, name: str, argv: list[str]) -> list[str]:
        """The command line that runs `argv` in a namespace (not `ip netns exec`: that would remount /sys)."""
        return ["nsenter", f"--net={self.namespace_path(name)}", "--", *argv]

    def down(self) -> None:
        """Delete this lab's namespaces and with them every device; nothing may run in them any more."""
        for name in self.existing():
            _ip("netns", "delete", self.namespace(name))
        # `ip netns` makes /run/netns a mount of its own; the last user takes it away again.
        if str(_NETNS) in mount_points() and not any(_NETNS.iterdir()):
            subprocess.run(["umount", str(_NETNS)], check=False, capture_output=True, timeout=_TIMEOUT_S)  # busy: just made again


def _batch(namespace: str, *lines: str) -> None:
    _ip("-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")


def _ip(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(["ip", *arguments], check=False, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise LabError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or stdin.strip()}: run `down` and then `up`")
    return done.stdout
