# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdicts on NCCL's logs: six real ones, and synthetic ones of RDMA (tests/fixtures/nccl)."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _nccl_library
from ansible_collections.gb10.cluster.plugins.module_utils._findings import REFUSE, WARN
from ansible_collections.gb10.cluster.plugins.module_utils._nccl import Requirement
from ansible_collections.gb10.cluster.plugins.module_utils._nccl_log import parse
from ansible_collections.gb10.cluster.plugins.module_utils._nccl_verdict import expected_of, judge
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.nccl import lines as synthetic

ROOT = Path(__file__).parents[3]
LOGS = ROOT / "tests/fixtures/nccl"
PROFILES = {2: "dsv41-exl3-2.9bpw-tp2", 3: "dsv41-exl3-3.5bpw-tp3", 4: "dsv41-exl3-3.5bpw-tp4"}
HCAS = ["roceP2p1s0f0", "roceP2p1s0f1", "rocep1s0f0", "rocep1s0f1"]


def plan(topology: str, count: int, **settings: Any) -> dict[str, Any]:
    members = [{"name": f"spark{rank + 1}", "address": f"198.51.100.{rank + 1}"} for rank in range(count)]
    return _inputs.plan(members, {"cluster_name": "x", "cluster_profile": PROFILES[count], "cluster_topology": topology, **settings})


RING, RING_4, PAIR = plan("ring", 3), plan("ring", 4), plan("pair", 2)
CROSSED = plan("pair", 2, cluster_cables=["spark1.0 - spark2.1", "spark1.1 - spark2.0"])


def verdict(
    lines: list[str] | str, expected: dict[str, Any] | None = None, host: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    lines = lines.splitlines() if isinstance(lines, str) else lines
    return judge(parse([("log", lines)]), expected_of(expected, **more), host)


def real(name: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    return verdict((LOGS / name).read_text(), *arguments, **more)


def told(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.code) for finding in result["findings"]]


def sentence(result: dict[str, Any], code: str) -> str:
    (found,) = [finding.sentence for finding in result["findings"] if finding.code == code]
    return found


# Real logs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transport", "codes", "words"),
    [
        ("default.log", "P2P/CUMEM", ["one-host"], "nothing is proven of the fabric: run one rank per member"),
        ("socket.log", "NET/Socket", ["socket"], "/dev/infiniband is not mapped into the container"),
        ("socket_ibhca.log", "NET/Socket", ["socket"], "NCCL_IB_HCA 'rocep1s0f0,rocep1s0f1' means no device that is active"),
        ("ib_forced.log", "none", ["no-device"], "NCCL_NET=IB holds, and no RDMA device was found"),
        ("bad_ifname.log", "none", ["no-interface"], "NCCL_SOCKET_IFNAME 'enP7s7' names no interface of this host"),
        ("subnet.log", "NET/Socket", ["socket"], "is NET/Socket instead of NET/IB"),
    ],
)
def test_the_real_logs_get_their_verdicts(name: str, transport: str, codes: list[str], words: str) -> None:
    result = real(name)
    assert (result["passed"], result["transport"]) == (False, transport)
    assert told(result) == [(REFUSE, code) for code in codes]
    assert words in result["findings"][0].sentence


def test_what_a_real_log_says_of_each_rank() -> None:
    one = real("socket.log")["ranks"][1]
    assert (one["rank"], one["size"], one["versions"], one["network"], one["complete"]) == (1, 2, ["2.28.9+cuda13.0"], "Socket", True)
    assert one["bootstrap"] == {"interface": "eth0", "address": "192.0.2.2"}
    assert one["channels"] == [
        {"channel": number, "from": sender, "to": 1 - sender, "direction": direction, "transport": "NET/Socket", "device": "0"}
        for sender, direction in ((0, "receive"), (1, "send"))
        for number in (0, 1)
    ]
    assert len(real("default.log")["ranks"][0]["channels"]) == 24
    assert [rank["pid"] for rank in real("ib_forced.log")["ranks"]] == [1055, 1056]


def test_an_ignored_variable_is_found_by_the_version_where_the_cabling_needs_it() -> None:
    # Case C13: the library says nothing about a variable that it does not know.
    result = real("subnet.log", CROSSED)
    assert "NCCL 2.28.9+cuda13.0 ignores NCCL_IB_SUBNET_AWARE_ROUTING, which this cabling needs: use 2.30.7" in sentence(
        result, "library-old"
    )
    assert "library-old" not in dict(map(reversed, told(real("subnet.log", PAIR))))


