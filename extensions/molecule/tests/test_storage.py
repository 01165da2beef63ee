# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint that is downloaded once and goes around the ring while it arrives, and what goes wrong on its way.

The hub is tests/unit/storage/hub_server.py, in the network namespace of the lab's controller; the checkpoint is random bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.lab_checkpoint import SLOW, Checkpoint, hub, weights
from extensions.molecule.tests.lab_hosts import ROOT, kill, lab, wait_for

CABLE = (("t1", "enp1s0f0np0"), ("t1", "enP2p1s0f0np0"))  # both legs from the head to t2

pytestmark = pytest.mark.storage


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
        kill(process)
        wait_for(lambda: checkpoint.is_whole_on("t1", "t2", "t3"))
    done = playbook("site", *checkpoint.arguments())
    assert done.returncode == 0, done.stdout


def test_two_runs_at_once(checkpoint: Checkpoint) -> None:
    """One is refused, whichever comes second, and does the other no harm."""
    with hub(checkpoint.repository, SLOW):
        both = [checkpoint.begin(), checkpoint.begin()]
        outputs = [process.communicate(timeout=200)[0] for process in both]
    (done, _output), (refused, sentence) = sorted(zip([process.returncode for process in both], outputs, strict=True))
    assert (done, refused) == (0, 2), "\n".join(outputs)
    assert "has been running site on this cluster for" in " ".join(sentence.split()), sentence
    assert checkpoint.is_whole_on("t1", "t2", "t3")


def test_a_cable_that_breaks_on_the_way(checkpoint: Checkpoint, hosts: dict[str, Host]) -> None:
    """t2 loses its cable to the head within a file: it gets that one again, and the rest, by way of t3."""
    with hub(checkpoint.repository, SLOW), ExitStack() as undo:
        for _member, device in CABLE:  # so slow that each file takes eight seconds
            hosts["t1"].check_output(f"tc qdisc add dev {device} root tbf rate 4mbit burst 32kb latency 400ms")
            undo.callback(hosts["t1"].run, f"tc qdisc del dev {device} root")
        process = checkpoint.begin()
        wait_for(lambda: checkpoint.bytes_on("t2") > 1_000_000)
        assert process.poll() is None
        for end in CABLE:
            lab("cut", *end)
            undo.callback(lab, "mend", *end)
        output, _nothing = process.communicate(timeout=200)
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
