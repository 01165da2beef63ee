# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One lab as a whole: brings network, keys and hosts up in order, takes over what a killed run left, and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from . import engine, ssh
from .backend import Backend, State
from .network import Network
from .nspawn import DockerBackend, NspawnBackend
from .paths import lab_name, remove_tree, state_directory
from .progress import LabError, say, step
from .topology import CONTROLLER, Host, Topology, standard
from .uml.backend import UmlBackend

BACKENDS: dict[str, type[Backend]] = {"nspawn": NspawnBackend, "docker": DockerBackend, "uml": UmlBackend}
DEFAULT_BACKEND = "nspawn"

# command -> Debian package that brings it
_PREREQUISITES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "mkfs.ext4": "e2fsprogs",
    "losetup": "mount",
    "strip": "binutils",
}
# profile of profiles/ -> model that it serves
_MODELS = {"lab-smollm2": engine.model.SMOL, "lab-tiny": engine.tiny.NAME}
_END_S = 5.0
_FILLER = "/var/lib/gb10-lab.fill"


class Lab:
    """The lab that `$GB10_LAB` names. The name is the machine's, not a user's: a lab of that name elsewhere is this lab."""

    def __init__(self) -> None:
        """Raises LabError for a bad name and for anybody but root."""
        if os.geteuid() != 0:
            raise LabError("the lab is made of network namespaces, mounts and control groups: run it as root")
        self.name = lab_name()
        self.state = state_directory(self.name)
        self.network = Network(self.name)
        self.kind = self._described().get("backend", DEFAULT_BACKEND)
        self.backend: Backend = BACKENDS[self.kind](self.name, self.state)

    def up(self, count: int, kind: str = DEFAULT_BACKEND) -> None:
        """Bring the lab up with `count` hosts of a `kind`. Whatever of it runs well stays as it is; remains of a killed run are cleared."""
        _install_prerequisites({**_PREREQUISITES, **BACKENDS[kind].prerequisites})
        topology = standard(count)
        ssh.control_directory(self.state)  # refuse a path that is too long before anything is made
        with self._locked():
            self._refuse_another(count, kind)
            if not (self._description.exists() and self.network.complete(topology)):
                if self.leftovers():
                    self._clean()
                    say("cleared what an earlier run had left")
                self.state.mkdir(mode=0o700, parents=True)
                self._description.write_text(json.dumps({"hosts": count, "backend": kind}))
                self.kind, self.backend = kind, BACKENDS[kind](self.name, self.state)
                with step(f"network: {count} hosts, {len(topology.cables)} cables"):
                    self.network.up(topology, sockets=self.backend.own_kernel)
            with step("hosts: root file system, keys and disks"):
                keys = ssh.make_keys(self.state, topology)
                ssh.write_config(self.state, topology, keys, self.network.namespace_path(CONTROLLER))
                self.backend.prepare(topology, keys)
            with step("hosts: all running"):
                for host in topology.hosts:
                    state = self.backend.state(host)
                    if state is State.OFF:
                        self.backend.power_on(host)
                    elif state is State.HUNG:
                        self.backend.resume(host)
                self.backend.wait(topology.hosts)
        say(f"lab {self.name} is up: ssh -F {self.state}/ssh_config {topology.hosts[0].name}")

    def prepare(self, count: int, profile: str, kind: str = DEFAULT_BACKEND) -> None:
        """`up`, and put what the profile serves under fixed names into `assets` of the state directory (inventories/lab names them)."""
        if profile not in _MODELS:
            raise LabError(f"{profile!r} is no profile of the lab: it has {' and '.join(sorted(_MODELS))}")
        self.up(count, kind)
        with self._locked(), step(f"assets of {profile}"):
            built = engine.ensure(_MODELS[profile])
            fresh = self.state / "assets.new"
            remove_tree(fresh)
            # Hard links: the files are large, and a copy of a symbolic link would be a link.
            shutil.copytree(built.model_dir, fresh / "model", copy_function=os.link)
            archive_facts = built.archive.with_name(f"{built.archive.name}.json")
            for source, name in (
                (built.archive, "engine.tar"),
                (archive_facts, "engine.tar.json"),
                (built.manifest, "manifest.json"),
                (built.reference, "reference.json"),
            ):
                os.link(source, fresh / name)
            remove_tree(self.state / "assets")
            fresh.rename(self.state / "assets")

    def down(self) -> None:
        """Remove all of the lab. Raises LabError naming what could not be removed."""
        with self._locked(), step(f"lab {self.name} is down"):
            self._clean()
            if found := self.leftovers():
                raise LabError(f"lab {self.name} is not wholly gone: left are {', '.join(found)}; end what uses them and run `down` again")

    def topology(self) -> Topology:
        """The hosts and cables of the lab that is up. Raises LabError if none is."""
        if not self._description.exists() or CONTROLLER not in self.network.existing():
            raise LabError(f"lab {self.name} is not up: `python -m tests.lab up` starts it")
        return standard(self._described()["hosts"])

    def host(self, name: str) -> Host:
        return self.topology().host(name)

    def power_on(self, name: str) -> None:
        """Start a host that is off and wait until it has booted; a host that is on is left alone."""
        host = self.host(name)
        with self._locked():
            if self.backend.state(host) is State.OFF:
                self.backend.power_on(host)
            self.backend.wait([host])

    def power_off(self, name: str) -> None:
        host = self.host(name)
        with self._locked():
            self.backend.power_off(host)

    def set_leg(self, name: str, netdev: str, up: bool) -> None:
        port = self.topology().port(name, netdev)
        self.network.set_leg(port, up)

    def fill(self, name: str, leave_mib: int) -> str:
        """Fill a host's disk up to `leave_mib`; returns what `df` says then. Space is taken without writing it."""
        script = f'rm -f {_FILLER}; free=$(($(stat --file-system --format="%a*%S" /) - {leave_mib << 20})); fallocate --length "$free" {_FILLER}; df -h /'
        return self.backend.exec(self.host(name), ["bash", "-c", script], capture=True).stdout

    def drain(self, name: str) -> str:
        """Undo `fill`; returns what `df` says then."""
        return self.backend.exec(self.host(name), ["sh", "-c", f"rm -f {_FILLER}; df -h /"], capture=True).stdout

    def leftovers(self) -> list[str]:
        """What of this lab exists on this machine, in words."""
        found = self.backend.leftovers()
        found += [f"namespace {self.network.namespace(name)}" for name in self.network.existing()]
        return found + ([f"directory {self.state}"] if self.state.exists() else [])

    def _clean(self) -> None:
        """Hosts first (they hold the namespaces), then whoever else is in the namespaces, then the namespaces and the files."""
        self.backend.down()
        ssh.close_shared_connections(self.state)
        for name in self.network.existing():
            _end_all(self.network, name)
        self.network.down()
        remove_tree(self.state)

    def _refuse_another(self, count: int, kind: str) -> None:
        if described := self._described():
            have, wanted = f"{described['hosts']} hosts of kind {self.kind}", f"{count} of kind {kind}"
            if (described["hosts"], self.kind) != (count, kind):
                raise LabError(f"lab {self.name} has {have}, not {wanted}: run `down` first, or choose another lab with GB10_LAB")

    def _described(self) -> dict:
        """What the lab was made as; empty if there is none."""
        return json.loads(self._description.read_text()) if self._description.exists() else {}

    @property
    def _description(self) -> Path:
        return self.state / "lab.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One command at a time changes a lab."""
        self.state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.state.parent / f".{self.name}.lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another command is changing lab {self.name}, waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _end_all(network: Network, name: str) -> None:
    """End the processes that are still in a namespace (ssh relays, commands of `run`): asked first, then killed."""
    deadline = time.monotonic() + _END_S
    while pids := network.processes(name):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline - _END_S / 2 else signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LabError(f"processes {pids} in namespace {network.namespace(name)} do not end: see /proc/{pids[0]}/stack")
        time.sleep(0.05)


def _install_prerequisites(wanted: Mapping[str, str]) -> None:
    """Install the packages of the commands (command -> package) that are missing."""
    missing = sorted({package for command, package in wanted.items() if shutil.which(command) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise LabError(f"the lab needs {', '.join(missing)}: install them")
    with step(f"installed {' '.join(missing)}"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for verb in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", "-qq", *verb], check=False, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if done.returncode != 0:
                last = (done.stdout.strip().splitlines() or ["no word why"])[-1]
                raise LabError(f"`apt-get {' '.join(verb)}` failed: {last}")
