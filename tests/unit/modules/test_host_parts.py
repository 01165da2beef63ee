# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text in, decisions out: swap and sysctls, netplan and live legs, listening ports, managed files, status."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _host, _netplan, _settings, _sockets, _status, _units
from ansible_collections.gb10.cluster.plugins.module_utils._files import FileSet, ManagedFile
from hypothesis import given
from hypothesis import strategies as st

FSTAB = "# a comment swap\nUUID=1 / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n  /dev/zd0\tnone\tswap\tdefaults 0 0\n#/old none swap sw 0 0\n"
LEGS: list[dict[str, Any]] = [
    {"netdev": "enp1s0f0np0", "address": "10.10.0.1", "prefix_length": 30, "cable": "t1.0-t2.1"},
    {"netdev": "enP2p1s0f0np0", "address": "10.10.1.1", "prefix_length": 30, "cable": "t1.0-t2.1"},
]


def test_swap_entries_are_marked_and_given_back() -> None:
    off = _settings.fstab_without_swap(FSTAB)
    assert [line for line in off.splitlines() if not line.startswith("#")] == ["UUID=1 / ext4 defaults 0 1"]
    assert _settings.fstab_without_swap(off) == off
    assert _settings.fstab_with_swap(off) == FSTAB


@given(st.text(alphabet=" \n#/swapnoe\t0", max_size=200))
def test_marking_any_fstab_loses_nothing(text: str) -> None:
    assert _settings.fstab_with_swap(_settings.fstab_without_swap(text)) == text


def test_swaps_and_units_are_read() -> None:
    assert _settings.active_swaps("Filename\tType\tSize\n/swap.img file 8388604 0 -2\n") == ["/swap.img"]
    units = {"dev-zram0.swap": "[Swap]\n", "swap.img.swap": "[Unit]\nSourcePath=/etc/fstab\n", "masked.swap": ""}
    assert _settings.swap_units(units) == ["dev-zram0.swap"]


def test_sysctl_keys_keep_dots_inside_device_names() -> None:
    assert _settings.sysctl_path("vm.min_free_kbytes") == "vm/min_free_kbytes"
    assert _settings.sysctl_path("net/ipv4/conf/eth0.7/arp_ignore") == "net/ipv4/conf/eth0.7/arp_ignore"


def test_the_netplan_file_is_yaml_with_one_address_a_leg() -> None:
    ethernets = yaml.safe_load(_netplan.netplan_file(LEGS, 9000, "networkd"))["network"]["ethernets"]
    assert ethernets["enP2p1s0f0np0"]["addresses"] == ["10.10.1.1/30"]
    assert all(leg["mtu"] == 9000 and leg["ignore-carrier"] and not leg["dhcp4"] and leg["link-local"] == [] for leg in ethernets.values())


def addresses(**devices: tuple[int, list[str]]) -> str:
    return json.dumps(
        [
            {
                "ifname": name, "mtu": mtu, "flags": ["UP"],
                "addr_info": [{"family": "inet", "local": a.split("/")[0], "prefixlen": int(a.split("/")[1])} for a in cidrs],
            }
            for name, (mtu, cidrs) in devices.items()
        ]
    )  # fmt: skip


def test_live_legs_are_compared_with_the_plan() -> None:
    good = _netplan.parse_addresses(addresses(enp1s0f0np0=(9000, ["10.10.0.1/30"]), enP2p1s0f0np0=(9000, ["10.10.1.1/30"])))
    assert _netplan.leg_differences(LEGS, 9000, good) == []
    bad = _netplan.parse_addresses(addresses(enp1s0f0np0=(1500, ["10.10.0.1/24", "192.168.0.1/24"])))
    assert _netplan.leg_differences(LEGS, 9000, bad) == [
        "enp1s0f0np0 lacks 10.10.0.1/30",
        "enp1s0f0np0 also has 10.10.0.1/24, 192.168.0.1/24",
        "enp1s0f0np0 has MTU 1500 instead of 9000",
        "enP2p1s0f0np0 does not exist",
    ]


def test_a_held_port_is_found_with_its_program() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert port not in _sockets.listeners("/proc")
        server.listen()
        assert "(pid " in _sockets.listeners("/proc")[port]


def file_set(root: Path, *files: ManagedFile) -> FileSet:
    return FileSet("test", files, root=str(root))


def test_managed_files_are_written_compared_and_removed(tmp_path: Path) -> None:
    one, key = ManagedFile("/etc/gb10/a", b"1\n"), ManagedFile("/etc/gb10/key", b"secret\n", 0o600, secret=True)
    first = file_set(tmp_path, one, key)
    assert [change.path for change in first.changes] == ["/etc/gb10/a", "/etc/gb10/key"]
    assert "secret" not in str([change.diff() for change in first.changes])
    first.apply()
    assert stat.S_IMODE((tmp_path / "etc/gb10/key").stat().st_mode) == 0o600
    assert file_set(tmp_path, one, key).changes == []
    less = file_set(tmp_path, one)
    assert [(change.path, change.after) for change in less.changes] == [("/etc/gb10/key", None)]
    assert "secret" not in str(less.changes[0].diff()), "not when it goes, either"
    less.apply()
    assert not (tmp_path / "etc/gb10/key").exists()
    (tmp_path / "etc/gb10/foreign").write_text("x")
    file_set(tmp_path).apply()
    assert [path.name for path in (tmp_path / "etc/gb10").iterdir()] == ["foreign"], "only what was written is removed"


