# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The member's network files: what is taken out of others', what netplan would make of all, and what is kept for the way back."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _netplan, _rollback, _settings
from ansible_collections.gb10.cluster.plugins.module_utils._files import Borrowed
from hypothesis import given
from hypothesis import strategies as st

LEGS: list[dict[str, Any]] = [
    {"netdev": "enp1s0f0np0", "address": "10.10.0.1", "prefix_length": 30, "cable": "t1.0-t2.1"},
    {"netdev": "enP2p1s0f0np0", "address": "10.10.1.1", "prefix_length": 30, "cable": "t1.0-t2.1"},
]
NETDEVS = [leg["netdev"] for leg in LEGS]
MAC = "02:67:62:01:00:01"


def test_an_entry_goes_and_every_other_line_stays() -> None:
    text = """\
# first
network:
  version: 2
  ethernets:
    enp1s0f0np0:   # cage 0
      addresses:
      - 192.168.0.1/24
      # deeper

    # of the next
    enP7s7:
      dhcp4: true
    'enP2p1s0f0np0':
      mtu: 9000
  wifis:
    enp1s0f0np0x: {dhcp4: true}
"""
    assert (
        _netplan.without_devices(text, NETDEVS)
        == """\
# first
network:
  version: 2
  ethernets:

    # of the next
    enP7s7:
      dhcp4: true
  wifis:
    enp1s0f0np0x: {dhcp4: true}
"""
    )


def test_a_file_of_legs_alone_keeps_no_empty_key() -> None:
    text = "network:\n  ethernets:\n    enp1s0f0np0:\n      mtu: 9000\n    # a word\n  version: 2\n"
    assert _netplan.without_devices(text, NETDEVS) == "network:\n    # a word\n  version: 2\n"
    assert _netplan.without_devices("network:\n  ethernets:\n    enp1s0f0np0: {mtu: 1}\n", NETDEVS) == "network:\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "network: {ethernets: {enp1s0f0np0: {mtu: 9000}}}\n",
        "ethernets:\n  enp1s0f0np0:\n    mtu: 1\n",
        "network:\n  ethernets:\n    x:\n      enp1s0f0np0: 1\n",
    ],
    ids=["empty", "flow style", "not below network", "deeper"],
)
def test_what_is_no_entry_in_block_style_stays(text: str) -> None:
    assert _netplan.without_devices(text, NETDEVS) == text


DEVICE = st.fixed_dictionaries(
    {},
    optional={
        "addresses": st.lists(st.sampled_from(["192.168.0.1/24", "10.0.0.2/8"]), max_size=2),
        "dhcp4": st.booleans(),
        "nameservers": st.fixed_dictionaries({"search": st.just(["lab"]), "addresses": st.just(["1.1.1.1"])}),
        "routes": st.just([{"to": "10.5.0.0/16", "via": "10.0.0.9"}]),
    },
)
NAMES = st.sampled_from([*NETDEVS, "enP7s7", "enp1s0f0np00", "eth0"])


@given(
    st.dictionaries(NAMES, DEVICE, min_size=1),
    st.dictionaries(st.sampled_from(["bond0", "enp1s0f0np0"]), DEVICE),
    st.integers(min_value=2, max_value=6),
    st.booleans(),
)
def test_any_file_keeps_its_other_entries(ethernets: dict[str, Any], bonds: dict[str, Any], indent: int, sort: bool) -> None:
    before = {"network": {"version": 2, "ethernets": ethernets, **({"bonds": bonds} if bonds else {})}}
    # By way of JSON, since YAML makes aliases of what is one object in Python.
    text = yaml.safe_dump(json.loads(json.dumps(before)), indent=indent, sort_keys=sort, default_flow_style=False)
    after = yaml.safe_load(_netplan.without_devices(text, NETDEVS))
    kept = {name: device for name, device in ethernets.items() if name not in NETDEVS}
    assert after["network"].get("ethernets", {}) == kept
    assert after["network"].get("bonds", {}) == bonds
    assert _netplan.without_devices(_netplan.without_devices(text, NETDEVS), NETDEVS) == _netplan.without_devices(text, NETDEVS)


def test_secrets_of_other_devices_are_not_shown() -> None:
    shown = _netplan.redacted(
        '      access-points:\n        home:\n          password: "sesame"\n      auth:\n        client-key-password: open\n'
    )
    assert "sesame" not in shown and "open" not in shown and "home:" in shown


