# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint that is downloaded once and goes around the ring while it arrives, and what goes wrong on its way.

The hub is tests/unit/storage/hub_server.py, in the network namespace of the lab's controller; the checkpoint is random bytes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import ROOT, lab, wait_for

HUB = ("10.99.0.1", 8800)


def weights(index: int, size: int = 4_000_000) -> bytes:
    """A tensor file with random bytes."""
    header = json.dumps({f"w{index}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(index).randbytes(size)


CONTENT = {f"model-0000{index}-of-00006.safetensors": weights(index) for index in range(1, 7)}
CONTENT |= {"config.json": b"{}", "sub/tokenizer.json": b'{"synthetic": true}'}
SLOW = 1_200_000  # bytes per second and file, two at a time: a whole download takes 10 s
CABLE = (("t1", "enp1s0f0np0"), ("t1", "enP2p1s0f0np0"))  # both legs from the head to t2

pytestmark = pytest.mark.storage


@contextmanager
def hub(folder: Path, rate: int) -> Iterator[None]:
    """The hub, as long as the block lasts."""
    command = [sys.executable, "-m", "tests.lab", "run", "--", sys.executable, "-m", "tests.unit.storage.hub_server"]
    command += [str(folder), HUB[0], str(HUB[1]), str(rate)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout and server.stdout.readline().startswith("http://")
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)


class Checkpoint:
    """A checkpoint of a name of its own, so that no test finds another one's files."""

    def __init__(self, root: Path, name: str, hosts: dict[str, Host]) -> None:
        self.name, self.hosts, self.repository, self.content = name, hosts, root / "repository", dict(CONTENT)
        self.directory = f"/var/lib/gb10/models/{name}"
        self.write()
        self.variables = {
            "storage_origin": {"kind": "hub", "repository": "lab/checkpoint", "revision": "main"},
            "storage_endpoint": f"http://{HUB[0]}:{HUB[1]}",
            "storage_checkpoint": name,
            "storage_directory": self.directory,
            "storage_source": "",
            "storage_group": "",
            "storage_downloads": 2,
            "storage_pinned_manifest_file": str(root / "manifest.json"),
            "storage_manifest_file": str(root / "manifest.json"),
        }

    def write(self) -> None:
        """The files, as the hub has them."""
        for path, content in self.content.items():
            (self.repository / path).parent.mkdir(parents=True, exist_ok=True)
            (self.repository / path).write_bytes(content)

    def arguments(self) -> tuple[str, ...]:
        return ("--tags", "storage", "-e", json.dumps(self.variables))

    def begin(self) -> subprocess.Popen[str]:
        """The playbook, not waited for."""
        command = [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            "inventories/lab",
            "playbooks/site.yml",
            *self.arguments(),
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")} | {"ANSIBLE_NOCOLOR": "1"}
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )

    def bytes_on(self, member: str) -> int:
        """How much of the checkpoint is there; sizes, since files are written in place."""
        return int(
            self.hosts[member].check_output(
                f"find {self.directory} -type f -printf '%s\\n' 2>/dev/null | awk '{{n += $1}} END {{print n + 0}}'"
            )
        )

    def times_on(self, member: str) -> list[float]:
        """When the files of weights were last written there; the hosts have one clock."""
        return [float(text) for text in self.hosts[member].check_output(f"stat -c %.Z {self.directory}/model-*").split()]

    def is_whole_on(self, *members: str) -> bool:
        wanted = {f"{sha256(content).hexdigest()}  {path}" for path, content in self.content.items()}
        command = f"cd {self.directory} && find * -type f | xargs sha256sum"
        return all(set(self.hosts[member].run(command).stdout.splitlines()) == wanted for member in members)

    def put(self, *members: str) -> None:
        """The files lie there already."""
        for member in members:
            target = f"{member}:{self.directory}/"
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            ssh = f"ssh -F {cache}/gb10-cluster/labs/{os.environ['GB10_LAB']}/ssh_config"
            subprocess.run(["rsync", "-r", "--mkpath", "-e", ssh, f"{self.repository}/", target], check=True, timeout=120)

    def pin(self) -> None:
        """The manifest, as if it was learned before."""
        files = [
            {"path": path, "size": len(content), "sha256": sha256(content).hexdigest()} for path, content in sorted(self.content.items())
        ]
        Path(self.variables["storage_pinned_manifest_file"]).write_text(json.dumps({"version": 1, "files": files}))


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, hosts: dict[str, Host]) -> Iterator[Checkpoint]:
    name = re.sub(r"\W+", "-", request.node.name)[:40]
    yield Checkpoint(tmp_path, name, hosts)
    for host in hosts.values():
        host.run("systemctl stop 'gb10-weights-*'")  # of runs that were killed
        host.run(f"rm -rf /var/lib/gb10/models/{name}")


def test_a_download_goes_around_the_ring_while_it_arrives(playbook: Any, checkpoint: Checkpoint, hosts: dict[str, Host]) -> None:
    with hub(checkpoint.repository, SLOW):
        done = playbook("site", *checkpoint.arguments())
        assert done.returncode == 0, done.stdout
    assert checkpoint.is_whole_on("t1", "t2", "t3")
    first = {name: min(checkpoint.times_on(name)) for name in ("t2", "t3")}
    assert max(first.values()) < max(checkpoint.times_on("t1")), "the others began when the head was done"
    # The hub is gone: the second run needs nobody, because the first kept what the files are.
    again = playbook("site", *checkpoint.arguments())
    assert again.returncode == 0 and not re.search(r"changed=[1-9]", again.stdout), again.stdout


def test_the_controller_may_die(playbook: Any, checkpoint: Checkpoint) -> None:
    """The download and the copies are jobs of the members: they go on, and the next run finds them done."""
    with hub(checkpoint.repository, SLOW):
        process = checkpoint.begin()
        wait_for(lambda: checkpoint.bytes_on("t1") > 1_000_000)
        wait_for(lambda: int(checkpoint.hosts["t3"].run(f"ls /run/gb10/jobs/copy-{checkpoint.name}.json 2>/dev/null | wc -l").stdout))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        wait_for(lambda: checkpoint.is_whole_on("t1", "t2", "t3"))
    done = playbook("site", *checkpoint.arguments())
    assert done.returncode == 0, done.stdout


def test_two_runs_at_once(checkpoint: Checkpoint) -> None:
    with hub(checkpoint.repository, SLOW):
        first, second = checkpoint.begin(), checkpoint.begin()
        outputs = [process.communicate(timeout=200)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(outputs)
    assert checkpoint.is_whole_on("t1", "t2", "t3")


def test_a_cable_that_breaks_on_the_way(checkpoint: Checkpoint) -> None:
    """t2 loses its cable to the head while files arrive there: it gets the rest by way of t3."""
    with hub(checkpoint.repository, SLOW // 2):
        process = checkpoint.begin()
        wait_for(lambda: checkpoint.bytes_on("t1") > 1_000_000)
        try:
            for end in CABLE:
                lab("cut", *end)
            output, _nothing = process.communicate(timeout=300)
        finally:
            for end in CABLE:
                lab("mend", *end)
    assert process.returncode == 0, output
    assert checkpoint.is_whole_on("t1", "t2", "t3")


def test_a_disk_that_fills_stops_no_other_and_the_next_run_finishes(playbook: Any, checkpoint: Checkpoint) -> None:
    checkpoint.pin()
    with hub(checkpoint.repository, SLOW):
        process = checkpoint.begin()
        wait_for(lambda: checkpoint.bytes_on("t1") > 1_000_000)
        wait_for(lambda: int(checkpoint.hosts["t2"].run(f"ls /run/gb10/jobs/copy-{checkpoint.name}.json 2>/dev/null | wc -l").stdout))
        lab("fill", "t2", "--leave", "6")
        try:
            output, _nothing = process.communicate(timeout=200)
        finally:
            lab("drain", "t2")
    assert process.returncode != 0 and "make room on this member's disk and run again" in " ".join(output.split()), output
    assert checkpoint.is_whole_on("t1", "t3")
    done = playbook("site", *checkpoint.arguments())
    assert done.returncode == 0, done.stdout
    assert checkpoint.is_whole_on("t2")


def ends(plan: dict[str, Any], member: str) -> list[tuple[str, str]]:
    """A member's address and its peer's on each leg, the head's first."""
    pairs = [(leg["address"], peer["address"], peer["member"]) for leg in plan["members"][member]["legs"] for peer in leg["peers"]]
    return [(own, peer) for own, peer, name in sorted(pairs, key=lambda pair: pair[2])]


FLIPPER = """
import socket, sys, threading
address, left = sys.argv[1], [1]
def pump(source, sink, turn):
    seen = 0
    while block := source.recv(65536):
        if turn and left[0] and seen < 3_000_000 <= seen + len(block):
            left[0] -= 1
            block = bytearray(block)
            block[3_000_000 - seen - 1] ^= 1
            open("/tmp/flipped", "a").write("x")
        seen += len(block)
        sink.sendall(block)
    sink.shutdown(socket.SHUT_WR)
server = socket.create_server(("", 8731))
while True:
    client, peer = server.accept()
    upstream = socket.create_connection((address, 8730))
    threading.Thread(target=pump, args=(client, upstream, False), daemon=True).start()
    threading.Thread(target=pump, args=(upstream, client, True), daemon=True).start()
"""


def test_a_byte_that_turns_on_one_hop(playbook: Any, checkpoint: Checkpoint, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    """Between t1 and t2 one byte of a file is another: it is noticed there, and only the right bytes stay and go further."""
    checkpoint.pin()
    checkpoint.put("t1")
    t2 = hosts["t2"]
    (_own, there), *others = ends(plan, "t2")
    t2.check_output(f"cat >/tmp/flipper.py <<'EOF'\n{FLIPPER}\nEOF")
    t2.check_output(f"systemd-run --quiet --collect --unit=flipper --uid=nobody python3 /tmp/flipper.py {there}")
    # What root of t2 sends there goes through the flipper, which is nobody; and t2's other legs are closed, so that its files come over this one.
    rules = [
        "chain turn { type nat hook output priority -100; }",
        "chain shut { type filter hook output priority 0; }",
        f"rule turn ip daddr {there} tcp dport 8730 meta skuid 0 redirect to :8731",
        f"rule shut ip daddr {{ {', '.join(peer for _own, peer in others)} }} tcp dport 8730 reject with tcp reset",
    ]
    t2.check_output("nft 'add table ip flip' && " + " && ".join(f"nft 'add {rule.replace(' ', ' ip flip ', 1)}'" for rule in rules))
    try:
        done = playbook("site", *checkpoint.arguments())
        assert done.returncode == 0, done.stdout
        assert t2.check_output("cat /tmp/flipped") == "x"
    finally:
        t2.run("systemctl stop flipper; nft delete table ip flip; rm -f /tmp/flipped /tmp/flipper.py")
    assert checkpoint.is_whole_on("t1", "t2", "t3")


def test_the_relay_against_one_copy_after_the_other(
    playbook: Any, checkpoint: Checkpoint, hosts: dict[str, Host], plan: dict[str, Any]
) -> None:
    """Not asserted, written down: the ring by the relay, and rsync to each member in turn, in the same run.

    Each leg carries 100 Mbit/s: three hosts share this machine's processors, and without a limit it is these that are measured.
    """
    # Large enough that the legs count and not how long a copy takes to begin.
    checkpoint.content = {f"model-{index}.safetensors": weights(index, 20_000_000) for index in range(6)}
    shutil.rmtree(checkpoint.repository)
    checkpoint.write()
    checkpoint.pin()
    checkpoint.put("t1")
    figures: dict[str, Any] = {"bytes": sum(map(len, checkpoint.content.values())), "members": len(hosts), "leg": "100 Mbit/s by tc tbf"}
    legs = {name: [leg["netdev"] for leg in plan["members"][name]["legs"]] for name in hosts}
    try:
        for name, netdevs in legs.items():
            for netdev in netdevs:
                hosts[name].check_output(f"tc qdisc replace dev {netdev} root tbf rate 100mbit burst 64kb latency 100ms")
        hosts["t1"].check_output(
            f"printf '[plain]\\npath = {checkpoint.directory}\\nuse chroot = no\\nuid = root\\n' >/run/plain.conf && "
            "systemd-run --quiet --collect --unit=plain rsync --daemon --no-detach --config=/run/plain.conf --port=8740"
        )
        wait_for(lambda: hosts["t1"].run("ss -Hltn 'sport = :8740' | grep -q LISTEN").rc == 0)
        begin = time.monotonic()
        for member in ("t2", "t3"):
            address = next(peer["address"] for leg in plan["members"][member]["legs"] for peer in leg["peers"] if peer["member"] == "t1")
            hosts[member].check_output(f"rsync -r rsync://{address}:8740/plain/ /root/plain/")
        figures["rsync_in_turn_s"] = round(time.monotonic() - begin, 2)
        done = playbook("site", *checkpoint.arguments())
        assert done.returncode == 0, done.stdout
        states = [json.loads(hosts[name].check_output(f"cat /run/gb10/jobs/copy-{checkpoint.name}.json")) for name in ("t2", "t3")]
        figures["relay_s"] = max(state["result"]["seconds"] for state in states)
        figures["ratio"] = round(figures["rsync_in_turn_s"] / figures["relay_s"], 2)
    finally:
        for name, netdevs in legs.items():
            for netdev in netdevs:
                hosts[name].run(f"tc qdisc del dev {netdev} root")
            hosts[name].run("systemctl stop plain; rm -rf /root/plain /run/plain.conf")
    assert checkpoint.is_whole_on("t1", "t2", "t3")
    output = ROOT / "tests" / "output"
    output.mkdir(exist_ok=True)
    (output / "storage-relay.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(figures)
