# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is exported to whom, what is sent to whom, and which way a member gets a checkpoint. The real ones run in the second lab."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _nfs, _zfs
from ansible_collections.gb10.cluster.plugins.module_utils._zfs import Snapshot
from hypothesis import given
from hypothesis import strategies as st

PATH = "/var/lib/gb10/models/tiny"
ADDRESSES = st.lists(st.integers(1, 254).map(lambda number: f"10.10.0.{number}"), min_size=1, unique=True)


@given(ADDRESSES)
def test_the_export_file_names_just_its_clients(clients: list[str]) -> None:
    text = _nfs.exports_text(PATH, clients)
    assert _nfs.clients_of(text) == sorted(clients)
    assert text.count("root_squash") == text.count(f"fsid={_nfs.fsid(PATH)}") == len(clients)
    assert "*" not in text and "no_root_squash" not in text


def test_a_live_export_is_known_by_path_client_and_identity() -> None:
    """As exportfs -s writes it; the other lines are somebody else's. Synthetic."""
    ours = f"{PATH}  10.10.0.2(sync,wdelay,hide,no_subtree_check,fsid={_nfs.fsid(PATH)},sec=sys,ro,secure,root_squash,no_all_squash)"
    text = f"/srv/other  *(sync,rw,no_root_squash)\n{ours}\n{PATH}  10.10.9.9(ro,root_squash,fsid=0)\n"
    live = _nfs.parse_exports(text)
    assert [(export.path, export.client) for export in live] == [("/srv/other", "*"), (PATH, "10.10.0.2"), (PATH, "10.10.9.9")]
    assert [_nfs.is_live(export, PATH, "10.10.0.2") for export in live] == [False, True, False]
    assert not _nfs.is_live(live[2], PATH, "10.10.9.9")


@pytest.mark.parametrize(
    ("clients", "filesystem", "words"),
    [
        ([], "ext4", "NFS would give it to everybody"),
        (["10.10.0.0/24"], "ext4", "single addresses only"),
        (["*"], "ext4", "single addresses only"),
        (["10.10.0.2"], "overlay", "is an overlay and cannot be exported"),
        (["10.10.0.2"], "nfs4", "itself an NFS mount"),
    ],
)
def test_what_must_not_be_exported_is_refused(clients: list[str], filesystem: str, words: str) -> None:
    assert words in _nfs.refusal(PATH, clients, filesystem)
    assert not _nfs.refusal(PATH, ["10.10.0.2"], "ext4")


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /var/lib rw shared:2 - overlay overlay rw,lowerdir=/a
31 30 8:2 / /var/lib/gb10\\040models rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"), [("/etc", "ext4"), ("/var/lib/x", "overlay"), ("/var/library", "ext4"), ("/var/lib/gb10 models/m", "xfs")]
)
def test_a_path_is_on_its_nearest_mount(path: str, kind: str) -> None:
    assert _nfs.filesystem_of(path, MOUNTS) == kind


MOUNTED = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
40 22 0:40 / /var/lib/m\\040m rw,nosuid shared:3 - nfs4 10.10.0.1:/srv/m\\040m ro,vers=4.2,hard,nconnect=8
41 22 0:41 / /w rw - nfs4 10.10.0.1:/w rw,vers=4.2
42 22 0:42 / /o ro - nfs4 10.10.0.1:/o ro,vers=4.1
43 22 0:43 / /t rw - nfs4 10.10.0.1:/t ro,vers=4.2
44 43 0:44 / /t rw - tmpfs over rw
45 22 0:45 / /e rw - tmpfs  rw
"""


@pytest.mark.parametrize(
    ("path", "source", "right"),
    [
        ("/var/lib/m m", "/srv/m m", True),
        ("/var/lib/m m", "/srv/other", False),
        ("/w", "/w", False),  # writable
        ("/o", "/o", False),  # an older NFS
        ("/t", "/t", False),  # something lies on top
        ("/none", "/none", False),
    ],
)
def test_a_mount_is_right_by_source_version_and_read_only(path: str, source: str, right: bool) -> None:
    assert _nfs.is_as_wanted(_nfs.mount_at(path, MOUNTED), "10.10.0.1", source) is right


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("mount.nfs4: Protocol not supported for 10.10.0.1:/m on /x", "vers4.2 in /etc/nfs.conf"),
        ("mount.nfs4: mounting 10.10.0.1:/m failed, reason given by server: No such file or directory", "with the head in it"),
        ("mount.nfs4: access denied by server while mounting 10.10.0.1:/m", "with the head in it"),
        ("mount.nfs4: Connection refused for 10.10.0.1:/m on /x", "check nfs-server there"),
        ("mount.nfs4: Connection timed out for 10.10.0.1:/m on /x", "check nfs-server there"),
        ("mount.nfs4: No route to host for 10.10.0.1:/m on /x", "check nfs-server there"),
        ("something new", "the kernel's log"),
    ],
)
def test_what_the_server_refuses_has_a_cure(words: str, cure: str) -> None:
    """As mount.nfs4 of nfs-utils 2.8 words it; the real refusals are the second lab's."""
    sentence = _nfs.trial_refusal("10.10.0.1", "/m", words)
    assert cure in sentence and words in sentence and "\n" not in sentence


