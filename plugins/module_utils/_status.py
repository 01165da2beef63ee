# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a cluster in lines: one a member and one for each thing that is wrong, with the command that comes next.

What is said is decided here, once; the screen of a terminal and the page (plugin_utils/_status_page.py) show the same lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _host, _lock, _netplan, _settings, _units

PLAYBOOK = "ansible-playbook gb10.cluster."
EVENTS = 3
"""Changes of a member that the screen has room for."""


def read_member(
    group: str, legs: Sequence[Mapping[str, Any]], mtu: int, procfs_root: str = "/proc", history: bool = False
) -> dict[str, Any]:
    """What one member says of itself: its rank, its legs, its memory (MiB) and swap, and its last day where `history` is asked for."""
    state = _units.read_rank_state(group)
    live = _netplan.parse_addresses(_host.run(["ip", "-json", "address"]).out)
    meminfo = dict(line.partition(":")[::2] for line in (_host.read(f"{procfs_root}/meminfo") or "").splitlines())
    return {
        "active": state.active,
        "phase": state.phase if state.is_active else "stopped",
        "detail": state.detail,
        "failure": dict(state.failure) if state.failure else None,
        "leg_problems": [
            *_netplan.leg_differences(legs, mtu, live),
            *(f"{leg['netdev']} has no carrier" for leg in legs if leg["netdev"] in live and not live[leg["netdev"]].carrier),
        ],
        "legs": len(legs),
        "mem_free_mib": int(meminfo.get("MemFree", "0 kB").split()[0]) // 1024,
        "mem_total_mib": int(meminfo.get("MemTotal", "0 kB").split()[0]) // 1024,
        "guard": _units.read_guard_record(group),
        "checks": dict(state.checks),
        "events": [dict(event) for event in state.events],
        "evidence": _host.names(_units.evidence_directory(group)),
        "at_boot": _host.run(["systemctl", "is-enabled", _units.target_unit(group)]).out.strip() == "enabled",
        "lock": _lock_sentence(_lock.parse(_units.read_lock(group))),
        "swaps": _settings.active_swaps(_host.read(f"{procfs_root}/swaps") or ""),
        **({"history": _units.read_history(group)} if history else {}),
    }


def _lock_sentence(lock: _lock.Lock | None) -> str:
    """Who works on the cluster now; empty where nobody does."""
    return f"{lock.owner.who} runs {lock.owner.what}, since {_lock.age_text(time.time() - lock.since)}" if lock else ""


def summary(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """The same for programs: whether the group serves, the screen's lines, and all that the members said."""
    return {
        "group": plan["cluster"]["name"],
        "serving": serves(members),
        "url": f"{plan['service']['url']}/v1",
        "model": plan["service"]["served_model_name"],
        "lines": screen(plan, members),
        "members": {name: None if member is None else dict(member) for name, member in members.items()},
    }


def serves(members: Mapping[str, Mapping[str, Any] | None]) -> bool:
    return all(member is not None and member["phase"] == "serving" for member in members.values())


@dataclass(frozen=True)
class Line:
    """One fact: of which member (empty for the group), what, and the command that comes next where it is bad. `first`: what a member is doing."""

    member: str
    text: str
    command: str = ""
    first: bool = False


def screen(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Lines of the status screen. A member that did not answer is None."""
    width = max(len(name) for name in members)
    shown = []
    for line in lines(plan, members):
        start = f"{line.member:<{width}}  rank {plan['members'][line.member]['rank']}  " if line.first else f"{'':<{width}}  "
        shown.append(f"{start if line.member else ''}{line.text}{f' -> {line.command}' if line.command else ''}")
    return shown


def lines(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> list[Line]:
    """The group's line first, then the members', the last failure last."""
    cluster, service = plan["cluster"], plan["service"]
    head = members.get(cluster["head"]) or {}
    serving = serves(members)
    found = [
        Line(
            "",
            f"group {cluster['name']}: {'serving' if serving else 'not serving'} {service['served_model_name']} ({cluster['profile']}) "
            f"at {service['url']}/v1, {cluster['topology']} of {len(cluster['members'])}",
        )
    ]
    if head.get("lock"):
        found.append(Line("", head["lock"]))
    for name, member in members.items():
        found += _member_lines(name, member)
    if (failure := last_failure(plan, members)) and not serving:
        more = f", {PLAYBOOK}evidence" if failure.get("evidence") else ""
        found.append(Line("", f"last failure: {failure['reason']}", f"{PLAYBOOK}logs --limit {failure['culprit']}{more}"))
    return found


def last_failure(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """What the head says of it, else the first member that says anything."""
    head = members.get(plan["cluster"]["head"]) or {}
    return head.get("failure") or next((member["failure"] for member in members.values() if member and member["failure"]), None)


def _member_lines(name: str, member: Mapping[str, Any] | None) -> Iterator[Line]:
    if member is None:
        yield Line(name, "unreachable", "check its power and its management network", first=True)
        return
    memory = f"{member['mem_free_mib'] / 1024:.1f} of {member['mem_total_mib'] / 1024:.1f} GiB free"
    detail = f" ({member['detail']})" if member["detail"] and member["phase"] not in ("serving", "stopped") else ""
    legs = f"{member['legs'] - _bad_legs(member)}/{member['legs']} legs"
    yield Line(name, f"{member['phase']}{detail}, {legs}, {memory}", _next_command(member), first=True)
    for problem in member["leg_problems"]:
        yield Line(name, problem, f"{PLAYBOOK}site --tags fabric")
    for event in member["events"][-EVENTS:]:
        yield Line(name, f"{event['what']} (start of {_when(event['at'])})")
    if not member["at_boot"]:
        yield Line(name, "a boot does not start the group here", f"{PLAYBOOK}resume")
    if guard := member["guard"]:
        yield Line(name, f"memory guard: {guard['action']}, {guard['reason']}", f"free memory, then {PLAYBOOK}start")
    if member["swaps"]:
        yield Line(name, f"swap is on ({', '.join(member['swaps'])})", f"{PLAYBOOK}site --tags fabric")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _bad_legs(member: Mapping[str, Any]) -> int:
    return len({problem.split()[0] for problem in member["leg_problems"]})


def _next_command(member: Mapping[str, Any]) -> str:
    if member["active"] == "failed":
        return f"{PLAYBOOK}logs, then {PLAYBOOK}start"
    return f"{PLAYBOOK}start" if member["phase"] == "stopped" else ""
