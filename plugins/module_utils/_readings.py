# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what members said in a step of the playbook acceptance to figures in one line, or Wrong with a sentence where they are not as claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _gate

GIB = 2**30
Results = Mapping[str, Mapping[str, Any]]
"""Results of modules by registered name."""


class Wrong(Exception):
    """What was seen is not as claimed; one sentence."""


@dataclass(frozen=True)
class View:
    """What one step saw. `steps`: results of each member, by step and member."""

    plan: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, Results]]
    step: str

    def each(self, name: str, step: str = "") -> dict[str, Mapping[str, Any]]:
        """A registered result by member; Wrong where a member has none."""
        seen = self.steps.get(step or self.step, {})
        silent = [member for member in self.plan["cluster"]["members"] if name not in seen.get(member, {})]
        if silent:
            raise Wrong(f"{', '.join(silent)} said nothing of it")
        return {member: seen[member][name] for member in self.plan["cluster"]["members"]}

    def head(self) -> Results:
        """All that the head said."""
        return self.steps.get(self.step, {}).get(self.plan["cluster"]["head"], {})


def _sound(view: View, name: str) -> dict[str, Mapping[str, Any]]:
    """The same as `each`; Wrong with the problems that members named."""
    said = view.each(name)
    _refuse([f"{member}: {problem}" for member, result in said.items() for problem in result.get("problems", [])])
    return said


def _refuse(problems: list[str]) -> None:
    if problems:
        raise Wrong("; ".join(problems))


def devices(view: View) -> str:
    """The kernels stand beside it: reports of others are told apart by them."""
    said = _sound(view, "__fabric_preflight")
    kernels = sorted({str(result.get("platform", {}).get("kernel", "")) for result in said.values()})
    return f"{sum(len(each['legs']) for each in view.plan['members'].values())} devices as planned, kernel {' and '.join(kernels)}"


def cabling(view: View) -> str:
    """Wrong plugs end the step itself."""
    seen = view.steps[view.step].values()
    ports = [port for said in seen for name in ("__fabric_cables_later", "__fabric_cables") for port in said.get(name, {}).get("ports", [])]
    _refuse([] if ports else ["no member looked at its ports"])
    return f"{sum(bool(port['heard']) for port in ports)} of {len(ports)} ports hear a neighbour, the planned one"


def legs(view: View) -> str:
    """Ways that answered, of all."""
    proven = sum(result["proven"] for result in _sound(view, "__fabric_legs").values())
    ways = sum(len(leg["peers"]) for member in view.plan["members"].values() for leg in member["legs"])
    line = f"{proven} of {ways} ways with {view.plan['fabric']['mtu']} bytes"
    _refuse([] if proven == ways else [line])
    return line


def gids(view: View) -> str:
    """The index may differ by HCA: NCCL finds it for each."""
    hcas = [hca for result in _sound(view, "__fabric_roce").values() for hca in result["hcas"]]
    _refuse([f"{hca['name']} is {hca['verdict']}" for hca in hcas if hca["verdict"] != "right"] if hcas else ["there is no HCA"])
    return f"{len(hcas)} HCAs right, GID index {', '.join(sorted({str(hca['gid_index']) for hca in hcas}))}"


def after_reboot(view: View) -> str:
    return f"{legs(view)}; {gids(view)}"


def checkpoint(view: View) -> str:
    _refuse([f"{member}: {state['verdict']}" for member, state in view.each("__storage_state").items() if not state["ok"]])
    return f"whole on {', '.join(view.plan['cluster']['members'])}"


def image(view: View) -> str:
    contents = {member: state["content"][:12] for member, state in view.each("__runtime_state").items()}
    _refuse([f"{member} has {content or 'no image'}" for member, content in contents.items()] if len(set(contents.values())) > 1 else [])
    return f"content {next(iter(contents.values()))} on {', '.join(contents)}"


def checks(view: View) -> str:
    """Lines of the check inside the image; those that all members have once."""
    said = view.each("__runtime_check")
    lines = [
        (member, f"{name} {one['result']}: {one['line']}") for member, result in said.items() for name, one in result["checks"].items()
    ]
    _refuse([f"{member} {line}" for member, line in lines if " FAILED: " in line])
    return "; ".join(dict.fromkeys(line for _member, line in lines))