def test_sockets_are_right_where_they_are_planned() -> None:
    assert told(real("socket.log", transport="Socket")) == []
    assert told(real("default.log", transport="Socket")) == []


@pytest.mark.parametrize(
    ("hcas", "words"),
    [(4, "this host has 4 RDMA devices and the container saw none: /dev/infiniband is not mapped"), (0, "this host has no RDMA device")],
)
def test_the_hosts_devices_tell_why_there_was_none(hcas: int, words: str) -> None:
    # Case C14.
    assert words in sentence(real("socket.log", host={"hcas": hcas}), "socket")


# Synthetic logs of RDMA ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [RING, RING_4], ids=["three", "four"])
def test_a_ring_over_all_its_devices_passes(planned: dict[str, Any]) -> None:
    result = verdict(synthetic.ring(planned), planned)
    assert (told(result), result["passed"], result["transport"]) == ([], True, "NET/IB")
    assert verdict(synthetic.ring(planned))["passed"]
    head = result["ranks"][0]
    # A socket as the out-of-band channel is no socket transport (case C14).
    assert head["bootstrap"]["interface"] == "enP7s7"
    assert sorted(head["devices"]) == HCAS
    assert {channel["device"] for channel in head["channels"]} == set(HCAS)


@given(st.randoms(use_true_random=False), st.sampled_from(["", "(Worker_TP0 pid=55) ", "Nov 29 13:22:56 spark1 docker[7]: "]))
def test_neither_interleaving_nor_what_stands_before_a_line_matters(random: Any, prefix: str) -> None:
    queues: dict[str, list[str]] = {}
    for line in synthetic.ring(RING):
        queues.setdefault(line.split(":")[0], []).append(line)
    mixed = []
    while queues:
        host = random.choice(sorted(queues))
        mixed.append(prefix + queues[host].pop(0))
        if not queues[host]:
            del queues[host]
    assert verdict(mixed, RING) == verdict(synthetic.ring(RING), RING)


def failing(text: str, rank: int = 1, planned: dict[str, Any] | None = None, rings: bool = False, **more: Any) -> list[str]:
    """A group (a ring of three) whose ranks are up to the start of the communicator, and one of them then warns."""
    members = (planned or RING)["cluster"]["members"]
    lines = [line for other, dummy in enumerate(members) for line in synthetic.start(other, len(members), HCAS, **more)]
    if rings:
        lines += [synthetic.info(other, "Connected all rings, use ring PXN 0 GDR 0") for other in range(len(members))]
    return [*lines, synthetic.warn(rank, text)]


