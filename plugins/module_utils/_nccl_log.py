# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The log of one or more NCCL ranks as data, with NCCL_DEBUG=INFO.

The lines are those of NCCL 2.28.9 (seen) and 2.30.7 (its format strings); what a container engine or vLLM puts before them is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Channel:
    """One direction of a channel as one rank set it up: `device` is the index after the transport, none inside a host."""

    number: int
    sender: int
    receiver: int
    direction: str
    transport: str
    device: int | None


@dataclass
class RankLog:
    """What one process said. `rank` and `size` are those of its largest communicator, none before it has one."""

    source: str
    host: str
    pid: int
    rank: int | None = None
    size: int = 0
    versions: list[str] = field(default_factory=list)
    interface: str = ""
    address: str = ""
    networks: list[str] = field(default_factory=list)
    devices: dict[int, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)
    connected: set[str] = field(default_factory=set)
    rerouted: int = 0
    started: bool = False
    complete: bool = False
    infos: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def transports(self) -> list[str]:
        """The transports of its channels, each once."""
        return sorted({channel.transport for channel in self.channels})

    @property
    def network(self) -> str:
        """The last network that a communicator was given: IB, Socket, a plugin's name, or nothing yet."""
        return self.networks[-1] if self.networks else ""

    @property
    def physical(self) -> list[str]:
        """Its RDMA devices, without the virtual ones that NCCL makes by merging."""
        return [name for name in self.devices.values() if "+" not in name]

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Log:
    """All ranks of some logs, by rank as far as known, and lines of others (Gloo, PyTorch) that name a failure."""

    ranks: tuple[RankLog, ...]
    others: tuple[str, ...]


_LINE = re.compile(r"(?P<host>[^\s\[\]:]+):(?P<pid>\d+):\d+ \[-?\d+\] (?:(?P<place>\S+:\w+) )?NCCL (?P<level>INFO|WARN) (?P<text>.*?)\s*$")
_COMMUNICATOR = re.compile(r"comm 0x\w+ rank (\d+) nranks (\d+) .*- ?Init (START|COMPLETE)")
_CHANNEL = re.compile(r"Channel (\d+)/\d+ : (\d+)\[\d+\] -> (\d+)\[\d+\] (?:\[(send|receive)\] )?via ([^\s/]+(?:/[A-Za-z]+)?)(?:/(\d+))?")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?")
_BOOTSTRAP = re.compile(r"Bootstrap ?: ?Using ?(\S+?):([0-9a-f.:]+)<")
_OUT_OF_BAND = re.compile(r"; OOB (\S+?):([0-9a-f.:]+)<")
_DEVICE = re.compile(r"\[(\d+)\](\S+?):\d+/\w+")
_VIRTUAL = re.compile(r"NET/IB : Made virtual device \[(\d+)\] name=(\S+)")
_OTHERS = re.compile(
    r"Unable to find address for|TCPStore|recvValueWithTimeout|DistNetworkError|# Avg bus bandwidth|Connection closed by peer \["
)


def parse(sources: Iterable[tuple[str, Iterable[str]]]) -> Log:
    """Logs, each with its name and its lines; several ranks may write into one."""
    ranks: dict[tuple[str, str, str], RankLog] = {}
    others = []
    for source, lines in sources:
        for line in lines:
            match = _LINE.search(line)
            if match:
                key = (source, match["host"], match["pid"])
                rank = ranks.setdefault(key, RankLog(source, match["host"], int(match["pid"])))
                _read(rank, match["level"], match["text"])
            elif _OTHERS.search(line):
                others.append(line.strip())
    known = sorted(ranks.values(), key=lambda rank: (rank.rank is None, rank.rank or 0))
    return Log(tuple(known), tuple(others))


def _read(rank: RankLog, level: str, text: str) -> None:
    if level == "WARN":
        rank.warnings.append(text)
        return
    if text.startswith("Channel"):
        if match := _CHANNEL.match(text):
            number, sender, receiver, direction, transport, device = match.groups()
            index = int(device) if device else None
            rank.channels.append(Channel(int(number), int(sender), int(receiver), direction or "both", transport, index))
        return
    if match := _COMMUNICATOR.search(text):
        member, size = int(match[1]), int(match[2])
        if size >= rank.size:
            rank.rank, rank.size = member, size
        rank.started = True
        rank.complete = rank.complete or match[3] == "COMPLETE"
    elif match := _ENVIRONMENT.fullmatch(text):
        rank.environment[match[1]] = match[2]
    elif text.startswith("NCCL version "):
        version = text.removeprefix("NCCL version ").split()[0]
        rank.versions += [version] if version not in rank.versions else []
    elif match := _BOOTSTRAP.match(text):
        rank.interface, rank.address = match.groups()
    elif text.startswith("NET/IB : Using"):
        rank.devices |= {int(index): name for index, name in _DEVICE.findall(text.partition(";")[0])}
        if not rank.interface and (match := _OUT_OF_BAND.search(text)):
            rank.interface, rank.address = match.groups()
    elif match := _VIRTUAL.match(text):
        rank.devices[int(match[1])] = match[2]
    elif text.startswith("Using network "):
        rank.networks.append(text.removeprefix("Using network "))
    elif text.startswith("Connected all "):
        rank.connected.add(text.removeprefix("Connected all ").split(",")[0])
    elif text.startswith("NET/IB: Subnet-aware routing: overriding"):
        rank.rerouted += 1
    else:
        rank.infos.append(text)
