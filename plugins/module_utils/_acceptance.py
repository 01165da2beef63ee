# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Acceptance: which steps may run, and a verdict for each claim from what they saw. The document is what is sent back; no secret is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import _claims, _proof
from ._claims import ALWAYS, AROUND, LOAD, REBOOT, STOPPED, Claim, Step
from ._errors import PlanError
from ._readings import View, Wrong
from ._schema import TEXT, Schema, _list, _map, _object

VERSION = 1
MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"
PERMISSIONS = {
    "load": "requests that slow others down",
    "stop": "stopping the group and starting it again",
    "reboot": "a reboot of the last member",
}
"""What a person may allow (acceptance_allow); nothing that disturbs a serving group is done without."""

_NOISE = frozenset({"invocation", "diff", "ansible_facts", "ansible_job_id", "results_file", "_ansible_no_log", "warnings", "deprecations"})
_COUNTS = re.compile(r"TOKENS|TOKENI[SZ]ER|KEYS")
"""Words in names that hold a secret's word and are none: counts of tokens, a tokenizer."""
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|nvapi-)[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )\S+|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)")
"""Tokens that are known by their beginning, and a user with a password in a URL."""
_SETTING = re.compile(r"""(?:(--[a-z][a-z0-9-]*)|\b([A-Za-z][A-Za-z0-9_-]*))((?(1)[ =]|["']?\s*[:=]\s*["']?))([^\s"',}]+)""")
"""`--name value`, `NAME=value`, `"name": "value"`."""
HIDDEN = "(removed)"
SHORTEST_SECRET = 6
"""A shorter value would be found in ordinary words."""


def permissions(text: str) -> list[str]:
    """The words of acceptance_allow; PlanError with one sentence for one that there is none of."""
    words = [word for word in re.split(r"[,\s]+", text) if word]
    unknown = [word for word in words if word not in PERMISSIONS]
    if unknown:
        raise PlanError(f"acceptance_allow has {unknown[0]!r}: name some of {', '.join(PERMISSIONS)}")
    return words


def steps(allow: Sequence[str], running: bool, serving: bool, check_mode: bool) -> list[dict[str, Any]]:
    """The steps in their order; `reason` says why one does not run, empty where it does. `running`: some rank is up; `serving`: all answer."""

    def reason(step: Step) -> str:
        if check_mode:
            return "check mode measures nothing"
        if step.when != ALWAYS and step.when != STOPPED and not serving:
            return "the group does not serve"
        needed = {STOPPED: "stop" if running else "", AROUND: "stop", LOAD: "load", REBOOT: "reboot"}.get(step.when, "")
        return f"it takes {PERMISSIONS[needed]}: add {needed} to acceptance_allow" if needed and needed not in allow else ""

    return [
        {"name": step.name, "reason": reason(step), "keep": list(step.keep), "role": step.role, "tasks": step.tasks, "file": step.file}
        for step in _claims.STEPS
    ]


def document(plan: Mapping[str, Any], run: Mapping[str, Any], secrets: Sequence[str] = ()) -> dict[str, Any]:
    """All claims with their verdicts.

    `run`: `utc`, `versions` (by name), `allow`, `steps` as above, and `members`: by member and step the `seconds`, `failed` (a sentence, empty for
    none) and `results`. A member that the run lost is absent. `secrets`: values that must not be in the document, whatever shows them.
    """
    members = plan["cluster"]["members"]
    by_step = {
        step["name"]: {member: run["members"][member][step["name"]] for member in members if step["name"] in run["members"].get(member, {})}
        for step in run["steps"]
    }
    results = {step: {member: seen["results"] for member, seen in said.items()} for step, said in by_step.items()}
    reasons = {step["name"]: step["reason"] for step in run["steps"]}

    def claim(one: Claim) -> dict[str, Any]:
        verdict, result = _judge(one, plan, by_step, results, reasons)
        return {"id": one.id, "statement": one.statement, "command": one.command, "see": one.see, "verdict": verdict, "result": result}

    return scrub(
        {
            "version": VERSION,
            "utc": run["utc"],
            "group": plan["cluster"]["name"],
            "profile": plan["cluster"]["profile"],
            "topology": plan["cluster"]["topology"],
            "members": list(members),
            "allowed": list(run["allow"]),
            "versions": dict(run["versions"]),
            "platform": {
                member: {
                    name: value
                    for name, value in said.get("__fabric_preflight", {}).get("platform", {}).items()
                    if value and name != "cmdline"
                }
                for member, said in results["cabling"].items()
            },
            "steps": [
                {
                    "name": name,
                    "seconds": max((round(float(seen["seconds"]), 1) for seen in said.values()), default=0.0),
                    "failed": {member: seen["failed"] for member, seen in said.items() if seen["failed"]},
                    "reason": reasons[name],
                }
                for name, said in by_step.items()
            ],
            "claims": [claim(one) for one in _claims.CLAIMS],
        },
        secrets,
    )