SAME_LEG = ("::ffff:10.10.0.2", "::ffff:10.10.0.1")
OTHER_LEG = ("::ffff:10.10.4.1", "::ffff:10.10.0.1")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (synthetic.modify_qp(61, "roceP2p1s0f0", "::", "::ffff:10.10.1.1"), "gid-empty", "roceP2p1s0f0 has no GID at index 3"),
        (synthetic.modify_qp(110, "rocep1s0f0", *OTHER_LEG), "wrong-leg", "ends of different legs (spark2.0-spark3.1 half A and spark1.0-spark2.1 half A)"),
        (synthetic.modify_qp(110, "rocep1s0f1", *SAME_LEG), "leg-silent", "got no answer on leg spark1.0-spark2.1 half A from 10.10.0.2 to 10.10.0.1"),
        (synthetic.modify_qp(110, "rocep1s0f1", "::ffff:192.0.2.1", "::ffff:192.0.2.2"), "wrong-leg", "got no answer from 192.0.2.1 to 192.0.2.2"),
        (synthetic.modify_qp(101, "rocep1s0f0", "fe80::1", "::ffff:10.10.0.1", 1), "gid-unroutable", "no route from fe80::1 to 10.10.0.1"),
        (synthetic.modify_qp(113, "rocep1s0f1", *SAME_LEG), "peer-silent", "nobody answers rocep1s0f1 from 10.10.0.2 to 10.10.0.1"),
        (synthetic.modify_qp(22, "rocep1s0f0", "fe80::1", "fe80::2", 1), "gid-wrong", "the GID at index 1 of rocep1s0f0 is no RoCE v2 entry"),
        ("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "memlock", "memlock"),
        (
            "NET/IB: Got completion from peer 10.10.0.1<50210> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129  hca rocep1s0f1",
            "retry-exceeded",
            "packets to 10.10.0.1<50210> are lost (RETRY_EXC_ERR): compare the MTU",
        ),
        ("NET/IB : Got completion from peer 10.10.0.1 with status=12 opcode=0 len=0 vendor err 129", "retry-exceeded", "packets to 10.10.0.1 are lost"),
        ("NET/IB: Got completion from peer x with status=IBV_WC_REM_OP_ERR(11) opcode=a(0)", "completion", "failed with status 11"),
        ("Failed to load libibverbs: cannot open shared object file", "no-verbs", "the image lacks libibverbs"),
        ("NET/IB: NCCL_IB_SUBNET_PREFIX_LEN=64 is out of range [1,32]", "prefix-length", "NCCL_IB_SUBNET_PREFIX_LEN is 64"),
        ("NET/IB : rocep1s0f0:1 async fatal event: device fatal error", "device-failed", "rocep1s0f0 failed while in use"),
        ("ncclOsSocketPollConnect: connect to 10.10.0.1<40001> returned Connection timed out", "bootstrap-unreachable", "set NCCL_SOCKET_IFNAME to =enP7s7"),
    ],
)  # fmt: skip
def test_each_known_failure_has_its_cause_and_cure(text: str, code: str, words: str) -> None:
    result = verdict(failing(text), RING)
    assert result["passed"] is False
    assert told(result) == [(REFUSE, code)]
    (finding,) = result["findings"]
    assert finding.sentence.startswith("rank 1: ")
    assert words in finding.sentence
    assert finding.evidence == text
    assert ": " in finding.sentence.removeprefix("rank 1: ")  # a cure


def test_a_pinned_index_is_the_first_thing_to_take_away() -> None:
    # Case C08, also with an empty value, which NCCL reads as 0.
    text = synthetic.modify_qp(61, "rocep1s0f0", "::", "::ffff:10.10.1.1")
    free, pinned = failing(text), failing(text, environment={"NCCL_IB_GID_INDEX": "3."})
    assert "unset NCCL_IB_GID_INDEX" in sentence(verdict(pinned, RING), "gid-empty")
    assert "run the fabric role" in sentence(verdict(free, RING), "gid-empty")


CASE_C12 = """\
spark-a:77:190 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0
spark-a:77:190 [0] NCCL INFO Connected all rings
spark-a:77:190 [0] misc/ibvwrap.cc:NNN NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev rocep1s0f1:1
spark-a:77:190 [0] NCCL INFO transport/generic.cc:NNN -> 2
spark-a:77:190 [0] NCCL INFO init.cc:NNN -> 2
"""


def test_a_ring_of_four_that_fails_at_its_trees_has_a_good_fabric() -> None:
    # Case C12: not a bad cable.
    result = verdict(CASE_C12, RING_4)
    assert told(result) == [(REFUSE, "tree-without-path")]
    assert "so the fabric is good" in result["findings"][0].sentence
    text = synthetic.modify_qp(110, "rocep1s0f1", "::ffff:10.10.2.1", "::ffff:10.10.6.1")
    assert "tree-without-path" in dict(map(reversed, told(verdict(failing(text, planned=RING_4, rings=True), RING_4))))
    assert "tree-without-path" not in dict(map(reversed, told(verdict(failing(text, rings=True), RING))))


BROKEN_KERNEL = {"kernel": "7.0.0-1019-nvidia", "cmdline": "quiet", "cma_total_kib": 0, "cma_free_kib": 9961472}
GOOD_KERNEL = {"kernel": "6.17.0-1031-nvidia", "cmdline": "quiet", "cma_total_kib": 131072, "cma_free_kib": 131000}


