# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fabric role alone: what it leaves on the members of any topology, and what it says and does when something is wrong.

The last test of each topology takes all of it back.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import INVENTORY, ROOT, as_user, begin, kill, lab, wait_for

OTHER_POOL = "10.20.0.0/16"
VENDORS_FILE = """\
# what a vendor's page says
network:
  version: 2
  ethernets:
    enp1s0f0np0:
      # half A
      addresses:
      - 192.168.0.1/24
    # not a leg
    dummy9:
      optional: true
    "enP2p1s0f0np0": # half B
      addresses: [192.168.1.1/24]
"""
VENDORS_FILE_WITHOUT_LEGS = """\
# what a vendor's page says
network:
  version: 2
  ethernets:
    # not a leg
    dummy9:
      optional: true
"""

any_topology = pytest.mark.fabric
faults = pytest.mark.fabric_faults


def fabric(playbook: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = playbook("site", "--tags", "fabric", *arguments)
    return done


def module(pattern: str, name: str, arguments: str) -> subprocess.CompletedProcess[str]:
    """One module on some hosts; its output is on one line, as wide as it is."""
    command = [str(Path(sys.executable).with_name("ansible")), "-i", INVENTORY, pattern, "-m", name, "-a", arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=as_user(), check=False)
    done.stdout = " ".join(done.stdout.split())
    return done


def verify() -> subprocess.CompletedProcess[str]:
    """The role's verification alone."""
    return module("sparks", "ansible.builtin.include_role", "name=gb10.cluster.fabric tasks_from=verify")


def unchanged(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"changed=[1-9]", done.stdout), done.stdout


def ipv4(host: Host) -> dict[str, list[str]]:
    """Addresses by device."""
    shown = json.loads(host.check_output("ip -json -4 address"))
    return {device["ifname"]: [f"{a['local']}/{a['prefixlen']}" for a in device["addr_info"]] for device in shown if device}


def planned(plan: dict[str, Any], name: str) -> dict[str, list[str]]:
    return {leg["netdev"]: [f"{leg['address']}/{leg['prefix_length']}"] for leg in plan["members"][name]["legs"]}


def as_planned(plan: dict[str, Any], hosts: dict[str, Host]) -> bool:
    return all(planned(plan, name).items() <= ipv4(host).items() for name, host in hosts.items())


def pending(host: Host) -> bool:
    return bool(host.file("/var/lib/gb10/network/pending").exists)


def network_files(host: Host) -> str:
    """Bytes, modes and owners of all that configures the network."""
    return str(
        host.check_output(
            "cd /etc && find netplan NetworkManager -type f 2>/dev/null | sort | xargs -r stat -c '%n %a %U' && cat netplan/*"
        )
    )


@any_topology
def test_every_leg_is_as_planned_and_carries_full_packets(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    assert as_planned(plan, hosts)
    for name, host in hosts.items():
        for leg in plan["members"][name]["legs"]:
            for peer in leg["peers"]:
                host.check_output(f"ping -n -c 1 -W 2 -M do -s 8972 -I {leg['netdev']} {peer['address']}")


@any_topology
def test_a_leg_answers_for_its_own_address_only(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    """Both halves of a cage see the same wire: without this either answers for the address of the other."""
    for name, host in hosts.items():
        for leg in plan["members"][name]["legs"]:
            folder = f"/proc/sys/net/ipv4/conf/{leg['netdev']}"
            assert host.check_output(f"cat {folder}/arp_ignore {folder}/arp_announce").split() == ["1", "2"]


@any_topology
def test_nothing_waits_for_a_confirmation(hosts: dict[str, Host]) -> None:
    for host in hosts.values():
        assert not pending(host)
        assert host.check_output("systemctl list-units --all --no-legend 'gb10-network-rollback*.timer'") == ""


@any_topology
def test_it_is_there_after_a_power_cut(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    lab("off", "t2")
    try:
        for leg in plan["members"]["t2"]["legs"]:
            peer = leg["peers"][0]
            shown = hosts[peer["member"]].check_output(f"ip address show {peer['netdev']}")
            assert "NO-CARRIER" in shown and f"inet {peer['address']}/" in shown, "a leg keeps its address without a carrier"
    finally:
        lab("on", "t2")
    wait_for(lambda: as_planned(plan, hosts))
    wait_for(lambda: verify().returncode == 0)


@faults
def test_verification_names_all_that_is_wrong_and_where(hosts: dict[str, Host]) -> None:
    """Five faults at once, each on a leg of its own."""
    drop = "type filter hook input priority 0; iifname enP2p1s0f0np0 drop; iifname mgmt0 ip saddr != 10.99.0.1 drop;"
    changes = {
        "t2": (
            "ip link set enp1s0f1np1 mtu 1500; ip link set enP2p1s0f1np1 down",
            "ip link set enp1s0f1np1 mtu 9000; ip link set enP2p1s0f1np1 up",
        ),
        "t3": (
            f"ip address add 10.10.2.1/30 dev enp1s0f0np0; nft 'table ip cut {{ chain in {{ {drop} }}; }}'",
            "ip address delete 10.10.2.1/30 dev enp1s0f0np0; nft delete table ip cut",
        ),
    }
    for name, (change, _undo) in changes.items():
        hosts[name].check_output(change)
    try:
        said = verify().stdout
    finally:
        for name, (_change, undo) in changes.items():
            hosts[name].check_output(undo)
    for words in (
        "enp1s0f1np1 has MTU 1500 instead of 9000: run the fabric role",
        "enp1s0f0np0 does not reach t2 (10.10.0.2 on enp1s0f1np1) with 9000 bytes, but with few: set MTU 9000 at enp1s0f1np1 of t2",
        "enP2p1s0f1np1 is down: run the fabric role",
        "enP2p1s0f0np0 has no carrier: check cable t1.0-t2.1",
        "enp1s0f0np0 also has 10.10.2.1/30: run the fabric role",
        "10.10.2.1 of enp1s0f1np1 is also used by 02:67:62:01:00:03 on cable t1.1-t3.0",
        "enP2p1s0f1np1 does not reach t3 (10.10.3.2 on enP2p1s0f0np0): no answer; check cable t1.1-t3.0",
        "t3 does not answer on the management plane (10.99.0.13: no answer)",
    ):
        assert words in said, f"{words!r} is not in: {said}"


@faults
def test_an_address_of_a_leg_on_another_device_is_refused(hosts: dict[str, Host], playbook: Any) -> None:
    host = hosts["t3"]
    host.check_output("ip link add other0 type veth peer name other1 && ip addr add 10.10.4.1/30 dev other0 && ip link set other0 up")
    before = network_files(host)
    try:
        done = fabric(playbook)
    finally:
        host.check_output("ip link del other0")
    assert done.returncode != 0
    assert "other0 already uses 10.10.4.0/30" in " ".join(done.stdout.split()), done.stdout
    assert network_files(host) == before


@faults
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("ethernets: {all: {match: {name: 'enp1*'}, dhcp4: true}}", "enp1s0f0np0 is also configured by the netplan entry all"),
        (
            "ethernets: {x: {match: {macaddress: '02:67:62:01:00:01'}, dhcp4: true}}",
            "enp1s0f0np0 is also configured by the netplan entry x",
        ),
        ("ethernets: {enp1s0f0np0: {addresses: [192.168.0.1/24]}}", "enp1s0f0np0 would also have 192.168.0.1/24"),
        ("bonds: {bond0: {interfaces: [enp1s0f0np0]}}", "enp1s0f0np0 would be part of a bond (bond0)"),
        ("vlans: {vlan5: {id: 5, link: enp1s0f0np0}}", "enp1s0f0np0 would be part of a VLAN (vlan5)"),
        ("ethernets: {dummy9: {addresses: [nonsense]}}", "netplan refuses the files"),
    ],
    ids=["wildcard", "MAC address", "flow style", "bond", "VLAN", "not valid"],
)
def test_what_would_make_a_leg_another_is_refused(entry: str, words: str, plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    """Asked of one host's module, since no run of the role is needed to know the sentence."""
    host = hosts["t1"]
    host.check_output(f"umask 077 && printf 'network:\\n  version: 2\\n  %s\\n' \"{entry}\" >/etc/netplan/90-other.yaml")
    before = network_files(host)
    try:
        done = module("t1", "gb10.cluster.fabric_network", json.dumps({"legs": plan["members"]["t1"]["legs"], "mtu": 8000}))
        assert done.returncode != 0 and words in done.stdout, done.stdout
        assert network_files(host) == before
        assert not pending(host)
    finally:
        host.check_output("rm -f /etc/netplan/90-other.yaml")


@faults
def test_a_change_whose_proof_fails_is_taken_back_everywhere_at_once(plan: dict[str, Any], hosts: dict[str, Host], playbook: Any) -> None:
    before = {name: network_files(host) for name, host in hosts.items()}
    hosts["t3"].check_output(
        "nft 'add table ip cut; add chain ip cut in { type filter hook input priority 0; }; add rule ip cut in iifname enp1s0f1np1 drop'"
    )
    try:
        done = fabric(playbook, "-e", f"cluster_leg_pool={OTHER_POOL}")
    finally:
        hosts["t3"].check_output("nft delete table ip cut")
    assert done.returncode != 0
    assert "does not reach t3 (10.20.4.2 on enp1s0f1np1)" in " ".join(done.stdout.split()), done.stdout
    assert {name: network_files(host) for name, host in hosts.items()} == before
    wait_for(lambda: as_planned(plan, hosts))
    assert not any(pending(host) for host in hosts.values())


def killed_controller(hosts: dict[str, Host], seconds: int) -> None:
    """A run that would give the legs other addresses, killed as soon as a host has begun."""
    run = begin("site", "--tags", "fabric", "-e", f"cluster_leg_pool={OTHER_POOL}", "-e", f"fabric_revert_after={seconds}")
    try:
        wait_for(lambda: pending(hosts["t2"]))
    finally:
        kill(run)


@faults
def test_a_member_takes_back_by_itself_what_a_killed_controller_left(plan: dict[str, Any], hosts: dict[str, Host]) -> None:
    before = {name: network_files(host) for name, host in hosts.items()}
    killed_controller(hosts, seconds=15)
    wait_for(lambda: not any(pending(host) for host in hosts.values()))
    wait_for(lambda: as_planned(plan, hosts))
    assert {name: network_files(host) for name, host in hosts.items()} == before


@faults
def test_a_boot_before_the_time_is_over_takes_it_back_too(plan: dict[str, Any], hosts: dict[str, Host], playbook: Any) -> None:
    before = network_files(hosts["t2"])
    killed_controller(hosts, seconds=3600)
    lab("off", "t2")
    lab("on", "t2")
    wait_for(lambda: planned(plan, "t2").items() <= ipv4(hosts["t2"]).items())
    assert network_files(hosts["t2"]) == before and not pending(hosts["t2"])
    # The others still wait for an hour; a run takes over what the killed one left.
    assert fabric(playbook).returncode == 0
    assert as_planned(plan, hosts) and not any(pending(host) for host in hosts.values())


@faults
def test_two_plugs_in_each_others_cage_are_named(hosts: dict[str, Host], playbook: Any) -> None:
    """The same as if somebody had swapped them: on t1 the devices of cage 0 and of cage 1 change their names."""
    halves = (("enp1s0f0np0", "enp1s0f1np1"), ("enP2p1s0f0np0", "enP2p1s0f1np1"))
    down = "; ".join(f"ip link set {netdev} down" for half in halves for netdev in half)
    names = "; ".join(f"ip link set {a} name other; ip link set {b} name {a}; ip link set other name {b}" for a, b in halves)
    up = "; ".join(f"ip link set {netdev} up" for half in halves for netdev in half)
    before = network_files(hosts["t1"])
    hosts["t1"].check_output(f"{down}; {names}; {up}")
    try:
        done = fabric(playbook)
    finally:
        hosts["t1"].check_output(f"{down}; {names}; {up}")
    assert done.returncode != 0
    assert "swap the two plugs of t1" in " ".join(done.stdout.split()), done.stdout
    assert network_files(hosts["t1"]) == before


@faults
def test_a_host_is_prepared_and_gets_back_what_it_had(hosts: dict[str, Host]) -> None:
    host, unit = hosts["t1"], "/etc/systemd/system/dev-zram0.swap"
    host.check_output(f"mkdir -p /etc/nvidia && touch /etc/nvidia/cx7-hotplug-enabled && printf '[Swap]\nWhat=/dev/zram0\n' >{unit}")
    try:
        assert module("t1", "gb10.cluster.host_settings", "state=present").returncode == 0
        assert host.check_output("ls /etc/nvidia") == "cx7-hotplug-enabled.off-by-gb10"
        # A condition that does not hold: no failure, and no swap.
        host.check_output("systemctl start dev-zram0.swap")
        assert host.check_output("systemctl show --property=ConditionResult,DefaultLimitMEMLOCK --value dev-zram0.swap") == "no"
        assert host.check_output("systemctl show --property=DefaultLimitMEMLOCK --value") == "infinity"
        again = module("t1", "gb10.cluster.host_settings", "state=present")
        assert again.returncode == 0 and "changed: false" in again.stdout.replace('"', ""), again.stdout
        assert module("t1", "gb10.cluster.host_settings", "state=absent").returncode == 0
        assert host.check_output("ls /etc/nvidia") == "cx7-hotplug-enabled"
        assert not host.file(f"{unit}.d/90-gb10.conf").exists and host.file(unit).exists
    finally:
        host.check_output(f"rm -rf /etc/nvidia {unit}; systemctl daemon-reload")


@faults
def test_the_role_puts_right_what_others_did_to_the_legs(plan: dict[str, Any], hosts: dict[str, Host], playbook: Any) -> None:
    """By hand on one host, by a vendor's file on another. Of that file all stays that is about no leg."""
    hosts["t2"].check_output("ip link set enp1s0f1np1 mtu 1500 down && ip address add 10.10.0.1/30 dev enp1s0f1np1")
    hosts["t1"].check_output(f"umask 077 && cat >/etc/netplan/40-cx7.yaml <<'EOF'\n{VENDORS_FILE}EOF")
    done = fabric(playbook)
    assert done.returncode == 0, done.stdout
    assert hosts["t1"].file("/etc/netplan/40-cx7.yaml").content_string == VENDORS_FILE_WITHOUT_LEGS
    assert as_planned(plan, hosts)
    unchanged(fabric(playbook))


@any_topology
def test_all_of_it_can_be_taken_back(hosts: dict[str, Host], playbook: Any) -> None:
    restored = playbook("fabric_restore")
    assert restored.returncode == 0, restored.stdout
    unchanged(playbook("fabric_restore"))
    for host in hosts.values():
        file = host.file("/etc/netplan/40-cx7.yaml")
        assert [file.content_string, file.mode] == [VENDORS_FILE, 0o600] if file.exists else host.check_output("ls /etc/netplan") == ""
        legs = [addresses for netdev, addresses in ipv4(host).items() if netdev not in ("lo", "mgmt0")]
        assert legs == ([["192.168.0.1/24"], ["192.168.1.1/24"]] if file.exists else [])
        assert host.file("/etc/fstab").contains("^/swap.img none swap sw 0 0$")
        assert not host.file("/etc/sysctl.d/90-gb10.conf").exists
