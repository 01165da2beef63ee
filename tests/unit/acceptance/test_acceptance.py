# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdicts from what members said, what may run, and that no secret leaves. What members say here is synthetic, in the form of the modules' own results."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _acceptance, _claims
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.plugin_utils import _acceptance_page, _inputs
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("t1", "t2", "t3")
SETTINGS = {
    "cluster_name": "lab",
    "cluster_topology": "ring",
    "cluster_profile": "dsv41-exl3-3.5bpw-tp3",
    "cluster_image_archive": "/srv/image.tar",
}
PLAN = _inputs.plan([{"name": name, "address": f"198.51.100.{rank}"} for rank, name in enumerate(NAMES, 1)], SETTINGS)
BARE = _inputs.plan(
    [{"name": name, "address": f"198.51.100.{rank}"} for rank, name in enumerate(NAMES, 1)],
    SETTINGS | {"cluster_devices": [], "cluster_gpu": False},
)
GIB = 2**30
WAY = {
    "name": "all",
    "error": "",
    "rows": [
        {"bytes": 8, "seconds": 3e-5, "bus_gb_per_s": 0.1, "wrong": 0},
        {"bytes": 2**28, "seconds": 0.02, "bus_gb_per_s": 23.2, "wrong": 0},
    ],
}


def said(step: str, member: str) -> dict[str, Any]:
    """What a sound member says in a step."""
    ways = sum(len(leg["peers"]) for leg in PLAN["members"][member]["legs"])
    fabric = {
        "__fabric_legs": {"proven": ways, "problems": []},
        "__fabric_roce": {"problems": [], "hcas": [{"name": f"hca{number}", "verdict": "right", "gid_index": 3} for number in range(4)]},
    }
    check = {"__runtime_check": {"checks": {"kernels": {"result": "ok", "line": "7 checks on the GPU"}}}}
    measured = {"name": "decode 256 x1", "median": 30.0, "least": 29.0, "most": 31.0, "refused": ""}
    head = member == "t1"
    answers: dict[str, dict[str, Any]] = {
        "cabling": {
            "__fabric_preflight": {"problems": [], "platform": {"kernel": "6.17"}},
            "__fabric_cables": {"ports": [{"heard": [1]}] * 4},
        },
        "legs": fabric,
        "checkpoint": {"__storage_state": {"ok": True}, "__storage_memory": {"available": 20 * GIB, "need": 105 * GIB, "compared": False}},
        "image": {"__runtime_state": {"content": "abc" * 10}},
        "check": check,
        "answers": {
            "verify_nccl": {"against": [], "transport": "NET/IB"},
            **(
                {"verify_probe": {"results": [{"name": "chat", "verdict": "passed"}, {"name": "vision", "verdict": "not probed"}]}}
                if head
                else {}
            ),
        },
        "environment": {"acceptance_proof": {"problems": [], "seen": {"image": "sha256:00", "processes": [{}]}}},
        "gate": {"__fabric_gate_measured": {"artefact": {"problems": [], "measurements": [WAY]}} if head else {}},
        "gpu": {"__fabric_gpu": {"problems": [], "series": {"burn": [80.0, 82.0]}}},
        "kernels": check,
        "memory": {"__storage_memory": {"available": 118 * GIB, "need": 105 * GIB, "compared": True}},
        "start": {"__service_wait": {"phase": "serving"}},
        "bench": {"bench_decode": {"results": [{"result": measured}]}} if head else {},
        "reboot": {**fabric, **({"acceptance_reboot": {"rebooted": True, "elapsed": 42}} if member == "t3" else {})},
        "end": {"acceptance_status": {"member": {"guard": None, "mem_free_mib": 2048, "mem_total_mib": 122880}}},
    }
    return answers.get(step, {})


def run(allow: tuple[str, ...] = ("load", "stop", "reboot"), serving: bool = True) -> dict[str, Any]:
    """A whole run on sound members."""
    steps = _acceptance.steps(allow, serving, serving, False)
    members = {
        name: {
            step["name"]: {"seconds": 1.0, "failed": "", "results": copy.deepcopy(said(step["name"], name))}
            for step in steps
            if not step["reason"]
        }
        for name in NAMES
    }
    return {"utc": "2026-11-30T000000Z", "versions": {"ansible-core": "2.21.5"}, "allow": list(allow), "steps": steps, "members": members}


