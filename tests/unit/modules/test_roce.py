# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""GID tables as sysfs trees: those of the public reports, and any order at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils._roce import Gid, Hca, judge, read_hcas
from hypothesis import given
from hypothesis import strategies as st

LINK_LOCAL = "fe80:0000:0000:0000:4ab0:2dff:fe11:2233"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def tree(
    root: Path, table: dict[int, tuple[str, str, str]], hca: str = "rocep1s0f0", netdev: str = "enp1s0f0np0", state: str = "4: ACTIVE"
) -> str:
    port = root / "class/infiniband" / hca / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (root / "class/infiniband" / hca / "device/net" / netdev).mkdir(parents=True)
    (root / "class/net" / netdev).mkdir(parents=True)
    (root / "class/net" / netdev / "mtu").write_text("9000\n")
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    for slot in range(12):
        gid, kind, device = table.get(slot, (EMPTY, "", ""))
        (port / "gids" / str(slot)).write_text(gid + "\n")
        if kind:  # the kernel answers EINVAL for an unused slot: no such file says the same to the reader
            (port / "gid_attrs/types" / str(slot)).write_text(kind + "\n")
            (port / "gid_attrs/ndevs" / str(slot)).write_text(device + "\n")
    return str(root)


BASE = {0: (LINK_LOCAL, V1, "enp1s0f0np0"), 1: (LINK_LOCAL, V2, "enp1s0f0np0")}
IP = "10.77.1.1"
IP_V1, IP_V2 = (mapped(IP), V1, "enp1s0f0np0"), (mapped(IP), V2, "enp1s0f0np0")


@pytest.mark.parametrize(
    ("table", "index"),
    [
        (BASE | {2: IP_V1, 3: IP_V2}, 3),
        (BASE | {2: IP_V1, 4: IP_V2}, 4),  # slot 3 still referenced by a living QP
        (BASE | {2: (mapped("10.9.9.9"), V1, "enp1s0f0np0"), 3: (mapped("10.9.9.9"), V2, "enp1s0f0np0"), 4: IP_V1, 5: IP_V2}, 5),
        ({0: (LINK_LOCAL, V2, "enp1s0f0np0"), 1: IP_V2}, 1),  # soft-RoCE
        (BASE | {3: (mapped(IP), V2, "enp1s0f0np0.7"), 5: IP_V2}, 5),  # a VLAN's entry is another netdev's
    ],
)
def test_the_index_is_that_of_type_address_and_netdev(tmp_path: Path, table: dict[int, tuple[str, str, str]], index: int) -> None:
    verdict = judge(read_hcas(tree(tmp_path, table)), {"rocep1s0f0": ("enp1s0f0np0", IP)})
    assert verdict["problems"] == []
    assert verdict["hcas"][0]["gid_index"] == verdict["gid_index"] == index


def test_a_soft_roce_device_names_its_netdev_itself_and_has_no_wire(tmp_path: Path) -> None:
    root = Path(tree(tmp_path, {0: (LINK_LOCAL, V2, "enp1s0f0np0"), 1: IP_V2}))
    device = root / "class/infiniband/rocep1s0f0"
    (device / "device/net/enp1s0f0np0").rmdir()
    (device / "device/net").rmdir()
    (device / "device").rmdir()
    (device / "parent").write_text("enp1s0f0np0\n")
    (device / "ports/1/rate").write_text("2.5 Gb/sec (1X SDR)\n")
    verdict = judge(read_hcas(str(root)), {"rocep1s0f0": ("enp1s0f0np0", IP)})
    assert (verdict["problems"], verdict["gid_index"]) == ([], 1)


@pytest.mark.parametrize(
    ("table", "state", "words"),
    [
        (BASE, "4: ACTIVE", "IPv6 entries only"),
        (BASE | {2: IP_V1}, "4: ACTIVE", "only RoCE v1 carries it"),
        ({}, "4: ACTIVE", "its table is empty"),
        (BASE | {3: (mapped("10.9.9.9"), V2, "enp1s0f0np0")}, "4: ACTIVE", "its table has 10.9.9.9"),
        (BASE | {3: (mapped(IP), V2, "enp1s0f0np0.7")}, "4: ACTIVE", "its netdev there is enp1s0f0np0.7"),
        (BASE | {2: IP_V1, 3: IP_V2}, "1: DOWN", "is 1: DOWN instead of 4: ACTIVE"),
    ],
)
def test_each_kind_of_useless_table_is_told_apart(tmp_path: Path, table: dict[int, tuple[str, str, str]], state: str, words: str) -> None:
    verdict = judge(read_hcas(tree(tmp_path, table, state=state)), {"rocep1s0f0": ("enp1s0f0np0", IP)})
    assert len(verdict["problems"]) == 1 and words in verdict["problems"][0]
    assert verdict["gid_index"] is None or state != "4: ACTIVE"


def test_an_absent_hca_is_named(tmp_path: Path) -> None:
    verdict = judge(read_hcas(str(tmp_path)), {"rocep1s0f1": ("enp1s0f1np1", IP)})
    assert "rocep1s0f1 does not exist" in verdict["problems"][0]
    assert verdict["gid_index"] is None


def test_no_common_index_when_hcas_differ(tmp_path: Path) -> None:
    tree(tmp_path, BASE | {2: IP_V1, 3: IP_V2})
    other = {0: (LINK_LOCAL, V2, "enp1s0f1np1"), 4: (mapped("10.77.2.1"), V2, "enp1s0f1np1")}
    tree(tmp_path, other, "rocep1s0f1", "enp1s0f1np1")
    verdict = judge(read_hcas(str(tmp_path)), {"rocep1s0f0": ("enp1s0f0np0", IP), "rocep1s0f1": ("enp1s0f1np1", "10.77.2.1")})
    assert [row["gid_index"] for row in verdict["hcas"]] == [3, 4]
    assert verdict["gid_index"] is None and verdict["problems"] == []


@given(st.permutations([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (mapped(IP), V1), (mapped(IP), V2), (mapped("10.1.1.1"), V2)]))
def test_any_order_gives_the_entry_itself(order: list[tuple[str, str]]) -> None:
    gids = tuple(Gid(index, kind, gid, "n") for index, (gid, kind) in enumerate(order))
    index = Hca("h", "n", "4: ACTIVE", 200, 9000, gids).index_of(IP)
    assert index is not None and order[index] == (mapped(IP), V2)
