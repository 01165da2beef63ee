# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints by real NFS 4.2 and by real ZFS, between hosts with kernels of their own; the checkpoint is random bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

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
        host.run(f"systemctl disable --now '{unit}'; rm -rf '/etc/systemd/system/{unit}' /var/lib/gb10/files/nfs-{NAME}.json")
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
    # Over the management network nobody is a client.
    assert hosts["t3"].run(f"mkdir -p /mnt/x && timeout 20 mount -t nfs4 -o soft,timeo=50,retrans=1 10.99.0.11:{DIRECTORY} /mnt/x").rc != 0


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
    """The receiving job is killed with all that it started, in the middle of the stream, and the role is run again."""
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


def test_a_dataset_of_somebody_else_is_not_replaced(checkpoint: Checkpoint, hosts: dict[str, Host], pools: None) -> None:
    hosts["t2"].check_output(f"zfs create -o mountpoint=/srv/theirs {DATASET} && echo theirs >/srv/theirs/file")
    done = checkpoint.run("zfs")
    assert done.returncode != 0 and "was not made by this collection" in " ".join(done.stdout.split())
    assert hosts["t2"].check_output("cat /srv/theirs/file") == "theirs"