# The texts are netplan 1.1.2's output for these entries.
OWN = "[Match]\nName=enp1s0f0np0\n\n[Network]\nLinkLocalAddressing=no\nAddress=10.10.0.1/30\nConfigureWithoutCarrier=yes\n"
ELSEWHERE = {
    "/run/systemd/network/10-netplan-enp1s0f0np0.network": OWN,
    "/run/systemd/network/10-netplan-bond0.network": "[Match]\nName=bond0\n\n[Network]\nLinkLocalAddressing=ipv6\n",
    "/run/NetworkManager/system-connections/netplan-home.nmconnection": "[connection]\nid=netplan-home\ntype=wifi\n\n[wifi]\nssid=home\n",
    "/etc/systemd/network/00-management.network": "[Match]\nName=mgmt0\n\n[Link]\nUnmanaged=yes\n",
    "/etc/systemd/network/99-any.network": "[Match]\nType=ether\n\n[Network]\nDHCP=yes\n",
}


def problems(rendered: dict[str, str]) -> list[str]:
    return _netplan.rendered_problems(rendered, LEGS[:1], {"enp1s0f0np0": MAC})


def test_a_leg_that_only_its_own_entry_configures_is_right() -> None:
    assert problems(ELSEWHERE) == []
    own = (
        "[connection]\nid=netplan-enp1s0f0np0\ntype=ethernet\ninterface-name=enp1s0f0np0\n\n[ipv4]\nmethod=manual\naddress1=10.10.0.1/30\n"
    )
    assert problems({"/run/NetworkManager/system-connections/netplan-enp1s0f0np0.nmconnection": own}) == []


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        (
            "/run/systemd/network/10-netplan-all.network",
            "[Match]\nName=enp1*\n\n[Network]\nDHCP=ipv4\n",
            "enp1s0f0np0 is also configured by the netplan entry all",
        ),
        (
            "/run/systemd/network/10-netplan-bymac.network",
            "[Match]\nPermanentMACAddress=02:67:62:01:00:01\n\n[Network]\nDHCP=ipv4\n",
            "enp1s0f0np0 is also configured by the netplan entry bymac",
        ),
        (
            "/run/NetworkManager/system-connections/netplan-NM-6f.nmconnection",
            "[connection]\nid=Wired 1\ntype=ethernet\n\n[match]\ninterface-name=enp1s0f0np0;\n",
            "enp1s0f0np0 is also configured by the netplan entry NM-6f",
        ),
        (
            "/etc/NetworkManager/system-connections/Wired 1.nmconnection",
            "[connection]\nid=Wired 1\ntype=ethernet\ninterface-name=enp1s0f0np0\n",
            "enp1s0f0np0 is also configured by /etc/NetworkManager/system-connections/Wired 1.nmconnection",
        ),
        (
            "/run/systemd/network/10-netplan-enp1s0f0np0.network",
            OWN + "Address=192.168.0.1/24\n",
            "enp1s0f0np0 would also have 192.168.0.1/24",
        ),
        ("/run/systemd/network/10-netplan-enp1s0f0np0.network", OWN + "Bond=bond0\n", "enp1s0f0np0 would be part of a bond (bond0)"),
        ("/run/systemd/network/10-netplan-enp1s0f0np0.network", OWN + "VLAN=vlan5\n", "enp1s0f0np0 would be part of a VLAN (vlan5)"),
        (
            "/run/NetworkManager/system-connections/netplan-enp1s0f0np0.nmconnection",
            "[connection]\ninterface-name=enp1s0f0np0\nslave-type=bond\nmaster=bond0\n\n[ipv4]\naddress1=10.10.0.1/30\n",
            "enp1s0f0np0 would be part of bond0",
        ),
    ],
)
def test_whatever_else_would_configure_a_leg_is_named(path: str, text: str, sentence: str) -> None:
    assert problems({**ELSEWHERE, path: text}) == [sentence]


def test_each_legs_renderer_is_its_own() -> None:
    """One of the whole file would be the management device's too."""
    network = yaml.safe_load(_netplan.netplan_file(LEGS, 9000, "networkd"))["network"]
    assert "renderer" not in network
    assert {device["renderer"] for device in network["ethernets"].values()} == {"networkd"}


