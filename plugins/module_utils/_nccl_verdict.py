# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the log of a group's ranks proves, held against the plan: the transport of each rank, and each known failure with its cause
and its cure.

The failures are those of NCCL 2.30.7's source and of the public reports on rings of Sparks; `_nccl_causes` knows their lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _nccl_causes
from ._findings import REFUSE, WARN, Finding, refused
from ._nccl import OPEN_RING, SUBNET_ROUTING, SUBNET_ROUTING_SINCE
from ._nccl_log import Log, RankLog
from ._topology import PORTS

IB, SOCKET = "IB", "Socket"
INSIDE = ("P2P", "SHM")


@dataclass(frozen=True)
class RankPlan:
    """What is planned for one rank."""

    member: str
    interface: str
    hcas: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Expected:
    """What a log is held against. Without a plan only `transport` is known: then `ranks` is empty and nothing else is judged."""

    transport: str = IB
    ring: bool = False
    ranks: tuple[RankPlan, ...] = ()
    legs: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()

    @property
    def is_open_ring(self) -> bool:
        return self.ring and len(self.ranks) >= OPEN_RING


def expected_of(plan: Mapping[str, Any] | None, transport: str = "") -> Expected:
    """From a plan (or none): its devices, interfaces and legs by rank; hosts without RDMA devices are planned to use sockets."""
    if not plan:
        return Expected(transport or IB)
    ranks = []
    for name in plan["cluster"]["members"]:
        member = plan["members"][name]
        environment = member["rank_config"]["container"]["environment"]
        hcas = tuple(leg["hca"] for leg in member["legs"])
        ranks.append(RankPlan(name, member["management"]["interface"], hcas, environment))
    return Expected(
        transport=transport or (IB if plan["cluster"]["devices"] else SOCKET),
        ring=plan["cluster"]["topology"] == "ring",
        ranks=tuple(ranks),
        legs={end["address"]: f"{leg['cable']} half {leg['half']}" for leg in plan["fabric"]["legs"] for end in leg["ends"]},
        features=tuple(each["feature"] for each in plan["fabric"]["nccl"]["library"]),
    )


