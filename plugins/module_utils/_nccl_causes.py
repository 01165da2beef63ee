# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The failures that a NCCL log can name, each with its cause and its cure in one sentence.

Sources: NCCL 2.30.7's format strings and error numbers; NVIDIA/nccl#2157 (GID tables); MiaAI-Lab, tonyd2wild, colonel-otto,
masquerator-coder, christopherowen, sparkring and graham33 for what was behind each on Sparks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from ._findings import REFUSE, WARN, Finding
from ._platform import registration_fault

if TYPE_CHECKING:
    from ._nccl_log import RankLog
    from ._nccl_verdict import Expected, RankPlan

WAITS = "waits"
RETRY_EXCEEDED = "12"
LEAST_MEMLOCK = 2**30
"""Below it registration fails sooner or later (graham33 treats it as an error)."""

_TABLE = "gb10.cluster.roce_info shows its table"
_CABLES = "run gb10.cluster.gate --tags cables"


@dataclass(frozen=True)
class Scene:
    """Where a line was found: its match, the rank's whole log, what is expected of the group and of the rank, the host's facts."""

    match: re.Match[str]
    rank: RankLog
    expected: Expected
    plan: RankPlan | None
    host: Mapping[str, Any]


# From a scene to a severity, a code and a sentence.
Cause = Callable[[Scene], tuple[str, str, str]]


def of_rank(rank: RankLog, expected: Expected, plan: RankPlan | None, host: Mapping[str, Any]) -> list[Finding]:
    """Findings on a rank's warnings and telling lines. A warning that nothing is known of is passed on as it is."""
    findings: list[Finding] = []
    for line in [*rank.warnings, *(info for info in rank.infos if _TELLING.match(info))]:
        known = next(((cause, match) for pattern, cause in _CAUSES if (match := pattern.search(line))), None)
        if known:
            severity, code, sentence = known[0](Scene(known[1], rank, expected, plan, host))
            findings.append(Finding(severity, code, sentence, line))
        else:
            findings.append(Finding(WARN, "unknown-warning", f"NCCL warns {line!r}: nothing is known of it here, read the lines before it"))
    codes = {finding.code for finding in findings}
    # The line that only sums up says nothing that the cause has not said.
    if codes & _ROOTS:
        findings = [finding for finding in findings if finding.code not in _CONSEQUENCES]
    return list({finding.sentence: finding for finding in reversed(findings)}.values())[::-1]


def socket_instead(rank: RankLog, plan: RankPlan | None, host: Mapping[str, Any]) -> Finding:
    """Sockets where InfiniBand was planned: the most likely cause first, and the host's own facts where they tell."""
    evidence = next((info for info in rank.infos if info.startswith(("NET/IB : No device", "Failed to initialize NET plugin IB"))), "")
    selector = _selector(rank, plan)
    unset = "so that it fails instead of falling back, set NCCL_NET=IB"
    why = _no_device(selector, host) if "No device" in evidence else f"NCCL_NET or a plugin chose so: {unset}"
    return Finding(REFUSE, "socket", f"the transport is NET/Socket instead of NET/IB, at a fraction of the speed, since {why}", evidence)


def stopped(rank: RankLog, plan: RankPlan | None, expected: Expected) -> Finding:
    """A rank that says nothing wrong and sets up no channel: it waits."""
    if rank.complete:
        sentence = "it has a communicator but no channel yet: nothing was sent, so send something (an all-reduce, a request) and look again"
        return Finding(REFUSE, "no-channel", sentence)
    if plan and rank.interface and rank.interface != plan.interface:
        sentence = f"it waits in bootstrap on {rank.interface}, over which not every rank can be reached: use {plan.interface}"
        return Finding(REFUSE, WAITS, sentence)
    where = "after the start of its communicator" if rank.started else "in bootstrap"
    cure = "see whether all ranks run, and that they reach each other over the management interface (ss -tn state syn-sent)"
    return Finding(REFUSE, WAITS, f"it waits {where} for other ranks: {cure}")