@pytest.mark.parametrize(
    ("host", "code", "words"),
    [
        (BROKEN_KERNEL, "kernel-registration", "boot with kho=off"),
        ({**BROKEN_KERNEL, "memlock": 8 << 20}, "kernel-registration", "boot with kho=off"),
        ({**GOOD_KERNEL, "memlock": None}, "registration", "though memlock is not limited and the kernel's CMA is well"),
        ({**GOOD_KERNEL, "memlock": 8 << 20}, "memlock", "the limit of locked memory is too low"),
        ({}, "memlock", "look at CmaTotal in /proc/meminfo"),
    ],
)
def test_failed_registration_is_the_kernels_only_with_its_triple(host: dict[str, Any], code: str, words: str) -> None:
    # Case C15.
    result = verdict(failing("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"), RING, host)
    assert words in sentence(result, code)
    assert ("kho" in str(result["findings"])) == (code == "kernel-registration")


def test_gloos_missing_interface_is_named() -> None:
    # Case C16.
    result = verdict([*synthetic.ring(RING), "RuntimeError: Unable to find address for: eth0"], RING)
    assert "Gloo looks for eth0" in sentence(result, "gloo-interface")


def test_half_the_devices_pass_with_a_warning() -> None:
    # Case C17: the variable was set on the host and never reached the container.
    lines = [line for rank in (0, 1) for line in synthetic.start(rank, 2, ["rocep1s0f0"], environment={"NCCL_IB_HCA": "rocep1s0f0"})]
    lines += [line for rank in (0, 1) for line in synthetic.channels(rank, 2, {0: [0], 1: [0]})]
    result = verdict(lines, PAIR)
    assert result["passed"] is True
    assert "rank 0 and rank 1: 1 of 2 planned devices in use, without roceP2p1s0f0" in sentence(result, "devices-missing")
    assert "NCCL_IB_HCA is 'rocep1s0f0' inside the container instead of '=rocep1s0f0,roceP2p1s0f0'" in sentence(
        result, "environment-differs"
    )