def judge(log: Log, expected: Expected, host: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The verdict on a log: `passed`, `transport`, `ranks` (each with devices, bootstrap and channels), `findings`.

    `host`: facts that tell causes apart, where the log is of this host: those of `_platform.read_platform`, `hcas` (a number) and
    `memlock` (bytes, none for no limit). A finding's sentence starts with the ranks that it is about.
    """
    told: list[tuple[str, Finding]] = []
    for rank in log.ranks:
        told += [(str(rank), finding) for finding in _judge_rank(rank, expected, host or {})]
    # Where one rank failed, the others wait for it.
    if any(finding.severity == REFUSE and finding.code != _nccl_causes.WAITS for dummy, finding in told):
        told = [(who, finding) for who, finding in told if finding.code != _nccl_causes.WAITS]
    findings = _grouped(told) + _judge_group(log, expected)
    transports = sorted({transport for rank in log.ranks for transport in rank.transports})
    if not log.ranks:
        sentence = "the log has no line of NCCL at INFO: set NCCL_DEBUG=INFO, and look whether the rank got as far as that"
        findings.insert(0, Finding(REFUSE, "no-lines", sentence))
    findings += _nccl_causes.of_others(log.others, nccl_failed=bool(refused(findings)))
    return {
        "passed": not refused(findings),
        "transport": " and ".join(transports) or "none",
        "ranks": [_summary(rank) for rank in log.ranks],
        "findings": sorted(findings, key=lambda finding: finding.severity != REFUSE),
    }


def _grouped(told: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """One finding for all ranks that have the same one, the evidence of the first."""
    groups: dict[tuple[str, str, str], tuple[list[str], str]] = {}
    for who, finding in told:
        names = groups.setdefault((finding.severity, finding.code, finding.sentence), ([], finding.evidence))[0]
        names += [who] if who not in names else []
    return [
        Finding(severity, code, f"{' and '.join(names)}: {sentence}", evidence)
        for (severity, code, sentence), (names, evidence) in groups.items()
    ]


def _judge_rank(rank: RankLog, expected: Expected, host: Mapping[str, Any]) -> list[Finding]:
    plan = expected.ranks[rank.rank] if rank.rank is not None and rank.rank < len(expected.ranks) else None
    findings = _library(rank, expected)
    errors = _nccl_causes.of_rank(rank, expected, plan, host)
    findings += errors
    if plan:
        findings += _against_plan(rank, plan)
    if not refused(errors):
        findings += _transport(rank, expected, plan, host)
    return findings


def _library(rank: RankLog, expected: Expected) -> list[Finding]:
    """Too old for the cabling, or two of them. The version is all that a log tells; the file itself says more (`_nccl_library`)."""
    findings = []
    if len(rank.versions) > 1:
        sentence = f"two NCCL libraries ({', '.join(rank.versions)}) in one process: set LD_PRELOAD and VLLM_NCCL_SO_PATH to the same file"
        findings.append(Finding(WARN, "library-twice", sentence))
    for version in rank.versions:
        if SUBNET_ROUTING in expected.features and numbers(version) < SUBNET_ROUTING_SINCE:
            since = ".".join(map(str, SUBNET_ROUTING_SINCE))
            sentence = f"NCCL {version} ignores NCCL_{SUBNET_ROUTING}, which this cabling needs: use {since} or newer"
            findings.append(Finding(REFUSE, "library-old", sentence))
    return findings


def numbers(version: str) -> tuple[int, ...]:
    """`2.30.7+cuda13.0` as numbers."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def _against_plan(rank: RankLog, plan: RankPlan) -> list[Finding]:
    """Interface, devices and variables that are not the planned ones."""
    findings = []
    if rank.interface and rank.interface != plan.interface:
        what = "a leg, which reaches one neighbour only" if rank.interface in {port.netdev for port in PORTS} else "another network"
        sentence = f"bootstrap uses {rank.interface} instead of {plan.interface}, {what}: set NCCL_SOCKET_IFNAME to ={plan.interface}"
        findings.append(Finding(REFUSE, "bootstrap-interface", sentence))
    used = [device.partition(":")[0] for device in rank.physical]
    if used and (missing := [hca for hca in plan.hcas if hca not in used]):
        sentence = (
            f"{len(used)} of {len(plan.hcas)} planned devices in use, without {', '.join(missing)}, so bandwidth is lost (decoding hardly "
            "feels it): compare NCCL_IB_HCA inside the container with the plan, and run roce_info on the member"
        )
        findings.append(Finding(WARN, "devices-missing", sentence))
    if extra := [device for device in used if device not in plan.hcas]:
        sentence = f"{', '.join(extra)} is in use but in no leg of {plan.member}: set NCCL_IB_HCA to {plan.environment.get('NCCL_IB_HCA')}"
        findings.append(Finding(REFUSE, "devices-extra", sentence))
    for key, value in rank.environment.items():
        wanted = plan.environment.get(key)
        if wanted is not None and wanted != value:
            sentence = f"{key} is {value!r} inside the container instead of {wanted!r}: find what sets it (image, /etc/nccl.conf, launcher)"
            findings.append(Finding(WARN, "environment-differs", sentence))
    return findings


def _transport(rank: RankLog, expected: Expected, plan: RankPlan | None, host: Mapping[str, Any]) -> list[Finding]:
    """What the channels went over, where nothing failed."""
    outside = [channel.transport for channel in rank.channels if not channel.transport.startswith(INSIDE)]
    socket = "NET/Socket" in outside or (not rank.channels and rank.network == SOCKET)
    if rank.size == 1:
        sentence = "it is alone in its communicator (nranks 1): build nccl-tests with MPI=1, or start the ranks as one group"
        return [Finding(REFUSE, "alone", sentence)]
    if expected.transport == IB and socket:
        return [_nccl_causes.socket_instead(rank, plan, host)]
    if rank.channels and not outside and expected.transport == IB:
        inside = ", ".join(rank.transports)
        sentence = f"all channels stay inside one host ({inside}), so nothing is proven of the fabric: run one rank per member"
        return [Finding(REFUSE, "one-host", sentence)]
    if not rank.channels:
        return [_nccl_causes.stopped(rank, plan, expected)]
    return _one_neighbour(rank, expected) if expected.transport == IB else []


def _one_neighbour(rank: RankLog, expected: Expected) -> list[Finding]:
    """In a ring each rank sends to one neighbour and hears from another; all devices on one of them means a wrong choice of ports."""
    peers = {channel.sender if channel.receiver == rank.rank else channel.receiver for channel in rank.channels}
    if expected.ring and len(expected.ranks) > 2 and len(peers) == 1:
        sentence = (
            f"all its channels go to rank {peers.pop()}, though it has two neighbours: check NCCL_IB_SUBNET_AWARE_ROUTING and the cabling"
        )
        return [Finding(REFUSE, "one-neighbour", sentence)]
    return []


def _judge_group(log: Log, expected: Expected) -> list[Finding]:
    """What only shows over all ranks."""
    findings = []
    known = {rank.rank for rank in log.ranks if rank.rank is not None}
    size = max((rank.size for rank in log.ranks), default=0)
    if len(log.ranks) > 1 and size > 1 and (missing := sorted(set(range(size)) - known)):
        listed = ", ".join(map(str, missing))
        findings.append(
            Finding(WARN, "ranks-missing", f"of {size} ranks the log of rank {listed} is missing or ends early: read that one first")
        )
    if expected.ranks and size > 1 and size != len(expected.ranks):
        sentence = (
            f"the group has {size} ranks, but {len(expected.ranks)} are planned: an old group may still hold the rendezvous, stop all"
        )
        findings.append(Finding(REFUSE, "group-size", sentence))
    versions = {str(rank): tuple(sorted(rank.versions)) for rank in log.ranks if rank.versions}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{who} {'/'.join(version)}" for who, version in versions.items())
        findings.append(
            Finding(REFUSE, "versions-differ", f"the ranks run different NCCL versions ({listed}): run the same image on all members")
        )
    return findings


def _summary(rank: RankLog) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "size": rank.size,
        "host": rank.host,
        "pid": rank.pid,
        "source": rank.source,
        "versions": rank.versions,
        "bootstrap": {"interface": rank.interface, "address": rank.address},
        "network": rank.network,
        "devices": rank.physical,
        "transports": rank.transports,
        "complete": rank.complete,
        "subnet_rerouted": rank.rerouted,
        "channels": [
            {
                "channel": channel.number,
                "from": channel.sender,
                "to": channel.receiver,
                "direction": channel.direction,
                "transport": channel.transport,
                "device": _device(rank, channel.transport, channel.device),
            }
            for channel in rank.channels
        ],
    }


def _device(rank: RankLog, transport: str, index: int | None) -> str:
    """A channel's device by name: that of the HCA, or for a socket that of the interface as far as it is the bootstrap's."""
    if index is None:
        return ""
    return rank.devices.get(index, str(index)) if transport == "NET/IB" else str(index)