def of_others(lines: Iterable[str], nccl_failed: bool) -> list[Finding]:
    """Failures of Gloo and PyTorch. What they say after NCCL failed is a consequence of that."""
    findings = []
    for line in lines:
        if match := re.search(r"Unable to find address for: (\S+)", line):
            sentence = f"Gloo looks for {match[1]}, which has no address: set GLOO_SOCKET_IFNAME to the management interface (a plain name)"
            findings.append(Finding(REFUSE, "gloo-interface", sentence, line))
        elif not nccl_failed and re.search(r"TCPStore|recvValueWithTimeout|DistNetworkError|Connection closed by peer \[", line):
            sentence = "a rank lost the rendezvous: another rank ended first or the head's address is wrong, so read the other ranks' logs"
            findings.append(Finding(REFUSE, "rendezvous-lost", sentence, line))
        elif match := re.search(r"# Avg bus bandwidth\s*:\s*0(\.0*)?\s*$", line):
            sentence = "the test measured no bandwidth between ranks: build nccl-tests with MPI=1"
            findings.append(Finding(REFUSE, "alone", sentence, line))
    return list({finding.sentence: finding for finding in findings}.values())


def _selector(rank: RankLog, plan: RankPlan | None) -> str:
    """NCCL_IB_HCA as the log has it, else as planned."""
    return rank.environment.get("NCCL_IB_HCA") or (plan.environment.get("NCCL_IB_HCA", "") if plan else "")


def _no_device(selector: str, host: Mapping[str, Any]) -> str:
    """Why NET/IB found no device."""
    mapping = "/dev/infiniband is not mapped into the container (cluster_devices)"
    filtering = f"NCCL_IB_HCA {selector!r} means no device that is active" if selector else "no HCA is active"
    libraries = "the image lacks libibverbs or libmlx5"
    number = host.get("hcas")
    if number == 0:
        return "this host has no RDMA device: check the ConnectX driver (lspci, dmesg)"
    if number:
        return f"this host has {number} RDMA devices and the container saw none: {mapping}, else {filtering}, else {libraries}"
    return f"no RDMA device was found: {mapping}, else {filtering}, else {libraries}"


def _modify_qp(scene: Scene) -> tuple[str, str, str]:
    number, line, rank = int(scene.match[1]), scene.match.string, scene.rank
    device = _part(line, r"on dev (\S+?)[:,]") or "a device"
    index, local, remote = _part(line, r"GID index (-?\d+)"), _address(line, "local"), _address(line, "remote")
    ends = f"from {local} to {remote}" if local and remote else "to its peer"
    pin = rank.environment.get("NCCL_IB_GID_INDEX")
    unpin = "unset NCCL_IB_GID_INDEX" if pin is not None else "give every HCA of NCCL_IB_HCA its address (run the fabric role)"
    if number == 61:
        what = f"{device} has no GID at index {index or pin or '?'}"
        return REFUSE, "gid-empty", f"{what}, as after a flap or on a port without an address: {unpin}; {_TABLE}"
    if number == 22:
        return (
            REFUSE,
            "gid-wrong",
            f"the GID at index {index or pin or '?'} of {device} is no RoCE v2 entry of an IPv4 address: {unpin}; {_TABLE}",
        )
    if number == 101:
        return REFUSE, "gid-unroutable", f"{device} has no route {ends}, so its GID is not that of a leg: {unpin}; {_TABLE}"
    if number == 113:
        return REFUSE, "peer-silent", f"nobody answers {device} {ends}: see whether the neighbour's port is up and addressed, {_CABLES}"
    if number == 110:
        return _timed_out(device, local, remote, ends, rank, scene.expected)
    return REFUSE, "qp-failed", f"{device} could not connect {ends} (errno {number}): read the lines before it; {_TABLE}"