def _judge(
    claim: Claim, plan: Mapping[str, Any], by_step: Mapping[str, Any], results: Mapping[str, Any], reasons: Mapping[str, str]
) -> tuple[str, str]:
    """Verdict and what goes with it: the figures, the fault, or why it was not run."""
    if not claim.step or claim.read is None:
        return NOT_RUN, "by hand"
    for need in claim.needs:
        holds, otherwise = _claims.NEEDS[need]
        if not holds(plan):
            return NOT_RUN, otherwise
    if reasons[claim.step]:
        return NOT_RUN, reasons[claim.step]
    said = by_step[claim.step]
    failed = _by_sentence({member: seen["failed"] for member, seen in said.items() if seen["failed"]})
    lost = [member for member in plan["cluster"]["members"] if member not in said]
    if failed:
        return FAILED, failed
    if lost:
        return FAILED, f"the run lost {', '.join(lost)}: see that they answer, and run it again"
    try:
        return MEASURED, claim.read(View(plan, results, claim.step))
    except Wrong as wrong:
        return FAILED, str(wrong)


def _by_sentence(failed: Mapping[str, str]) -> str:
    """What failed, with the members of which it is true."""
    return "; ".join(f"{', '.join(name for name in failed if failed[name] == said)}: {said}" for said in dict.fromkeys(failed.values()))


def evidence(run: Mapping[str, Any], secrets: Sequence[str] = ()) -> dict[str, Any]:
    """What each module said, by step and member, without what Ansible adds and without secrets."""
    return {
        step["name"]: {
            member: scrub(said[step["name"]]["results"], secrets) for member, said in run["members"].items() if step["name"] in said
        }
        for step in run["steps"]
        if not step["reason"]
    }


def scrub(value: Any, secrets: Sequence[str] = ()) -> Any:
    """The same without secrets: values of variables that are called like one, tokens that look like one, and the given values wherever they stand."""
    known = [secret for secret in secrets if len(secret) >= SHORTEST_SECRET]

    def walk(inner: Any) -> Any:
        if isinstance(inner, str):
            return _hide(str(inner), known)
        if isinstance(inner, Mapping):
            return {
                str(key): HIDDEN if isinstance(content, str) and content and _hides(str(key)) else walk(content)
                for key, content in inner.items()
                if key not in _NOISE
            }
        return [walk(each) for each in inner] if isinstance(inner, (list, tuple)) else inner

    return walk(value)


def _hides(name: str) -> bool:
    return _proof.is_secret(_COUNTS.sub("", name.upper()))


def _hide(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _SETTING.sub(lambda found: f"{found[1] or found[2]}{found[3]}{HIDDEN}" if _hides(found[1] or found[2]) else found[0], text)
    return _TOKEN.sub(HIDDEN, text)


def lines(content: Mapping[str, Any]) -> list[str]:
    """For a terminal: a line per claim that the playbook could measure, then how many are left to hands."""
    shown = [claim for claim in content["claims"] if claim["result"] != "by hand"]
    width = max(len(claim["id"]) for claim in shown)
    counts = ", ".join(
        f"{sum(claim['verdict'] == verdict for claim in content['claims'])} {verdict}" for verdict in (MEASURED, FAILED, NOT_RUN)
    )
    return [
        *(f"{claim['id']:<{width}}  {claim['verdict']:<8}  {claim['result']}" for claim in shown),
        f"{counts}; {len(content['claims']) - len(shown)} of these are proven by hand (docs/on-real-sparks.md)",
    ]


SENTENCE: Schema = {"type": "string"}
DOCUMENT = _object(
    {
        "version": {"const": VERSION},
        "utc": TEXT,
        "group": TEXT,
        "profile": TEXT,
        "topology": TEXT,
        "members": _list(TEXT, minItems=1),
        "allowed": _list({"enum": list(PERMISSIONS)}),
        "versions": _map(TEXT, TEXT),
        "platform": {"type": "object", "additionalProperties": {"type": "object"}},
        "steps": _list(
            _object({"name": TEXT, "seconds": {"type": "number", "minimum": 0}, "failed": _map(TEXT, TEXT), "reason": SENTENCE})
        ),
        "claims": _list(
            _object(
                {
                    "id": TEXT,
                    "statement": TEXT,
                    "command": TEXT,
                    "see": TEXT,
                    "verdict": {"enum": [MEASURED, FAILED, NOT_RUN]},
                    "result": TEXT,
                }
            ),
            minItems=1,
        ),
    }
)
"""JSON schema (2020-12) of the document."""
