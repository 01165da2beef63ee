# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hosts, ports and cables as plain data: the same names and the same wiring as on real Sparks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .progress import LabError

CONTROLLER = "ctl"
CONTROLLER_ADDRESS = "10.99.0.1"
MANAGEMENT_PREFIX_LENGTH = 24
MANAGEMENT_NETDEV = "mgmt0"
MAXIMUM_HOSTS = 9  # t1 … t9 are 10.99.0.11 … 10.99.0.19: what the `10.99.0.1*` of ssh_config covers

# (cage, half) -> network device and RDMA device, as DGX OS names them.
PORTS = {
    (0, "A"): ("enp1s0f0np0", "rocep1s0f0"),
    (0, "B"): ("enP2p1s0f0np0", "roceP2p1s0f0"),
    (1, "A"): ("enp1s0f1np1", "rocep1s0f1"),
    (1, "B"): ("enP2p1s0f1np1", "roceP2p1s0f1"),
}
HCA_OF = dict(PORTS.values())


@dataclass(frozen=True)
class Host:
    """One lab host: its name and its address on the management network."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"10.99.0.{10 + self.number}"

    @property
    def management_mac(self) -> str:
        return f"02:67:62:00:00:{self.number:02x}"


@dataclass(frozen=True)
class Port:
    """One half of one cage of one host."""

    host: Host
    cage: int
    half: str

    @property
    def netdev(self) -> str:
        return PORTS[self.cage, self.half][0]

    @property
    def mac(self) -> str:
        """Fixed, so that link-local GIDs are the same in every run; locally administered."""
        return f"02:67:62:{'-AB'.index(self.half):02x}:{self.cage:02x}:{self.host.number:02x}"


@dataclass(frozen=True)
class Topology:
    """Hosts by rank and cables as pairs of ((host, cage), (host, cage)) positions; a cable joins both halves of two cages."""

    hosts: tuple[Host, ...]
    cables: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def host(self, name: str) -> Host:
        """The host of that name. Raises LabError naming those that exist."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"this lab has no host {name!r}: its hosts are {', '.join(host.name for host in self.hosts)}")

    def port(self, name: str, netdev: str) -> Port:
        """The port with that device name. Raises LabError naming those that exist."""
        host = self.host(name)
        for (cage, half), (device, _hca) in PORTS.items():
            if device == netdev:
                return Port(host, cage, half)
        raise LabError(f"{name} has no leg {netdev!r}: its legs are {', '.join(device for device, _hca in PORTS.values())}")

    def ports(self) -> list[Port]:
        """Every port of every host, cabled or not."""
        return [Port(host, cage, half) for host in self.hosts for cage, half in PORTS]

    def legs(self) -> list[tuple[Port, Port]]:
        """Every leg as the two ports that it joins: two legs per cable, half A to half A and B to B."""
        return [
            (Port(self.hosts[a], cage_a, half), Port(self.hosts[b], cage_b, half))
            for (a, cage_a), (b, cage_b) in self.cables
            for half in "AB"
        ]

    def open_ports(self) -> list[Port]:
        """The ports with nothing plugged in."""
        cabled = {port for leg in self.legs() for port in leg}
        return [port for port in self.ports() if port not in cabled]


def standard(count: int) -> Topology:
    """`count` hosts wired by the rotation rule: cage 0 of each to cage 1 of the next; two hosts are a pair, cage 0 to cage 0."""
    if not 1 <= count <= MAXIMUM_HOSTS:
        raise LabError(f"a lab has 1 to {MAXIMUM_HOSTS} hosts, not {count}")
    hosts = tuple(Host(f"t{number}", number) for number in range(1, count + 1))
    if count == 1:
        return Topology(hosts, ())
    if count == 2:
        return Topology(hosts, (((0, 0), (1, 0)),))
    return Topology(hosts, tuple(((i, 0), ((i + 1) % count, 1)) for i in range(count)))