def test_devices_that_are_in_no_leg_are_refused() -> None:
    # Case C04: the head's names on a worker.
    lines = [line for rank in (0, 1) for line in synthetic.start(rank, 2, ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1"])]
    result = verdict([*lines, *synthetic.channels(0, 2, {1: [0]}), *synthetic.channels(1, 2, {0: [0]})], PAIR)
    assert "rocep1s0f1 is in use but in no leg of spark1" in next(f.sentence for f in result["findings"] if f.code == "devices-extra")


def test_bootstrap_over_a_leg_is_refused_even_where_it_works() -> None:
    result = verdict(synthetic.ring(RING, interface="enp1s0f0np0"), RING)
    assert "bootstrap uses enp1s0f0np0 instead of enP7s7, a leg, which reaches one neighbour only" in sentence(
        result, "bootstrap-interface"
    )
    waiting = [synthetic.info(0, "Bootstrap: Using enp1s0f0np0:10.10.0.1<0>"), synthetic.info(0, "NCCL version 2.30.7+cuda13.0")]
    assert "it waits in bootstrap" in sentence(verdict(waiting), "waits")


def test_all_devices_on_one_neighbour_are_refused() -> None:
    # Case C13: the log must prove the choice of ports.
    lines = synthetic.start(0, 3, HCAS) + [line for line in synthetic.channels(0, 3, {1: [0], 2: [1]}) if "2[0]" not in line]
    assert "all its channels go to rank 1, though it has two neighbours" in sentence(verdict(lines, RING), "one-neighbour")


def test_what_shows_only_over_all_ranks() -> None:
    good = synthetic.ring(RING)
    without = [line for line in good if not line.startswith("spark3:")]
    assert "of 3 ranks the log of rank 2 is missing" in sentence(verdict(without, RING), "ranks-missing")
    mixed = [line.replace("NCCL version 2.30.7", "NCCL version 2.31.2") if line.startswith("spark2:") else line for line in good]
    assert "rank 1 2.31.2+cuda13.0" in sentence(verdict(mixed, RING), "versions-differ")
    assert "the group has 3 ranks, but 4 are planned" in sentence(verdict(good, RING_4), "group-size")
    alone = [line for rank in (0, 1) for line in [*synthetic.start(0, 1, HCAS), synthetic.info(rank, "x")]]
    assert "alone in its communicator" in sentence(verdict(alone), "alone")


def test_a_communicator_that_has_sent_nothing_proves_nothing() -> None:
    # Channels are set up when they are first used (NCCL_RUNTIME_CONNECT).
    quiet = [line for line in synthetic.ring(RING) if "Channel" not in line and "Connected" not in line]
    assert "nothing was sent, so send something" in sentence(verdict(quiet, RING), "no-channel")


def test_two_libraries_in_one_process_are_told() -> None:
    lines = [*synthetic.ring(RING), synthetic.info(0, "NCCL version 2.29.7+cuda13.0")]
    result = verdict(lines, RING)
    assert "two NCCL libraries (2.30.7+cuda13.0, 2.29.7+cuda13.0) in one process" in sentence(result, "library-twice")
    assert (REFUSE, "library-old") in told(result)


def test_a_changed_table_while_serving_is_told_and_passes() -> None:
    result = verdict([*synthetic.ring(RING), synthetic.warn(2, "NET/IB : rocep1s0f0:1 GID table changed")], RING)
    assert (told(result), result["passed"]) == ([(WARN, "gid-changed")], True)


def test_an_unknown_warning_is_passed_on_as_it_is() -> None:
    result = verdict([*synthetic.ring(RING), synthetic.warn(2, "Something new")], RING)
    assert told(result) == [(WARN, "unknown-warning")]
    assert "'Something new'" in result["findings"][0].sentence


@pytest.mark.parametrize("lines", ["", "spark1 (EngineCore) ready\n", "a:1:2 [0] other NCCL TRACE x\n"])
def test_a_log_without_lines_of_nccl_proves_nothing(lines: str) -> None:
    assert told(verdict(lines, RING)) == [(REFUSE, "no-lines")]


@given(st.text(alphabet="sparkNCLINFOWEb:1[]0 /x\n->", max_size=300), st.integers(0, 400))
def test_no_text_breaks_the_reader(noise: str, at: int) -> None:
    text = "\n".join(synthetic.ring(RING))
    verdict(text[:at] + noise + text[at:], RING)


# Libraries that a process has loaded -----------------------------------------------------------------------------------------


def library(path: Path, version: str, *features: str) -> Path:
    """A file that holds what a NCCL library would of these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = b"".join(f"NCCL_{feature}\0".encode() for feature in features)
    path.write_bytes(b"\x7fELF\0" + b"\0" * 5000 + f"NCCL version {version}+cuda13.0\0".encode() + names)
    return path


NEEDED = [Requirement("IB_SUBNET_AWARE_ROUTING", "use 2.30.7 or newer")]


def test_the_libraries_of_this_very_process_are_found_with_what_they_know(tmp_path: Path) -> None:
    """torch's own and the one that VLLM_NCCL_SO_PATH names, both mapped, as in the reports of NestuFNG and sparkring."""
    old = library(tmp_path / "torch/libnccl.so.2", "2.29.7", "IB_HCA")
    new = library(tmp_path / "opt/libnccl.so.2.30.7", "2.30.7", "IB_SUBNET_AWARE_ROUTING", "SKIP_TREE_CONNECT")
    with old.open("rb") as one, new.open("rb") as two:
        maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in (one, two)]
        (me,) = [process for process in _nccl_library.processes() if process.pid == os.getpid()]
        for each in maps:
            each.close()
    assert {found.path: (found.version, found.features) for found in me.libraries} == {
        str(old): ("2.29.7+cuda13.0", ()),
        str(new): ("2.30.7+cuda13.0", ("IB_SUBNET_AWARE_ROUTING", "SKIP_TREE_CONNECT")),
    }
    assert len({found.sha256 for found in me.libraries}) == 2
    lacks, twice = _nccl_library.judge_libraries([me], NEEDED)
    assert (lacks.severity, lacks.code) == (REFUSE, "library-lacks")
    assert f"{old} (2.29.7+cuda13.0), loaded by" in lacks.sentence
    assert "does not know NCCL_IB_SUBNET_AWARE_ROUTING: use 2.30.7 or newer" in lacks.sentence
    assert (twice.severity, twice.code) == (REFUSE, "library-twice")
    assert not [process for process in _nccl_library.processes() if process.pid == os.getpid()]


LOADS = """
import mmap, sys, time
files = [open(path, 'rb') for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]
print('up', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("variables", "torch", "vllm"),
    [
        (["VLLM_NCCL_SO_PATH"], "old", "new"),
        (["VLLM_NCCL_SO_PATH", "LD_PRELOAD"], "new", "new"),
        ([], "", ""),
    ],
)
def test_which_of_two_libraries_is_in_use(tmp_path: Path, variables: list[str], torch: str, vllm: str) -> None:
    """In a process of its own; the variable names a link, as /opt/nccl/lib/libnccl.so.2 is one, and the kernel shows its target."""
    files = {"old": library(tmp_path / "torch/libnccl.so.2", "2.29.7"), "new": library(tmp_path / "opt/libnccl.so.2.30.7", "2.30.7")}
    link = tmp_path / "opt/libnccl.so.2"
    link.symlink_to(files["new"])
    # The loader leaves out a file that is no library, and says so.
    environment = {**os.environ, "API_KEY": "secret", **{key: str(link) for key in variables}}
    command = [sys.executable, "-c", LOADS, *map(str, files.values())]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "up\n"
            (process,) = [process for process in _nccl_library.processes() if process.pid == child.pid]
        finally:
            child.kill()
    named = {"": "", **{name: str(path) for name, path in files.items()}}
    assert (process.torch, process.vllm) == (named[torch], named[vllm])
    assert "secret" not in repr(process)
    (twice,) = [finding for finding in _nccl_library.judge_libraries([process], []) if finding.code == "library-twice"]
    assert twice.severity == WARN
    if torch == "old":
        assert f"{files['old']} (2.29.7+cuda13.0 for torch)" in twice.sentence
        assert f"{files['new']} (2.30.7+cuda13.0 for vLLM)" in twice.sentence


def test_a_version_that_promises_the_feature_does_not_have_it(tmp_path: Path) -> None:
    found = _nccl_library.inspect(library(tmp_path / "libnccl.so.2", "2.30.7", "NOT_IB_SUBNET_AWARE_ROUTING", "IB_SUBNET_AWARE_ROUTING_2"))
    process = _nccl_library.Process(1, "vllm", (found,), None)
    assert [finding.code for finding in _nccl_library.judge_libraries([process], NEEDED)] == ["library-lacks"]
    assert _nccl_library.judge_libraries([process], []) == []


def test_maps_name_each_library_once_also_when_its_file_is_gone() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 11 /venv/lib/nvidia/nccl/lib/libnccl.so.2\n"
        "7f01-7f02 rw-p 00000000 08:01 11 /venv/lib/nvidia/nccl/lib/libnccl.so.2\n"
        "7f02-7f03 r-xp 00000000 08:01 12                         /opt/nccl/lib/libnccl.so.2.30.7 (deleted)\n"
        "7f03-7f04 r-xp 00000000 08:01 13 /usr/lib/libnccl-net.so\n7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    assert _nccl_library.mapped(maps) == ["/opt/nccl/lib/libnccl.so.2.30.7", "/venv/lib/nvidia/nccl/lib/libnccl.so.2"]


# The module ------------------------------------------------------------------------------------------------------------------


def run(**arguments: Any) -> dict[str, Any]:
    """The module by ansible itself."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env |= {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"), "ANSIBLE_NOCOLOR": "1"}
    env |= {"ANSIBLE_LOAD_CALLBACK_PLUGINS": "1", "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.oneline"}
    ansible = Path(sys.executable).parent / "ansible"
    interpreter = f"ansible_python_interpreter={sys.executable}"
    command = [ansible, "localhost", "-e", interpreter, "-m", "gb10.cluster.nccl_verdict", "-a", json.dumps(arguments)]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


def test_the_module_fails_with_the_sentences_and_can_be_asked_only_to_report(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("\n".join(failing(synthetic.modify_qp(113, "rocep1s0f1", *SAME_LEG))))
    failed = run(paths=[str(log)], plan=RING)
    assert failed["msg"].startswith("rank 1: nobody answers rocep1s0f1 from 10.10.0.2 to 10.10.0.1")
    reported = run(paths=[str(log)], plan=RING, strict=False, loaded=True)
    assert (reported["passed"], reported["changed"]) == (False, False)
    assert reported["findings"][0]["code"] == "peer-silent"
    good = run(text="\n".join(synthetic.ring(RING)), plan=RING)
    assert (good["passed"], good["findings"]) == (True, [])
    assert "has not run on this host" in run(group="nobody")["msg"]
    absent = run(paths=[str(tmp_path / "none.log")])
    assert "none.log cannot be read (No such file or directory): name a file on this host" in absent["msg"]