def _timed_out(device: str, local: str, remote: str, ends: str, rank: RankLog, expected: Expected) -> tuple[str, str, str]:
    """Errno 110: trees in an open ring, ports of different legs, or a leg that does not carry."""
    legs = [expected.legs.get(local), expected.legs.get(remote)]
    if "rings" in rank.connected and (expected.is_open_ring or (not expected.ranks and rank.size > 3)):
        sentence = (
            "all rings are connected, so the fabric is good, but NCCL then connects trees between ranks that are no neighbours, which have "
            "no path in this ring: use a library patched for NCCL_SKIP_TREE_CONNECT=1, or NCCL_RUNTIME_CONNECT=1 with NCCL_CUMEM_ENABLE=1"
        )
        return REFUSE, "tree-without-path", sentence
    if all(legs) and legs[0] != legs[1]:
        routed = "" if rank.rerouted else ", and no line shows that the library knows NCCL_IB_SUBNET_AWARE_ROUTING"
        sentence = (
            f"{device} tried to connect {ends}, ends of different legs ({legs[0]} and {legs[1]}){routed}: use NCCL 2.30.7 or newer with "
            "the plan's variables (NCCL_IB_MERGE_NICS=1 where a cable joins equal cages), then check the cabling (gb10.cluster.gate --tags cables)"
        )
        return REFUSE, "wrong-leg", sentence
    if legs[0]:
        sentence = (
            f"{device} got no answer on leg {legs[0]} {ends}: see the neighbour's port, the MTU at both ends (fabric_legs), and {_CABLES}"
        )
        return REFUSE, "leg-silent", sentence
    sentence = (
        f"{device} got no answer {ends}: the two are ports of different legs (subnet-aware routing needs NCCL 2.30.7 or newer), or a "
        f"cable is elsewhere: {_CABLES}"
    )
    return REFUSE, "wrong-leg", sentence


def _registration(scene: Scene) -> tuple[str, str, str]:
    if fault := registration_fault(scene.host):
        return REFUSE, "kernel-registration", fault
    raising = "give the container unlimited memlock (ulimits memlock -1) and the capability IPC_LOCK"
    if "memlock" in scene.host and (scene.host["memlock"] is None or scene.host["memlock"] >= LEAST_MEMLOCK):
        sentence = (
            "RDMA could not register memory, though memlock is not limited and the kernel's CMA is well: look at free memory and dmesg"
        )
        return REFUSE, "registration", sentence
    if "kernel" in scene.host:
        return REFUSE, "memlock", f"RDMA could not register memory, since the limit of locked memory is too low: {raising}"
    other = "where that is done, look at CmaTotal in /proc/meminfo (a fault of kernel 7.0)"
    return REFUSE, "memlock", f"RDMA could not register memory: {raising}; {other}"


def _completion(scene: Scene) -> tuple[str, str, str]:
    peer, status = scene.match[1], scene.match[2] or scene.match[3]
    if status == RETRY_EXCEEDED:
        sentence = (
            f"packets to {peer} are lost (RETRY_EXC_ERR): compare the MTU at both ends and the addresses of all HCAs (fabric_legs, roce_info); "
            "if these are right, take power and cables off both members for a minute"
        )
        return REFUSE, "retry-exceeded", sentence
    return (
        REFUSE,
        "completion",
        f"a transfer with {peer} failed with status {status}: read the other rank's log, it names the cause more often",
    )


def _fixed(severity: str, code: str, sentence: str) -> Cause:
    """A cause whose sentence takes the first group of the match, if any, for `{}`."""

    def cause(scene: Scene) -> tuple[str, str, str]:
        interface = f"={scene.plan.interface}" if scene.plan else "the management interface"
        return severity, code, sentence.format(*scene.match.groups(), interface=interface)

    return cause


def _no_plugin(scene: Scene) -> tuple[str, str, str]:
    if any("No device found" in info for info in scene.rank.infos):
        selector = _selector(scene.rank, scene.plan)
        return REFUSE, "no-device", f"NCCL_NET=IB holds, and {_no_device(selector, scene.host)}"
    return REFUSE, "no-plugin", "no network could be used: see which one NCCL_NET names, and whether the image has libibverbs and libmlx5"