SNAPSHOTS = st.lists(st.integers(0, 9), unique=True).map(lambda numbers: [Snapshot(f"gb10-{number}", str(number)) for number in numbers])


@given(SNAPSHOTS, st.lists(st.integers(0, 9).map(str)))
def test_an_increment_begins_at_the_newest_snapshot_that_both_have(ours: list[Snapshot], theirs: list[str]) -> None:
    base = _zfs.common(ours, theirs)
    shared = [snapshot for snapshot in ours if snapshot.guid in theirs]
    assert base == (shared[-1] if shared else None)
    argv = _zfs.send_argv("pool/tiny", "gb10-new", base, "")
    assert argv[-1] == "pool/tiny@gb10-new" and ("-i" in argv) == bool(base) and {"-L", "-c"} < set(argv)
    assert _zfs.send_argv("pool/tiny", "gb10-new", base, "1-abc") == ["zfs", "send", "-t", "1-abc"]


@given(SNAPSHOTS, st.from_regex(r"[0-9a-f-]*", fullmatch=True))
def test_a_request_survives_its_way(snapshots: list[Snapshot], token: str) -> None:
    assert _zfs.parse_request(_zfs.request(snapshots, token)) == ([snapshot.guid for snapshot in snapshots], token)


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"have": ["a"], "token": ""}', b'{"have": [], "token": "x; reboot"}', b'{"have": 1, "token": ""}']
)
def test_what_is_no_request_is_none(line: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        _zfs.parse_request(line)


def test_only_our_own_old_snapshots_are_too_many() -> None:
    names = ["daily-1", "gb10-a", "gb10-b", "daily-2", "gb10-c"]
    text = "".join(f"pool/tiny@{name}\t{index}\n" for index, name in enumerate(names))
    assert _zfs.surplus(_zfs.parse_snapshots(text)) == ["gb10-a"]


@pytest.mark.parametrize("name", ["pool", "pool/", "/pool/x", "pool/a b", "pool/x@y", "-o/x", "pool/x;y"])
def test_a_dataset_is_pool_and_name(name: str) -> None:
    assert not _zfs.is_dataset(name) and _zfs.is_dataset("models/deepseek-v4.1_x")


@pytest.mark.parametrize(
    ("facts", "need", "backend"),
    [
        ({"replica": "nfs", "pools": True, "head_adjacent": True}, 1, "nfs"),
        ({"replica": "", "pools": True, "head_adjacent": True}, 1, "zfs"),
        ({"replica": "", "pools": False, "head_adjacent": True}, 10, "rsync"),
        ({"replica": "", "pools": True, "head_adjacent": True}, 11, "nfs"),
        ({"replica": "", "pools": True, "head_adjacent": False}, 11, ""),
    ],
)
def test_the_way_follows_from_history_room_and_pools(facts: dict[str, object], need: int, backend: str) -> None:
    chosen, reason = _zfs.choose_backend(facts, need, 10)
    assert chosen == backend and reason
    assert json.dumps(reason)
