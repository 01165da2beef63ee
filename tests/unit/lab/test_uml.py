# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a full-kernel host is given at its first boot, and what its processes need of the machine."""

from __future__ import annotations

import ctypes
import socket
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import ssh
from tests.lab.topology import PORTS, standard
from tests.lab.uml import mappings, seed
from tests.lab.uml.backend import others_frames


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[tarfile.TarFile]:
    topology = standard(3)
    modules = tmp_path / "modules"
    (modules / "7.2.0/extra").mkdir(parents=True)
    (modules / "7.2.0/extra/zfs.ko").write_bytes(b"module")
    keys = ssh.make_keys(tmp_path, topology)
    seed.write(tmp_path / "seed.tar", topology.hosts[1], topology, keys, modules)
    assert (tmp_path / "seed.tar").stat().st_size % 4096 == 0
    with tarfile.open(tmp_path / "seed.tar") as opened:
        yield opened


def text(archive: tarfile.TarFile, path: str) -> str:
    file = archive.extractfile(path)
    assert file is not None
    return file.read().decode()


def test_a_host_has_its_own_name_address_and_port_names(archive: tarfile.TarFile) -> None:
    assert text(archive, "etc/hostname") == "t2\n"
    assert "Address=10.99.0.12/24" in text(archive, "etc/systemd/network/00-management.network")
    addresses = {
        text(archive, f"etc/systemd/network/10-{netdev}.link").split("MACAddress=")[1].split()[0] for netdev, _hca in PORTS.values()
    }
    assert len(addresses) == len(PORTS)


def test_every_leg_gets_the_rdma_device_of_a_spark(archive: tarfile.TarFile) -> None:
    unit = text(archive, "etc/systemd/system/gb10-lab-rdma.service")
    assert all(f" {netdev}={hca}" in unit for netdev, hca in PORTS.values())


def test_secrets_are_closed_and_nothing_hides_a_directory_of_the_image(archive: tarfile.TarFile) -> None:
    modes = {member.name: member.mode for member in archive}
    assert (modes["etc/ssh/ssh_host_ed25519_key"], modes["root/.ssh"], modes["root/.ssh/authorized_keys"]) == (0o600, 0o700, 0o600)
    assert not any(name.startswith(("lib/", "bin/", "sbin/")) for name in modes)
    assert "usr/lib/modules/7.2.0/extra/zfs.ko" in modes


def test_a_port_takes_all_frames_but_its_own() -> None:
    mine, others = "02:67:62:01:00:01", ["02:67:62:01:00:02", "02:66:62:01:00:01", "03:67:62:01:00:01"]
    program = others_frames(mine)
    code = ctypes.create_string_buffer(program)
    port, wire = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with port, wire:
        attach_filter = 26  # asm-generic/socket.h: SO_ATTACH_FILTER
        port.setsockopt(socket.SOL_SOCKET, attach_filter, struct.pack("HP", len(program) // 8, ctypes.addressof(code)))
        port.settimeout(5)
        for source in (mine, *others, mine):
            wire.send(frame(others[0], source))
        assert [port.recv(100) for _other in others] == [frame(others[0], other) for other in others]
        port.setblocking(False)
        with pytest.raises(BlockingIOError):
            port.recv(100)


def frame(to: str, source: str) -> bytes:
    return bytes.fromhex((to + source).replace(":", "")) + b"\x08\x00" + bytes(46)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's setting, in a file of its own."""
    setting = tmp_path / "max_map_count"
    monkeypatch.setattr(mappings, "SETTING", setting)
    monkeypatch.setattr(mappings, "BEFORE", tmp_path / "before")
    return setting


def test_the_machine_gets_its_own_limit_back_however_often_it_was_raised(machines: Path) -> None:
    machines.write_text("65530\n")
    mappings.allow()
    assert int(machines.read_text()) == mappings.NEEDED
    machines.write_text("70000\n")  # somebody else's doing meanwhile
    mappings.allow()
    mappings.give_back()
    assert machines.read_text() == "65530\n"
    machines.write_text("70000\n")
    mappings.give_back()
    assert machines.read_text() == "70000\n"


def test_a_limit_that_is_high_enough_is_left_alone(machines: Path) -> None:
    machines.write_text("2000000\n")
    mappings.allow()
    mappings.give_back()
    assert machines.read_text() == "2000000\n"