def test_the_way_back_holds_what_is_live() -> None:
    devices = {
        "enp1s0f0np0": _netplan.Netdev(1500, True, ("192.168.0.1/24",), True, MAC),
        "enP2p1s0f0np0": _netplan.Netdev(9000, False, (), False),
        "mgmt0": _netplan.Netdev(1500, True, ("10.99.0.11/24",)),
    }
    flush, links, addresses = _netplan.way_back(devices, [*NETDEVS, "gone"])
    assert flush == ["address flush dev enp1s0f0np0", "address flush dev enP2p1s0f0np0"]
    assert links == ["link set dev enp1s0f0np0 mtu 1500 up", "link set dev enP2p1s0f0np0 mtu 9000 down"]
    assert addresses == ["address replace 192.168.0.1/24 dev enp1s0f0np0"]
    now = devices | {"mgmt0": _netplan.Netdev(1500, True, ()), "enp1s0f0np0": _netplan.Netdev(9000, True, ("10.10.0.1/30",))}
    assert _netplan.lost_addresses(devices, now, NETDEVS) == ["mgmt0 lost 10.99.0.11/24"]
    assert _netplan.lost_addresses(devices, devices, NETDEVS) == []


def borrowed(root: Path) -> Borrowed:
    return Borrowed("test", root=str(root))


def edit(root: Path, content: bytes) -> None:
    files = borrowed(root)
    files.edit(files.edits({"/etc/a": content}))


def test_an_edited_file_is_given_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "etc/a"
    file.parent.mkdir()
    file.write_bytes(b"\xff theirs\n")
    file.chmod(0o640)
    edit(tmp_path, b"ours\n")
    edit(tmp_path, b"ours again\n")
    files = borrowed(tmp_path)
    assert files.edits({"/etc/a": b"ours again\n"}) == [] and files.strangers() == {}
    files.give_back(files.returns())
    assert file.read_bytes() == b"\xff theirs\n" and file.stat().st_mode & 0o7777 == 0o640
    assert borrowed(tmp_path).returns() == []
    assert list((tmp_path / "var/lib/gb10/files").iterdir()) == []


def test_a_strangers_edit_is_seen_and_is_what_comes_back_after_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "etc/a"
    file.parent.mkdir()
    file.write_bytes(b"theirs\n")
    edit(tmp_path, b"ours\n")
    file.write_bytes(b"theirs, newer\n")
    assert list(borrowed(tmp_path).strangers()) == ["/etc/a"]
    edit(tmp_path, b"ours\n")
    files = borrowed(tmp_path)
    assert files.strangers() == {}
    files.give_back(files.returns())
    assert file.read_bytes() == b"theirs, newer\n"


def test_a_roll_back_keeps_what_was_there_first(tmp_path: Path) -> None:
    """A second change before the first is confirmed must not take the first one's files for the previous ones."""
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("before\n")
    for _change in range(2):
        kept = _rollback._Kept(tmp_path / "pending")
        kept.keep([str(there), str(new)])
        there.write_text("after\n")
        new.write_text("after\n")
    content = (tmp_path / "pending/replaced.tar").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        file = archive.extractfile(str(there).lstrip("/"))
        assert archive.getnames() == [str(there).lstrip("/")]
        assert file and file.read() == b"before\n"
    assert (tmp_path / "pending/created").read_text() == f"{new}\n"


def test_each_leg_answers_for_its_own_address_only() -> None:
    assert _settings.leg_sysctls(["eth0.7"]) == {"net/ipv4/conf/eth0.7/arp_ignore": "1", "net/ipv4/conf/eth0.7/arp_announce": "2"}


def test_the_rules_of_ufw_for_a_leg_are_found() -> None:
    """As ufw 0.36 writes them; a rule for one port is none for all."""
    rules = """\
### RULES ###

### tuple ### allow any any 0.0.0.0/0 any 0.0.0.0/0 in_enp1s0f0np0 comment=676231302e636c7573746572
-A ufw-user-input -i enp1s0f0np0 -j ACCEPT

### tuple ### allow any any 0.0.0.0/0 any 0.0.0.0/0 in_enP2p1s0f0np0
-A ufw-user-input -i enP2p1s0f0np0 -j ACCEPT

### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in_enP7s7
### tuple ### allow any any 0.0.0.0/0 any 10.0.0.0/8 in_enp1s0f1np1
"""
    assert _settings.ufw_allowed(rules) == {"enp1s0f0np0": _settings.UFW_COMMENT, "enP2p1s0f0np0": ""}
