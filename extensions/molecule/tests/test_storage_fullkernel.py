# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints by real NFS 4.2 and by real ZFS, between hosts with kernels of their own; the checkpoint is random bytes."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.kernel_hosts import boot_id, booted_since
from extensions.molecule.tests.lab_hosts import INVENTORY, ROOT, as_user, lab, wait_for

NAME = "by-another-way"
DIRECTORY = f"/var/lib/gb10/models/{NAME}"
DATASET = "tank/weights"
OTHERS = "/srv/other 10.99.0.0/24(rw,no_subtree_check,fsid=77)"

pytestmark = pytest.mark.storage_fullkernel


def weights(seed: int, size: int = 8_000_000) -> bytes:
    """A tensor file with random bytes."""
    header = json.dumps({f"w{seed}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(size)


class Checkpoint:
    """A checkpoint on the controller, and the run that brings it to the members."""

    def __init__(self, root: Path, hosts: dict[str, Host], playbook: Any) -> None:
        self.root, self.hosts, self.playbook = root, hosts, playbook
        self.content: dict[str, bytes] = {}
        (root / "source").mkdir()
        self.put({"config.json": b"{}", "model-1.safetensors": weights(1), "model-2.safetensors": weights(2)})

    def put(self, content: dict[str, bytes]) -> None:
        """These are the files from now on."""
        self.content |= content
        for path, data in content.items():
            (self.root / "source" / path).write_bytes(data)
        files = [{"path": path, "size": len(data), "sha256": sha256(data).hexdigest()} for path, data in sorted(self.content.items())]
        (self.root / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))

    def run(self, backend: str, *arguments: str, **variables: Any) -> Any:
        given = {
            "storage_source": str(self.root / "source"),
            "storage_manifest_file": str(self.root / "manifest.json"),
            "storage_checkpoint": NAME,
            "storage_directory": DIRECTORY,
            "storage_group": "",
            "storage_backend": backend,
            "storage_zfs_dataset": DATASET if backend == "zfs" else "",
        }
        return self.playbook("site", "--tags", "storage", "-e", json.dumps(given | variables), *arguments)

    def is_whole_on(self, *members: str) -> bool:
        wanted = {f"{sha256(data).hexdigest()}  {path}" for path, data in self.content.items()}
        return all(set(self.hosts[name].run(f"cd {DIRECTORY} && sha256sum *").stdout.splitlines()) == wanted for name in members)


@pytest.fixture
def checkpoint(tmp_path: Path, hosts: dict[str, Host], playbook: Any) -> Checkpoint:
    return Checkpoint(tmp_path, hosts, playbook)


def changed(done: Any) -> bool:
    assert done.returncode == 0, done.stdout
    return bool(re.search(r"changed=[1-9]", done.stdout))


@pytest.fixture
def nfs(hosts: dict[str, Host]) -> Iterator[None]:
    """A head that exports something of its own: one export from a file, one made by hand."""
    head = hosts["t1"]
    head.check_output(f"mkdir -p /srv/other /srv/hand /etc/exports.d && echo '{OTHERS}' >/etc/exports.d/other.exports")
    head.check_output("systemctl start nfs-server && exportfs -o ro,fsid=78 10.99.0.9:/srv/hand")
    yield
    for name in ("t2", "t3", "t1"):
        host = hosts[name]
        unit = host.check_output(f"systemd-escape --path --suffix=mount {DIRECTORY}")
        host.run(
            f"systemctl disable --now '{unit}'; umount {DIRECTORY}; rm -rf '/etc/systemd/system/{unit}' /var/lib/gb10/files/nfs-{NAME}.json"
        )
        host.run(f"exportfs -ua; systemctl disable --now nfs-server; rm -f /etc/exports.d/*; rm -rf {DIRECTORY} /srv/other /srv/hand")


def test_members_read_the_heads_files_by_nfs(checkpoint: Checkpoint, hosts: dict[str, Host], plan: dict[str, Any], nfs: None) -> None:
    assert changed(checkpoint.run("nfs"))
    assert checkpoint.is_whole_on("t1", "t2", "t3")
    live = hosts["t1"].check_output("exportfs -s")
    ours = [line for line in live.splitlines() if line.startswith(DIRECTORY)]
    clients = sorted(re.findall(r"(\S+)\(", line)[0] for line in ours)
    assert clients == sorted(peer["address"] for leg in plan["members"]["t1"]["legs"] for peer in leg["peers"])
    assert all("root_squash" in line and ",ro," in line for line in ours) and "no_root_squash" not in "".join(ours)
    assert "/srv/other  10.99.0.0/24(" in live and "/srv/hand  10.99.0.9(" in live
    for name in ("t2", "t3"):
        options = hosts[name].check_output(f"findmnt -n -o OPTIONS {DIRECTORY}")
        assert {"ro", "vers=4.2", "nconnect=8", "hard"} <= set(options.split(","))
        assert hosts[name].run(f"touch {DIRECTORY}/x").rc != 0
        assert hosts[name].check_output(f"systemctl is-enabled $(systemd-escape --path --suffix=mount {DIRECTORY})") == "enabled"
    assert not changed(checkpoint.run("nfs"))
    assert not changed(checkpoint.run("nfs", "--check", "--diff"))
    # What this member has by NFS stays so when the way is chosen by itself.
    done = checkpoint.run("auto", "-vv")
    assert not changed(done) and "it was got by nfs before" in done.stdout


def test_a_mount_hides_no_files_and_a_stranger_gets_none(checkpoint: Checkpoint, hosts: dict[str, Host], nfs: None) -> None:
    hosts["t2"].check_output(f"mkdir -p {DIRECTORY} && touch {DIRECTORY}/mine")
    done = checkpoint.run("nfs")
    assert done.returncode != 0 and "has files of its own, which a mount would hide" in " ".join(done.stdout.split())
    assert hosts["t2"].file(f"{DIRECTORY}/mine").exists
    hosts["t2"].check_output(f"rm -r {DIRECTORY}")
    # Over the management network nobody is a client; with a mount over a leg, NFS would take that way to the same server.
    hosts["t3"].check_output(f"systemctl stop $(systemd-escape --path --suffix=mount {DIRECTORY})")
    assert hosts["t3"].run(f"mkdir -p /mnt/x && timeout 20 mount -t nfs4 -o soft,timeo=50,retrans=1 10.99.0.11:{DIRECTORY} /mnt/x").rc != 0


def module(member: str, what: str, /, **options: Any) -> dict[str, Any]:
    """What a module of the collection says on a member."""
    command = [
        str(Path(sys.executable).with_name("ansible")),
        "-i",
        INVENTORY,
        member,
        "-m",
        f"gb10.cluster.{what}",
        "-a",
        json.dumps(options),
    ]
    environment = as_user() | {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment, check=False)
    word, _arrow, answer = done.stdout.partition(" => ")
    return {**json.loads(answer), "failed": word.endswith("FAILED!")}


@pytest.fixture
def shared(nfs: None, hosts: dict[str, Host], plan: dict[str, Any]) -> dict[str, Any]:
    """What t2 is told so that it mounts the head's files, which the head exports to it."""
    leg, peer = next((leg, peer) for leg in plan["members"]["t2"]["legs"] for peer in leg["peers"] if peer["member"] == "t1")
    hosts["t1"].check_output(f"mkdir -p {DIRECTORY} && echo ours >{DIRECTORY}/file")
    given = {"name": NAME, "path": DIRECTORY}
    assert module("t1", "weights_nfs", **given, state="exported", clients=[leg["address"]])["changed"]
    return {**given, "state": "mounted", "server": peer["address"]}


def unit(host: Host) -> str:
    """The mount unit's state, and whether it comes with a boot."""
    name = shlex.quote(host.check_output(f"systemd-escape --path --suffix=mount {DIRECTORY}"))
    return ", ".join(host.run(f"systemctl {verb} {name}").stdout.strip() for verb in ("is-active", "is-enabled"))


@pytest.mark.parametrize(
    ("fault", "cure", "differs", "sentence"),
    [
        ("true", "true", {"source": "/srv/elsewhere"}, "does not export /srv/elsewhere to this member"),
        ("mkdir -p /etc/nfs.conf.d && printf '[nfsd]\\nvers4.2=n\\n' >/etc/nfs.conf.d/old.conf && systemctl restart nfs-server",
         "rm /etc/nfs.conf.d/old.conf && systemctl restart nfs-server", {}, "does not speak version 4.2"),
        ("systemctl stop nfs-server", "systemctl start nfs-server", {}, "no NFS server answers at"),
        ("nft 'add table ip gone; add chain ip gone in { type filter hook input priority 0; }; add rule ip gone in tcp dport 2049 drop'",
         "nft delete table ip gone", {}, "no NFS server answers at"),
    ],
    ids=["wrong-export", "not-4.2", "no-server", "silent"],
)  # fmt: skip
def test_what_the_head_refuses_is_said_before_anything_changes(
    shared: dict[str, Any], hosts: dict[str, Host], fault: str, cure: str, differs: dict[str, str], sentence: str
) -> None:
    hosts["t1"].check_output(fault)
    try:
        answer = module("t2", "weights_nfs", **{**shared, **differs})
    finally:
        hosts["t1"].check_output(cure)
    assert answer["failed"] and sentence in answer["msg"], answer
    assert unit(hosts["t2"]) == "inactive, not-found" and not hosts["t2"].file(DIRECTORY).exists


def test_a_mount_is_read_only_and_made_so_again_and_no_other_is_taken_down(shared: dict[str, Any], hosts: dict[str, Host]) -> None:
    t2 = hosts["t2"]
    t2.check_output(f"mkdir -p {DIRECTORY} && mount -t tmpfs theirs {DIRECTORY} && touch {DIRECTORY}/theirs")
    answer = module("t2", "weights_nfs", **shared)
    assert answer["failed"] and "is a mount of theirs (tmpfs) that this collection did not make" in answer["msg"], answer
    assert t2.file(f"{DIRECTORY}/theirs").exists
    t2.check_output(f"umount {DIRECTORY}")
    assert module("t2", "weights_nfs", **shared)["changed"]
    assert not module("t2", "weights_nfs", **shared)["changed"]
    assert "Read-only file system" in t2.run(f"touch {DIRECTORY}/new").stderr
    t2.check_output(f"mount -o remount,rw {DIRECTORY}")
    assert module("t2", "weights_nfs", **shared)["actions"] == [f"unmount {DIRECTORY}", f"mount {DIRECTORY}"]
    assert "Read-only file system" in t2.run(f"touch {DIRECTORY}/new").stderr
    assert module("t2", "weights_nfs", name=NAME, path=DIRECTORY, state="absent")["changed"]
    assert unit(t2) == "inactive, not-found"


def test_a_member_that_boots_before_the_heads_server_mounts_when_that_is_there(shared: dict[str, Any], hosts: dict[str, Host]) -> None:
    """And what needs the files waits for them, while logins do not."""
    t2 = hosts["t2"]
    assert module("t2", "weights_nfs", **shared)["changed"]
    service = f"[Service]\\nType=oneshot\\nExecStart=cp {DIRECTORY}/file /root/read\\n"
    needs = f"[Unit]\\nRequiresMountsFor={DIRECTORY}\\n{service}[Install]\\nWantedBy=multi-user.target\\n"
    t2.check_output(f"printf '{needs}' >/etc/systemd/system/reader.service && systemctl enable reader")
    try:
        before = boot_id(t2)
        t2.check_output("sync")
        lab("off", "t2")
        hosts["t1"].check_output("systemctl stop nfs-server")
        with ThreadPoolExecutor(1) as pool:
            booting = pool.submit(lab, "on", "t2")  # returns when nothing waits any more
            try:
                wait_for(lambda: booted_since(t2, before) and t2.run("systemctl is-active systemd-user-sessions").rc == 0)
                assert unit(t2) == "activating, enabled" and not t2.file("/root/read").exists
            finally:
                hosts["t1"].check_output("systemctl start nfs-server")
            booting.result()
        assert unit(t2) == "active, enabled"
        assert t2.check_output("cat /root/read") == "ours"
    finally:
        t2.run("systemctl disable reader; rm -f /etc/systemd/system/reader.service /root/read")


@pytest.fixture
def pools(hosts: dict[str, Host]) -> Iterator[None]:
    for host in hosts.values():
        host.check_output("modprobe zfs && truncate -s 300M /root/tank.img && zpool create -O mountpoint=none tank /root/tank.img")
    yield
    for host in hosts.values():
        host.run(f"zpool destroy -f tank; rm -rf /root/tank.img {DIRECTORY}")


def snapshots(host: Host) -> list[str]:
    return host.check_output(f"zfs list -H -t snapshot -o name -s creation -d 1 {DATASET}").split()


def streams(host: Host) -> list[str]:
    found: list[str] = json.loads(host.check_output(f"cat /run/gb10/jobs/zfs-{NAME}.json"))["result"]["streams"]
    return found


def test_a_dataset_goes_to_the_members_and_then_what_is_new(checkpoint: Checkpoint, hosts: dict[str, Host], pools: None) -> None:
    assert changed(checkpoint.run("zfs"))
    assert checkpoint.is_whole_on("t1", "t2", "t3")
    for name in ("t2", "t3"):
        values = hosts[name].check_output(f"zfs get -H -p -o value recordsize,atime,compression,readonly,mountpoint {DATASET}").split()
        assert values == ["1048576", "off", "lz4", "on", DIRECTORY]
        assert streams(hosts[name]) == ["full"]
    assert not changed(checkpoint.run("zfs"))
    for seed in (3, 4):
        checkpoint.put({"model-2.safetensors": weights(seed)})
        for name in ("t2", "t3"):
            # Somebody writes into a replica: that is taken back.
            hosts[name].check_output(f"zfs set readonly=off {DATASET} && echo x >{DIRECTORY}/config.json && zfs set readonly=on {DATASET}")
        hosts["t1"].check_output(f"rm {DIRECTORY}/model-2.safetensors")
        assert changed(checkpoint.run("zfs"))
        assert checkpoint.is_whole_on("t1", "t2", "t3")
        assert {tuple(streams(hosts[name])) for name in ("t2", "t3")} == {("increment",)}
    # Of the three snapshots the two newest stayed, and they are the same everywhere.
    guids = {tuple(host.check_output(f"zfs list -H -t snapshot -o guid -s creation -d 1 {DATASET}").split()) for host in hosts.values()}
    assert len(guids) == 1 and len(guids.pop()) == 2


def test_a_stream_that_is_cut_goes_on(checkpoint: Checkpoint, hosts: dict[str, Host], pools: None) -> None:
    """`zfs receive` is killed in the middle of the stream: the job takes the rest, and what had arrived is not sent again."""
    for netdev in ("enp1s0f0np0", "enP2p1s0f0np0"):
        hosts["t1"].check_output(f"tc qdisc replace dev {netdev} root tbf rate 16mbit burst 64kb latency 100ms")
    try:
        killer = f"until [ $(zfs get -H -p -o value used {DATASET} 2>/dev/null || echo 0) -gt 4000000 ]; do sleep 0.2; done; "
        killer += "pkill -x zfs; systemctl stop killer"
        hosts["t2"].check_output(f"systemd-run --quiet --collect --unit=killer sh -c '{killer}'")
        assert changed(checkpoint.run("zfs"))
    finally:
        for netdev in ("enp1s0f0np0", "enP2p1s0f0np0"):
            hosts["t1"].run(f"tc qdisc del dev {netdev} root")
        hosts["t2"].run("systemctl stop killer")
    assert checkpoint.is_whole_on("t1", "t2", "t3")
    assert streams(hosts["t2"])[-1] == "rest"


def test_a_pool_that_fills_is_named_and_the_next_run_goes_on(hosts: dict[str, Host], pools: None, plan: dict[str, Any]) -> None:
    leg, peer = next((leg, peer) for leg in plan["members"]["t2"]["legs"] for peer in leg["peers"] if peer["member"] == "t1")
    given = {"name": NAME, "path": DIRECTORY, "dataset": DATASET, "digest": "0" * 64}
    assert module("t1", "weights_zfs", **given, state="present")["changed"]
    hosts["t1"].check_output(f"head -c 60M /dev/urandom >{DIRECTORY}/weights")
    hosts["t2"].check_output("zfs create -o mountpoint=/srv/full tank/full && head -c 120M /dev/urandom >/srv/full/x && sync")
    assert module("t1", "weights_zfs", **given, state="sent", addresses=[peer["address"]], peers=[leg["address"]])["changed"]
    try:
        answer = module("t2", "weights_zfs", **given, state="received", addresses=[peer["address"]])
        assert answer["failed"] and f"the pool of {DATASET} is full" in answer["msg"], answer
        hosts["t2"].check_output("zfs destroy tank/full && sync")
        answer = module("t2", "weights_zfs", **given, state="received", addresses=[peer["address"]])
        assert answer["streams"] == ["rest"], answer
    finally:
        module("t1", "weights_zfs", **given, state="stopped")
    there, here = (host.check_output(f"sha256sum {DIRECTORY}/weights") for host in (hosts["t1"], hosts["t2"]))
    assert there == here


def test_a_dataset_of_somebody_else_is_not_replaced(checkpoint: Checkpoint, hosts: dict[str, Host], pools: None) -> None:
    hosts["t2"].check_output(f"zfs create -o mountpoint=/srv/theirs {DATASET} && echo theirs >/srv/theirs/file")
    done = checkpoint.run("zfs")
    assert done.returncode != 0 and "was not made by this collection" in " ".join(done.stdout.split())
    assert hosts["t2"].check_output("cat /srv/theirs/file") == "theirs"