def answers(view: View) -> str:
    """Probes are the head's."""
    names: dict[str, list[str]] = {}
    for result in view.head().get("verify_probe", {}).get("results", []):
        names.setdefault(result["verdict"], []).append(result["name"])
    line = "; ".join(f"{verdict}: {', '.join(which)}" for verdict, which in names.items())
    _refuse([line or "nothing was probed"] if names.get("failed") or not names.get("passed") else [])
    return line


def transport(view: View) -> str:
    said = view.each("verify_nccl")
    _refuse([f"{member}: {sentence}" for member, result in said.items() for sentence in result["against"]])
    used = ", ".join(sorted({result["transport"] for result in said.values()}))
    _refuse([] if used == "NET/IB" else [f"the ranks use {used}"])
    return f"{used} on {', '.join(said)}"


def environment(view: View) -> str:
    seen = [result["seen"] for result in _sound(view, "acceptance_proof").values()]
    images = sorted({each["image"].removeprefix("sha256:")[:12] for each in seen})
    return f"image {', '.join(images)}; arguments and variables as planned in {sum(len(each['processes']) for each in seen)} processes"


def gate(view: View) -> str:
    said = view.head()
    artefact = next(
        (said[name]["artefact"] for name in ("__fabric_gate_later", "__fabric_gate_measured") if "artefact" in said.get(name, {})), None
    )
    _refuse(artefact["problems"] if artefact else ["nothing was measured"])
    return "; ".join(_gate.summary(artefact))


def gpu(view: View) -> str:
    rows = []
    for member, result in _sound(view, "__fabric_gpu").items():
        means = [f"{kind} {sum(values) / len(values):.4g}" for kind, values in result.get("series", {}).items() if values]
        rows.append(f"{member}: {', '.join(means)}")
    return "; ".join(rows)


def memory(view: View) -> str:
    """What a serving rank takes: memory available without the group less that with it, both as memory_plan read them."""
    serving, stopped = view.each("__storage_memory", "checkpoint"), view.each("__storage_memory")
    _refuse(["the group did not run when the first figure was read"] if any(result["compared"] for result in serving.values()) else [])
    taken = {member: (stopped[member]["available"] - serving[member]["available"], stopped[member]["need"]) for member in stopped}
    line = "; ".join(f"{member} {used / GIB:.2f} of {need / GIB:.2f} GiB planned" for member, (used, need) in taken.items())
    _refuse([f"a rank takes more than planned: {line}"] if any(used > need for used, need in taken.values()) else [])
    return line


def started(view: View) -> str:
    phases = {result["phase"] for result in view.each("__service_wait").values()}
    _refuse([f"the ranks are {', '.join(sorted(phases))}"] if phases != {"serving"} else [])
    return f"serving on {', '.join(view.plan['cluster']['members'])}"


def figures(view: View) -> str:
    """Medians with their least and most."""
    said = view.head()
    results = [item for name in ("bench_cold", "bench_decode") for item in said.get(name, {}).get("results", [said.get(name, {})])]
    steps = [item["result"] for item in results if "result" in item]
    _refuse([f"{step['name']}: {step['refused']}" for step in steps if step["refused"]] if steps else ["nothing was measured"])
    return "; ".join(f"{step['name']} {step['median']:.4g} tokens/s ({step['least']:.4g} to {step['most']:.4g})" for step in steps)


def rebooted(view: View) -> str:
    last = view.plan["cluster"]["members"][-1]
    said = view.steps[view.step].get(last, {}).get("acceptance_reboot", {})
    _refuse([] if said.get("rebooted") else [f"{last} was not rebooted"])
    return f"{last} was away for {said['elapsed']} s; the group serves again without a command"


def guarded(view: View) -> str:
    members = {member: result["member"] for member, result in view.each("acceptance_status").items()}
    _refuse([f"{member}: {state['guard']['action']}, {state['guard']['reason']}" for member, state in members.items() if state["guard"]])
    return "; ".join(
        f"{member} {state['mem_free_mib'] / 1024:.1f} of {state['mem_total_mib'] / 1024:.1f} GiB free" for member, state in members.items()
    )