def _no_interface(scene: Scene) -> tuple[str, str, str]:
    name = scene.rank.environment.get("NCCL_SOCKET_IFNAME", "")
    what = f"NCCL_SOCKET_IFNAME {name!r} names no interface of this host" if name else "no interface for bootstrap has an address"
    wanted = f"={scene.plan.interface}" if scene.plan else "the interface of the management plane"
    return REFUSE, "no-interface", f"{what}, so the ranks cannot meet: set it to {wanted} (ip -br address shows the names)"


_CAUSES: tuple[tuple[re.Pattern[str], Cause], ...] = tuple(
    (re.compile(pattern), cause)
    for pattern, cause in (
        (r"ibv_modify_qp failed with (?:error )?(\d+)", _modify_qp),
        (r"ibv_reg_(?:dmabuf_)?mr(?:_iova2)? failed with error (?:12 )?Cannot allocate memory", _registration),
        (r"Got completion from peer (\S+) with status=(?:\w+\((\d+)\)|(\d+))", _completion),
        (r"Bootstrap : no socket interface found", _no_interface),
        (r"Failed to initialize any NET plugin", _no_plugin),
        (
            r"NET/IB : (\S+?):\d+ GID table changed",
            _fixed(
                WARN, "gid-changed", "the GID table of {} changed while it was in use, as by netplan apply: keep network tools off the legs"
            ),
        ),
        (
            r"Failed to (?:load|open) libibverbs",
            _fixed(REFUSE, "no-verbs", "the image lacks libibverbs: install rdma-core's libraries in it"),
        ),
        (
            r"NCCL_IB_SUBNET_PREFIX_LEN=(\S+) is out of range",
            _fixed(REFUSE, "prefix-length", "NCCL_IB_SUBNET_PREFIX_LEN is {}, which must be 1 to 32: use the plan's variables"),
        ),
        (
            r"NET/IB : (\S+?):\d+ async fatal event",
            _fixed(REFUSE, "device-failed", "{} failed while in use: see dmesg, and take power and cables off the member for a minute"),
        ),
        (
            r"NET/IB : (\S+?):\d+ Got non-fatal async event: (.*?)\(\d+\)",
            _fixed(WARN, "device-event", "{} reported {!r}, as when a cable is pulled or a neighbour reboots: see whether its leg is up"),
        ),
        (
            r"NET/IB : (?:Attempted to connect|Remote \S+ device is) incompatible",
            _fixed(REFUSE, "device-incompatible", "NCCL_IB_HCA names devices of different link types: use the plan's variables"),
        ),
        (
            r"Connection closed by remote peer (\S+)|Call to recv from (\S+) failed",
            _fixed(WARN, "peer-ended", "another rank ended first: read that one's log"),
        ),
        (
            r"connect to (\S+?) (?:returned|failed)",
            _fixed(
                REFUSE, "bootstrap-unreachable", "{} cannot be reached for bootstrap: set NCCL_SOCKET_IFNAME to {interface} on all ranks"
            ),
        ),
    )
)
# INFO lines that are worth a cause; the rest is the course of things.
_TELLING = re.compile(r"Failed to (?:load|open) libibverbs|.*connect to \S+ returned .*, retrying \((?:[1-9]\d)/")
_ROOTS = {
    *("gid-empty", "gid-wrong", "gid-unroutable", "peer-silent", "wrong-leg", "leg-silent", "tree-without-path"),
    *("kernel-registration", "memlock", "no-interface", "no-device", "no-verbs", "retry-exceeded"),
}
_CONSEQUENCES = {"peer-ended", "unknown-warning", "completion"}


def _part(line: str, pattern: str) -> str:
    match = re.search(pattern, line)
    return match[1] if match else ""


def _address(line: str, side: str) -> str:
    """The IPv4 address of a GID in a line, or the GID itself."""
    text = _part(line, rf"{side} GIDs? ([0-9a-fA-F:.]+)")
    try:
        address = ip_address(text)
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)
