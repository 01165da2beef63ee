# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A ladder: changes of the plan tried one at a time, each on top of the best so far. What is tried next, what is better, where it ends. No I/O.

The rules: one change at a time, since two at once prove nothing of either; a rung that answers wrongly is no rung, however fast; a difference within
the spread is none (0xBakeer/qwen38-flash-next-spark#6). What was decided is kept, so a ladder that was interrupted goes on where it was and ends where
it would have ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import _bench
from ._changes import settings_with
from ._errors import PlanError

VERSION = 1
FIRST = "first"
"""Name of the state that the inventory describes, below all rungs."""
BETTER, SAME, WORSE, UNMEASURED, FAILED = "better", "same", "worse", "unmeasured", "failed"
KEPT = (FIRST, BETTER)
"""Verdicts after which the next rung is put on top of this one."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
APPLIED = {"cluster": ("name", "topology", "members", "head", "engine"), "fabric": ("legs", "mtu"), "storage": None, "image": None}
"""Parts of a plan that a rung may not change, with the keys that count (None: all): the ladder applies the service alone."""
LEAST_SILENT = "see what the other members say"
"""End of the sentence of a member whose own part was well."""


def rungs_of(value: Any) -> list[dict[str, Any]]:
    """Rungs as they were written, [{name, settings}], or PlanError with what is wrong with one of them."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PlanError("ladder_rungs is no list with a rung in it: write at least one, with `name` and `settings`")
    rungs: list[dict[str, Any]] = []
    for place, rung in enumerate(value, 1):
        if not isinstance(rung, Mapping) or set(rung) != {"name", "settings"} or not isinstance(rung["settings"], Mapping):
            raise PlanError(
                f"rung {place} of ladder_rungs is not {{name, settings}}: give it a name and the settings (cluster_*) that it changes"
            )
        name = str(rung["name"])
        if not NAME.fullmatch(name) or name == FIRST:
            raise PlanError(
                f"rung {place} of ladder_rungs is called {name!r}: use lower-case letters, digits, dot, dash, and not {FIRST!r}"
            )
        for other in rungs:
            if name == other["name"]:
                raise PlanError(f"two rungs of ladder_rungs are called {name}: rename one")
            if rung["settings"] == other["settings"]:
                raise PlanError(f"rungs {other['name']} and {name} of ladder_rungs are the same change: remove one")
        rungs.append({"name": name, "settings": dict(rung["settings"])})
    return rungs


def check_plans(first: Mapping[str, Any], plans: Mapping[str, Mapping[str, Any]]) -> None:
    """PlanError where a rung, alone on the first state, changes nothing or more than the service. `plans` by rung's name."""
    for name, plan in plans.items():
        for part, keys in APPLIED.items():
            for key in keys or first[part]:
                if first[part].get(key) != plan[part].get(key):
                    raise PlanError(
                        f"rung {name} changes {part}.{key} of the plan, and a ladder applies the service alone: change the inventory, "
                        "run gb10.cluster.site, and begin the ladder from there"
                    )
        if plan["cluster"]["digest"] == first["cluster"]["digest"]:
            raise PlanError(f"rung {name} changes nothing of what runs: remove it, or correct its settings")


def begin(utc: str, plan: Mapping[str, Any], rungs: Sequence[Mapping[str, Any]], case: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A ladder of which nothing was tried. `case`: the bench steps; the first is the goal, the others must not get slower."""
    for step in case:
        try:
            _bench.step_of(step)
        except (TypeError, ValueError) as error:
            raise PlanError(f"ladder_case: {error}") from None
    if not case:
        raise PlanError("ladder_case is empty: name at least one step that gb10.cluster.bench measures")
    return {
        "version": VERSION,
        "utc": utc,
        "group": plan["service"]["group"],
        "model": plan["service"]["served_model_name"],
        "digest": plan["cluster"]["digest"],
        "case": [dict(step) for step in case],
        "rungs": [dict(rung) for rung in rungs],
        "tries": [],
        "done": False,
    }


def resumed(kept: Mapping[str, Any] | None, fresh: Mapping[str, Any], again: bool) -> dict[str, Any]:
    """The ladder to go on with: the kept one where it was not finished. PlanError where that is another one."""
    if not kept or kept.get("version") != VERSION or kept["done"] or again:
        return dict(fresh)
    for part, what in (("digest", "starts from another plan"), ("rungs", "has other rungs"), ("case", "measures something else")):
        if kept[part] != fresh[part]:
            raise PlanError(
                f"the ladder of {kept['utc']} was not finished and {what}: run that one to its end, or leave it with -e ladder_again=true"
            )
    return dict(kept)


def base(ladder: Mapping[str, Any]) -> dict[str, Any]:
    """The best so far: its name and its settings on top of the inventory's."""
    kept = [each for each in ladder["tries"] if each["verdict"] in KEPT]
    return {"name": kept[-1]["name"], "settings": kept[-1]["settings"]} if kept else {"name": FIRST, "settings": {}}


def turn(ladder: Mapping[str, Any], place: int) -> dict[str, Any]:
    """What is done at a place (0: the first state itself): {due, name, settings, base}. `due` is false where it was done before."""
    below = base(ladder)
    rung = {"name": FIRST, "settings": {}} if place == 0 else ladder["rungs"][place - 1]
    return {
        "due": place >= len(ladder["tries"]),
        "name": rung["name"],
        "settings": settings_with(below["settings"], rung["settings"]),
        "base": below,
    }


def tried(ladder: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The ladder with what its next try gave: {digest, provenance, steps}, or {failed: sentences} where it did not start or answered wrongly."""
    place = len(ladder["tries"])
    now = turn(ladder, place)
    each: dict[str, Any] = {"name": now["name"], "on": now["base"]["name"], "settings": now["settings"]}
    each |= {"verdict": FIRST, "why": "", "digest": "", "differences": [], "steps": [], "provenance": {}}
    if outcome.get("failed"):
        return _with(ladder, each | {"verdict": FAILED, "why": cause(outcome["failed"])})
    each |= {key: outcome[key] for key in ("digest", "steps", "provenance")}
    if place == 0:
        refused = [step["refused"] for step in each["steps"] if step["refused"]]
        if refused:
            raise PlanError(f"there is nothing to compare with, the first state has no figure: {refused[0]}")
        return _with(ladder, each)
    below = next(other for other in reversed(ladder["tries"]) if other["verdict"] in KEPT)
    said = _bench.compare({**below, "settings": {}}, {**each, "settings": {}})
    verdict, why = judged(said["steps"])
    return _with(ladder, each | {"verdict": verdict, "why": why, "differences": said["differences"]})


def _with(ladder: Mapping[str, Any], each: Mapping[str, Any]) -> dict[str, Any]:
    return {**ladder, "tries": [*ladder["tries"], dict(each)]}


def judged(steps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Verdict and reason of steps as `_bench.compare` gives them: better is a faster first step beyond both spreads, with no other one slower."""
    for step in steps:
        if "ratio" not in step:
            return UNMEASURED, f"{step['name']}: {step['verdict']}"
    for step in steps:
        if step["verdict"] == "slower":
            return WORSE, f"{_change(step)}, slower"
    return (BETTER if steps[0]["verdict"] == "faster" else SAME), f"{_change(steps[0])}, {steps[0]['verdict']}"


def _change(step: Mapping[str, Any]) -> str:
    return f"{step['name']} {step['before']:.4g} to {step['after']:.4g} ({step['ratio'] - 1:+.1%})"


def cause(sentences: Sequence[Any]) -> str:
    """Of what each member said of a failure, the one that tells most: not that another one failed, and the first line of it."""
    flat = [str(item[0] if isinstance(item, list) and item else item) for item in sentences if item]
    telling = [sentence for sentence in flat if LEAST_SILENT not in sentence]
    return (telling or flat or ["no reason was given"])[0]


def table(ladder: Mapping[str, Any]) -> list[str]:
    """The ladder for a terminal: a line for each try, what differs below it, and where it ends."""
    goal = _bench.step_of(ladder["case"][0]).name
    lines = [f"{ladder['model']}, ladder of {ladder['utc']}, tokens per second of {goal}"]
    width = max(len(each["name"]) for each in [{"name": FIRST}, *ladder["rungs"]])
    for each in ladder["tries"]:
        figure = next((step["median"] for step in each["steps"] if step["median"] is not None), None)
        spread = "" if figure is None else f"[{each['steps'][0]['least']:.4g} to {each['steps'][0]['most']:.4g}]"
        shown = "-" if figure is None else f"{figure:.4g}"
        lines.append(f"{each['name']:<{width}}  {each['verdict']:<10}  {shown:>7}  {spread}  {each['why']}".rstrip())
        lines += [f"{'':<{width}}    {difference}" for difference in gathered(each["differences"])]
    end = base(ladder)["name"]
    lines.append(f"the best is {end}" if end != FIRST else "no rung is better: it stays as the inventory says")
    return lines


def gathered(differences: Sequence[str]) -> list[str]:
    """Differences (`member.what: …`) with those that members share said once."""
    members: dict[str, list[str]] = {}
    for difference in differences:
        member, _dot, what = difference.partition(".")
        members.setdefault(what, []).append(member)
    return [f"{', '.join(names)}: {what}" for what, names in members.items()]