def test_a_write_that_fails_leaves_the_old_bytes(tmp_path: Path) -> None:
    _host.write(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        _host.write(tmp_path / "a", "text".encode, 0o644)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def rank_config() -> dict[str, Any]:
    container = {"image": "name:1", "volumes": [{"source": "/models/100%", "target": "/model", "read_only": True}]}
    return {"group": "lab", "rank": 0, "digest": "d", "engine": "podman", "container": container, "timeouts": {"stop_s": 30}, "start": {}}


def test_rank_files_change_with_the_image_and_hide_the_key() -> None:
    def rank_json(image: str, config_json: str = "c", content: str = "") -> dict[str, Any]:
        both = image, content or f"content of {image}"
        files = {file.path: file for file in _units.rank_files(rank_config(), b"package", both, "sesame", config_json, "/sys", None)}
        assert files["/etc/gb10/lab/api-key"].secret and files["/etc/gb10/lab/api-key"].mode == 0o600
        assert b"sesame" not in b"".join(file.content for path, file in files.items() if not path.endswith("api-key"))
        written: dict[str, Any] = json.loads(files["/etc/gb10/lab/rank.json"].content)
        return written

    assert rank_json("a") == rank_json("a")
    assert rank_json("a")["container"]["image"] == "a"
    assert rank_json("a")["digest"] != rank_json("b")["digest"]
    assert rank_json("a")["digest"] != rank_json("a", "another config.json")["digest"]
    # Docker's two stores have one image by two ids: each member runs its own, and the ranks start together.
    manifest, configuration = (rank_json(image, content="of both") for image in ("manifest's id", "configuration's id"))
    assert manifest["digest"] == configuration["digest"] and manifest["container"] != configuration["container"]


def test_a_rank_waits_for_the_file_systems_of_its_volumes() -> None:
    """Otherwise it would start on the empty directory under a checkpoint that is not mounted yet."""
    files = {file.path: file.content.decode() for file in _units.rank_files(rank_config(), b"", ("i", "c"), None, "c", "/sys", None)}
    assert "RequiresMountsFor=/models/100%%\n" in files["/etc/systemd/system/gb10-rank@lab.service.d/volumes.conf"]


def state(**fields: Any) -> _units.RankState:
    return _units.RankState(**{"active": "active", "phase": "serving", "detail": "", "config_hash": "", "failure": None} | fields)


def test_only_a_running_rank_with_another_configuration_is_restarted() -> None:
    assert _units.needs_restart(state(config_hash="0" * 64), b"{}")
    assert not _units.needs_restart(state(active="inactive", config_hash="0" * 64), b"{}")
    assert state(phase="waiting").holds_group is False and state(phase="loading").holds_group is True
    assert state(active="deactivating").is_active and not state(active="deactivating").holds_group, "its group has ended"


def test_a_start_fails_by_what_came_after_it_and_not_by_its_own_stop_of_another_rank() -> None:
    """This member was told to start at 100, the last one at 110: the stop in between was to give that one a new configuration."""
    for stopped, at, fails in ((False, 99, False), (False, 105, True), (True, 105, False), (True, 111, True)):
        assert state(failure={"at": at, "reason": "…", "stopped": stopped}).has_failed(100, stops_since=110) is fails
    assert not state().has_failed(0, 0)


def test_each_bad_line_of_the_screen_ends_with_a_command() -> None:
    plan = {
        "cluster": {"name": "lab", "head": "t1", "topology": "ring", "members": ["t1", "t2", "t3"], "profile": "p"},
        "service": {"url": "http://x", "served_model_name": "m"},
        "members": {name: {"rank": rank} for rank, name in enumerate(("t1", "t2", "t3"))},
    }
    good = {
        "active": "active", "phase": "serving", "detail": "", "failure": None, "leg_problems": [], "legs": 4,
        "mem_free_mib": 2048, "mem_total_mib": 4096, "swaps": [], "guard": None, "events": [], "at_boot": True, "lock": "",
    }  # fmt: skip
    assert _status.screen(plan, {"t1": good, "t2": good, "t3": good})[0].startswith("group lab: serving m")
    failure = {"reason": "rank 1 on t2 exited with status 3", "culprit": "t2", "at": 1, "log": []}
    bad = good | {
        "active": "failed",
        "phase": "stopped",
        "failure": failure,
        "leg_problems": ["enp1s0f0np0 has no carrier"],
        "swaps": ["/swap"],
        "guard": {"action": "rank told to stop", "reason": "MemAvailable 900 MiB for 10 s"},
    }
    lines = _status.screen(plan, {"t1": good | {"phase": "waiting"}, "t2": bad, "t3": None})
    assert "not serving" in lines[0]
    assert all("->" in line for line in lines[2:])
    assert any("memory guard: rank told to stop, MemAvailable 900 MiB" in line for line in lines)
    assert lines[-1] == "last failure: rank 1 on t2 exited with status 3 -> ansible-playbook gb10.cluster.logs --limit t2"