def verdicts(content: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {claim["id"]: (claim["verdict"], claim["result"]) for claim in content["claims"]}


def test_all_is_measured_where_all_is_sound() -> None:
    content = _acceptance.document(PLAN, run())
    Draft202012Validator(_acceptance.DOCUMENT).validate(content)
    found = verdicts(content)
    assert {found[claim.id][0] for claim in _claims.MEASURED} == {"measured"}, found
    assert {found[claim.id] for claim in _claims.BY_HAND} == {("not run", "by hand")}
    assert "23.2 GB/s" in found["bandwidth"][1] and "98.00 of 105.00 GiB" in found["memory"][1] and "42 s" in found["reboot"][1]


FAULTS = [
    ("gids", lambda seen: seen["t2"]["legs"]["results"]["__fabric_roce"]["hcas"][0].update(verdict="empty"), "hca0 is empty"),
    ("legs", lambda seen: seen["t2"]["legs"]["results"]["__fabric_legs"].update(proven=1), "of 12 ways"),
    ("image", lambda seen: seen["t3"]["image"]["results"]["__runtime_state"].update(content="other"), "t3 has other"),
    ("answers", lambda seen: seen["t1"]["answers"]["results"]["verify_probe"]["results"][0].update(verdict="failed"), "failed: chat"),
    (
        "transport",
        lambda seen: [each["answers"]["results"]["verify_nccl"].update(transport="NET/Socket") for each in seen.values()],
        "NET/Socket",
    ),
    (
        "gate",
        lambda seen: seen["t1"]["gate"]["results"]["__fabric_gate_measured"]["artefact"].update(problems=["t2 is slow"]),
        "t2 is slow",
    ),
    ("memory", lambda seen: seen["t2"]["memory"]["results"]["__storage_memory"].update(need=90 * GIB), "more than planned"),
    (
        "figures",
        lambda seen: seen["t1"]["bench"]["results"]["bench_decode"]["results"][0]["result"].update(refused="cut"),
        "decode 256 x1: cut",
    ),
    ("reboot", lambda seen: seen["t3"]["reboot"]["results"].pop("acceptance_reboot"), "was not rebooted"),
    (
        "guard",
        lambda seen: seen["t1"]["end"]["results"]["acceptance_status"]["member"].update(guard={"action": "stopped", "reason": "low"}),
        "t1: stopped, low",
    ),
    (
        "kernels",
        lambda seen: seen["t1"]["kernels"]["results"]["__runtime_check"]["checks"]["kernels"].update(result="FAILED", line="x"),
        "kernels FAILED: x",
    ),
    ("environment", lambda seen: seen["t3"]["environment"].update(failed="the group is gone"), "t3: the group is gone"),
    ("checkpoint", lambda seen: seen.pop("t2"), "the run lost t2"),
    ("start", lambda seen: seen["t2"]["start"]["results"].clear(), "t2 said nothing of it"),
]


@pytest.mark.parametrize(("claim", "break_it", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_fails_its_claim_and_is_named(claim: str, break_it: Any, words: str) -> None:
    broken = run()
    break_it(broken["members"])
    verdict, result = verdicts(_acceptance.document(PLAN, broken))[claim]
    assert verdict == "failed" and words in result


def test_what_an_inventory_lacks_is_not_run_and_says_so() -> None:
    found = verdicts(_acceptance.document(BARE, run()))
    assert found["transport"] == ("not run", "this inventory has no RDMA (cluster_devices is empty)")
    assert found["kernels"] == ("not run", "this inventory has no GPU (cluster_gpu is false)")
    assert found["legs"][0] == "measured"


@pytest.mark.parametrize("allow", [(), ("load",), ("stop",), ("reboot",), ("load", "stop", "reboot")])
def test_nothing_disturbs_a_serving_group_unless_it_is_allowed(allow: tuple[str, ...]) -> None:
    steps = {step["name"]: step["reason"] for step in _acceptance.steps(allow, True, True, False)}
    disturbing = {"stop": ("stop", "gate", "gpu", "kernels", "memory", "start"), "load": ("bench",), "reboot": ("reboot",)}
    for permission, names in disturbing.items():
        for name in names:
            assert (steps[name] == "") == (permission in allow), name
            assert permission in allow or f"add {permission}" in steps[name]
    assert {steps[name] for name in ("cabling", "legs", "checkpoint", "image", "answers", "environment", "end")} == {""}


def test_a_stopped_group_is_measured_and_not_started() -> None:
    steps = {step["name"]: step["reason"] for step in _acceptance.steps([], False, False, False)}
    assert steps["gate"] == "" and steps["start"] == steps["answers"] == "the group does not serve"


def test_a_group_that_loads_counts_as_running() -> None:
    assert {step["reason"] for step in _acceptance.steps([], True, False, False) if step["name"] == "gate"} != {""}


def test_check_mode_measures_nothing() -> None:
    assert all(step["reason"] for step in _acceptance.steps(["load", "stop", "reboot"], True, True, True))


def test_an_unknown_permission_is_refused() -> None:
    assert _acceptance.permissions("load, stop") == ["load", "stop"]
    with pytest.raises(PlanError, match="acceptance_allow has 'everything': name some of load, stop, reboot"):
        _acceptance.permissions("everything")


LEAKS = [
    ({"api_key": "abcdef123"}, "abcdef123"),
    ({"command": ["serve", "--api-key=abcdef123"]}, "abcdef123"),
    ({"line": "started with --api-key abcdef123 on 8000"}, "abcdef123"),
    ({"line": "HF_TOKEN=abcdef123"}, "abcdef123"),
    ({"line": 'said {"password": "abcdef123"}'}, "abcdef123"),
    ({"line": "Authorization: Bearer abcdef123"}, "abcdef123"),
    ({"line": "pulled with hf_abcdefghijkl"}, "hf_abcdefghijkl"),
    ({"line": "https://me:abcdef123@host/x"}, "abcdef123"),
    ({"invocation": {"module_args": {"x": "abcdef123"}}}, "abcdef123"),
]


@pytest.mark.parametrize(("value", "secret"), LEAKS)
def test_secrets_are_taken_out(value: Any, secret: str) -> None:
    assert secret not in json.dumps(_acceptance.scrub(value))


def test_what_is_no_secret_stays() -> None:
    said_ = {"max_tokens": "16", "line": "--max-num-batched-tokens 8192 --tokenizer-mode x NCCL_IB_GID_INDEX=3", "token_ids": [1, 2]}
    assert _acceptance.scrub(said_) == said_


@given(st.text(st.characters(categories=["L", "N"]), min_size=6, max_size=20), st.text(max_size=40), st.text(max_size=40))
def test_a_known_value_is_found_wherever_it_stands(secret: str, before: str, after: str) -> None:
    shown = json.dumps(_acceptance.scrub({"a": [before + secret + after, {"b": secret}]}, [secret]), ensure_ascii=False)
    assert secret not in shown.replace(_acceptance.HIDDEN, "")


def test_a_whole_bundle_has_no_key() -> None:
    leaky = run()
    leaky["members"]["t1"]["environment"]["failed"] = "no answer with verysecretkey"
    leaky["members"]["t1"]["end"]["results"]["acceptance_status"]["member"]["detail"] = "verysecretkey"
    evidence = _acceptance.evidence(leaky, ["verysecretkey"])
    content = _acceptance.document(PLAN, leaky, ["verysecretkey"])
    assert "verysecretkey" not in json.dumps([content, evidence]) + _acceptance_page.html(content, evidence)
    assert evidence["legs"]["t1"]["__fabric_legs"]["problems"] == []


def test_the_page_shows_every_claim_and_escapes_what_members_say() -> None:
    odd = run()
    odd["members"]["t2"]["legs"]["failed"] = "<script>alert(1)</script>"
    content = _acceptance.document(PLAN, odd)
    page = _acceptance_page.html(content, _acceptance.evidence(odd))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert all(f"<th>{claim.id}<" in page for claim in _claims.CLAIMS)
    HTMLParser().feed(page)


def test_the_lines_name_each_claim_that_was_asked() -> None:
    lines = _acceptance.lines(_acceptance.document(PLAN, run()))
    assert len(lines) == len(_claims.MEASURED) + 1
    assert lines[-1].startswith(f"{len(_claims.MEASURED)} measured, 0 failed, ")


def test_claims_and_steps_belong_together() -> None:
    steps = {step.name: step for step in _claims.STEPS}
    ids = [claim.id for claim in _claims.CLAIMS]
    assert len(ids) == len(set(ids))
    assert all(claim.step in steps and claim.read for claim in _claims.MEASURED)
    assert not any(claim.step for claim in _claims.BY_HAND)
    order = list(steps)
    assert order.index("stop") < order.index("gate") < order.index("start") < order.index("bench") < order.index("reboot")


@pytest.mark.parametrize("step", _claims.STEPS, ids=lambda step: step.name)
def test_a_step_includes_what_there_is_and_keeps_what_is_registered(step: _claims.Step) -> None:
    path = ROOT / (f"roles/{step.role}/tasks/{step.tasks}.yml" if step.role else f"playbooks/tasks/{step.file}.yml")
    assert path.exists()
    folder = ROOT / f"roles/{step.role}/tasks" if step.role else ROOT / "playbooks/tasks"
    registered = "\n".join(file.read_text() for file in [*folder.glob("*.yml"), *(ROOT / "roles/fabric/tasks").glob("*.yml")])
    assert all(f"register: {name}\n" in registered for name in step.keep)


@pytest.mark.parametrize("claim", _claims.CLAIMS, ids=lambda claim: claim.id)
def test_a_command_runs_a_playbook_that_there_is(claim: _claims.Claim) -> None:
    name = claim.command.split(" ")[0].rstrip(",")
    if name.startswith("gb10.cluster."):
        assert (ROOT / f"playbooks/{name.removeprefix('gb10.cluster.')}.yml").exists()


def test_no_error_is_ignored() -> None:
    for path in [ROOT / "playbooks/acceptance.yml", *(ROOT / "playbooks/tasks").glob("acceptance_*.yml")]:
        assert "ignore_errors" not in path.read_text()
        assert yaml.safe_load(path.read_text())
