# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lab puts into its hosts: the overlay, the GID table, the limits of containers."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import overlay
from tests.lab.guest import hca, oci_clamp
from tests.lab.ssh import Keys
from tests.lab.topology import standard

MAC = "02:67:62:01:00:01"
LINK_LOCAL = "fe80:0000:0000:0000:0067:62ff:fe01:0001"


def shown(table: hca.GidTable) -> list[tuple[str, str] | None]:
    """The table up to its last entry."""
    entries = [slot and (hca.in_groups(slot[0]), slot[1]) for slot in table.slots]
    while entries[-1] is None:
        entries.pop()
    return entries


def pair(gid: str) -> list[tuple[str, str]]:
    return [(gid, "IB/RoCE v1"), (gid, "RoCE v2")]


def mapped(last: str) -> str:
    return f"0000:0000:0000:0000:0000:ffff:{last}"


def test_a_port_without_address_has_its_link_local_entries_alone() -> None:
    table = hca.GidTable(MAC)
    table.update([])
    assert shown(table) == pair(LINK_LOCAL)


def test_index_3_is_the_first_ipv4_address_and_5_the_next() -> None:
    table = hca.GidTable(MAC)
    table.update(["10.10.0.1", "fe80::67:62ff:fe01:1", "192.168.0.1"])
    assert shown(table) == pair(LINK_LOCAL) + pair(mapped("0a0a:0001")) + pair(mapped("c0a8:0001"))


def test_a_lost_address_leaves_a_hole_that_the_next_one_fills() -> None:
    table = hca.GidTable(MAC)
    table.update(["10.10.0.1", "10.10.1.1"])
    table.update(["10.10.1.1"])
    assert shown(table) == [*pair(LINK_LOCAL), None, None, *pair(mapped("0a0a:0101"))]
    table.update(["10.10.1.1", "10.10.2.1"])
    assert shown(table) == pair(LINK_LOCAL) + pair(mapped("0a0a:0201")) + pair(mapped("0a0a:0101"))


@given(st.lists(st.lists(st.ip_addresses(v=4).map(str), max_size=9), max_size=6))
def test_the_table_always_holds_the_addresses_that_fit_once_per_type(history: list[list[str]]) -> None:
    table = hca.GidTable(MAC)
    for addresses in history:
        table.update(addresses)
        entries = [slot for slot in table.slots if slot]
        assert len(entries) == len(set(entries))
        assert {gid for gid, _kind in entries[2:]} <= {hca.as_gid(address) for address in addresses}
        wanted = {(hca.as_gid(address), kind) for address in addresses for kind in hca.GID_TYPES}
        assert len(entries) == min(hca.TABLE_LENGTH, 2 + len(wanted))


def test_the_tree_reads_like_the_kernels(tmp_path: Path) -> None:
    table = hca.GidTable(MAC)
    table.update(["10.10.0.1"])
    hca.publish(tmp_path, "enp1s0f0np0", True, table)
    port = tmp_path / "ports/1"
    assert (port / "state").read_text() == "4: ACTIVE\n"
    assert (port / "gids/3").read_text() == mapped("0a0a:0001") + "\n"
    assert (port / "gid_attrs/types/3").read_text() == "RoCE v2\n"
    assert (port / "gid_attrs/ndevs/3").read_text() == "enp1s0f0np0\n"
    assert (port / "gids/4").read_text() == hca.EMPTY_GID + "\n"
    assert sorted(os.listdir(port / "gid_attrs/types"), key=int) == [str(index) for index in range(hca.TABLE_LENGTH)]
    with pytest.raises(OSError, match="error"):
        (port / "gid_attrs/types/4").read_text()
    table.update([])
    hca.publish(tmp_path, "enp1s0f0np0", False, table)
    assert (port / "state").read_text() == "1: DOWN\n"
    assert (port / "phys_state").read_text() == "3: Disabled\n"
    with pytest.raises(OSError, match="error"):
        (port / "gid_attrs/types/3").read_text()


def test_limits_of_a_container_are_lowered_to_the_machines(tmp_path: Path) -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("no limit here to be lowered to")
    bundle = tmp_path / "config.json"
    asked = [{"type": "RLIMIT_NOFILE", "hard": 2**64 - 1, "soft": 2**64 - 1}, {"type": "RLIMIT_CORE", "hard": 0, "soft": 0}]
    bundle.write_text(json.dumps({"process": {"rlimits": asked, "args": ["x"]}}))
    oci_clamp.clamp(str(bundle))
    assert json.loads(bundle.read_text()) == {
        "process": {
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": hard, "soft": hard}, {"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            "args": ["x"],
        }
    }


@pytest.fixture
def keys() -> Keys:
    names = [host.name for host in standard(3).hosts]
    return Keys("client public\n", {name: f"private {name}\n" for name in names}, {name: f"public {name}\n" for name in names})


def test_hosts_of_one_lab_share_no_identity(keys: Keys) -> None:
    topology = standard(3)
    trees = [overlay.files(host, topology, keys) for host in topology.hosts]
    for path in ("/etc/machine-id", "/etc/hostname", "/etc/ssh/ssh_host_ed25519_key"):
        assert len({tree[path] for tree in trees}) == 3
    assert all(len(tree["/etc/machine-id"][1].strip()) == 32 for tree in trees)


def test_a_host_is_set_up_for_the_engine_that_it_has(keys: Keys) -> None:
    topology = standard(1)
    podman, docker = (overlay.files(topology.hosts[0], topology, keys, engine) for engine in ("podman", "docker"))
    (settings,) = docker.keys() - podman.keys()
    assert json.loads(docker[settings][1])["runtimes"]["crun-clamp"]["path"] in docker
    assert podman.keys() - docker.keys() == {"/etc/containers/containers.conf.d/10-lab.conf"}


def test_the_overlay_keeps_secrets_closed(keys: Keys, tmp_path: Path) -> None:
    topology = standard(3)
    tree = tmp_path / "seed"
    previous = os.umask(0o077)
    try:
        overlay.write(tree, topology.hosts[0], topology, keys)
    finally:
        os.umask(previous)

    def mode(path: str) -> int:
        return stat.S_IMODE((tree / path).stat().st_mode)

    assert mode("etc/ssh/ssh_host_ed25519_key") == 0o600
    assert mode("root") == mode("root/.ssh") == 0o700
    assert mode("") == mode("etc") == mode("etc/ssh") == mode("usr/local/lib") == 0o755
    assert mode("usr/local/lib/gb10-lab/init") == 0o755
    assert (tree / "etc/systemd/system/getty.target").readlink() == Path("/dev/null")
    assert "swap" in (tree / "etc/fstab").read_text()
