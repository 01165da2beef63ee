# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lab hosts as User-Mode Linux: each a kernel of its own, run as processes of this machine on the same cables."""

from __future__ import annotations

import json
import shlex
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .. import cache
from ..backend import Backend
from ..network import CABLE_MTU
from ..progress import LabError
from ..ssh import Keys
from ..topology import HCA_OF, MANAGEMENT_NETDEV, Host, Topology
from . import mappings, seed
from .image import INIT, image
from .kernel import PREREQUISITES, kernel

MEMORY_MIB = 3072  # taken from the machine as the host uses it
_QUERY_S = 30
_CONNECT_S = 5
_UNREACHABLE = 255  # ssh's own failures
# Ended by itself (poweroff, panic), a host takes its legs down as one that lost its power does.
_SUPERVISE = f'"$@"; for leg in {" ".join(HCA_OF)}; do ip link set "$leg" down; done'


class UmlBackend(Backend):
    """Hosts with a kernel each: their disk is what differs from the shared image."""

    prerequisites = PREREQUISITES
    own_kernel = True

    def prepare(self, topology: Topology, keys: Keys) -> None:
        built, disk = kernel(), image()
        for host in topology.hosts:
            directory = self._directory(host)
            if (directory / "host.json").exists():  # written last
                continue
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir(mode=0o700)
            seed.write(directory / "seed.tar", host, topology, keys, built / "modules/lib/modules")
            for netdev, mac in _ports(host, topology).items():
                _filter(directory, netdev).write_bytes(others_frames(mac))
            command = [str(built / "linux"), *_arguments(directory, disk / "disk.img", host, topology)]
            (directory / "host.json").write_text(json.dumps({"kernel": str(built), "image": str(disk), "command": command}, indent=1))
        mappings.allow()
        # Older ones go when no host of any lab runs on them any more.
        for name, part in (("uml-kernel", "kernel"), ("uml-image", "image")):
            cache.prune(name, keep={Path(described[part]) for described in self._hosts_of_all_labs().values()})

    def power_on(self, host: Host) -> None:
        directory, group = self._directory(host), self._group(host)
        shutil.rmtree(directory / host.name, ignore_errors=True)  # its control socket of the life before
        command = json.loads((directory / "host.json").read_text())["command"]
        self._network.plug(host.name)
        group.create()
        with self.console(host).open("ab") as console:
            # setsid forks: the host is nobody's child, so it outlives this process.
            subprocess.run(
                ["setsid", "--fork", *self._network.enter(host.name, ["sh", "-c", _SUPERVISE, host.name, *command])],
                check=True, stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=_QUERY_S,
                preexec_fn=lambda: group.join("machine"),
            )  # fmt: skip

    def exec(self, host: Host, argv: Sequence[str], *, stdin: int | None = None, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """By ssh over the management network, on a connection of its own: there is no other way into a kernel."""
        group = self._group(host)
        if not group.pids():
            raise LabError(f"{host.name} is off: `on {host.name}` starts it")
        if group.frozen():
            raise LabError(f"{host.name} hangs: `resume {host.name}` lets it go on")
        ssh = [
            "ssh",
            "-F",
            str(self._state / "ssh_config"),
            "-o",
            "ControlPath=none",
            "-o",
            f"ConnectTimeout={_CONNECT_S}",
            "-o",
            "LogLevel=ERROR",
        ]
        try:
            done = subprocess.run(
                [*ssh, host.name, shlex.join(argv)], check=False, stdin=stdin, capture_output=capture, text=True,
                timeout=_QUERY_S if capture else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LabError(f"{host.name} did not end `{shlex.join(argv)}` within {_QUERY_S} s; `status` tells its state") from None
        if done.returncode == _UNREACHABLE:
            raise LabError(f"{host.name} does not answer; {self.console(host)} tells why")
        return done

    def links(self, host: Host) -> list[dict]:
        """Of a host that does not answer, the ends of its cables."""
        try:
            return json.loads(self.exec(host, ["ip", "-json", "address"], capture=True).stdout)
        except LabError:
            return self._network.links(host.name)

    def down(self) -> None:
        super().down()
        if all(directory.parent == self._state for directory in self._hosts_of_all_labs()):
            mappings.give_back()

    def _hosts_of_all_labs(self) -> dict[Path, dict]:
        """Directory -> description of every full-kernel host of this user's labs."""
        described = {file.parent: json.loads(file.read_text()) for file in self._state.parent.glob("*/*/host.json")}
        return {directory: description for directory, description in described.items() if "kernel" in description}


def _ports(host: Host, topology: Topology) -> dict[str, str]:
    """Device -> MAC address of all that a host has sockets on."""
    return {MANAGEMENT_NETDEV: host.management_mac, **seed.legs(host, topology)}


def _filter(directory: Path, netdev: str) -> Path:
    return directory / f"{netdev}.bpf"


def others_frames(mac: str) -> bytes:
    """A classic BPF program that takes all frames but a device's own: its socket would get back what it has sent."""
    octets = bytes.fromhex(mac.replace(":", ""))
    source = (int.from_bytes(octets[:2]), int.from_bytes(octets[2:]))  # at bytes 6 and 8 of a frame
    load_half, load_word, if_equal, take = 0x28, 0x20, 0x15, 0x06  # linux/bpf_common.h
    program = [
        (load_word, 0, 0, 8), (if_equal, 0, 3, source[1]), (load_half, 0, 0, 6), (if_equal, 0, 1, source[0]),
        (take, 0, 0, 0), (take, 0, 0, 0xFFFFFFFF),
    ]  # fmt: skip
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _arguments(directory: Path, disk: Path, host: Host, topology: Topology) -> list[str]:
    """The kernel's command line."""
    # gro: without it the big frames that a veth hands over are dropped, and TCP crawls. seccomp: twice as fast as ptrace.
    nics = [
        f"vec{number}:transport=raw,ifname={netdev},mac={mac},depth=128,gro=1,mtu={CABLE_MTU},bpffile={_filter(directory, netdev)}"
        for number, (netdev, mac) in enumerate(_ports(host, topology).items())
    ]
    return [
        f"umid={host.name}", f"uml_dir={directory}", f"mem={MEMORY_MIB}M", "seccomp=on", "con=null", "con0=null,fd:1",
        f"ubd0={directory}/disk.cow,{disk}", f"ubd1r={directory}/seed.tar", "root=/dev/ubda", "rw", f"init={INIT}", *nics,
    ]  # fmt: skip
