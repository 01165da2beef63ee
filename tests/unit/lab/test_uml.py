# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a full-kernel host is given at its first boot."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import ssh
from tests.lab.topology import PORTS, standard
from tests.lab.uml import seed


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
