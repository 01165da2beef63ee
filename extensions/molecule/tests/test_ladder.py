# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A ladder on the real engine, killed in the middle and run again; then a CI job that deploys what it kept, and one whose fabric gate fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _bench_schema
from jsonschema import Draft202012Validator
from testinfra.host import Host

from extensions.molecule.tests.conftest import Playbook
from extensions.molecule.tests.group_hosts import START_S, all_serve, phase, state
from extensions.molecule.tests.lab_hosts import INVENTORY, ROOT, as_user, kill, playbook_argv, wait_for

pytestmark = pytest.mark.ladder

KEPT = "/var/lib/gb10/ladder/lab.json"
FOLDER = ROOT / "tests" / "output" / "ladder"


def arguments(**options: Any) -> dict[str, Any]:
    """A change of the engine's arguments."""
    return {"cluster_profile_changes": {"engine": {"arguments": {name.replace("_", "-"): value for name, value in options.items()}}}}


# As in the scenario's converge.yml: a prompt of 400 tokens takes seven steps of all ranks, and whole it takes one.
FIRST = arguments(max_num_batched_tokens=64, max_num_seqs=4)
LADDER = FIRST | {
    "ladder_rungs": [
        {"name": "broken", "settings": arguments(kv_cache_dtype="nonsense")},
        {"name": "more-sequences", "settings": arguments(max_num_seqs=8)},
        {"name": "whole-prompts", "settings": arguments(max_num_batched_tokens=512)},
    ],
    "ladder_case": [{"kind": "prefill", "tokens": 400}],
    "ladder_folder": str(FOLDER),
    "verify_only": "health,key,models,chat,logprobs",
}


def tries(hosts: dict[str, Host]) -> list[str]:
    """Names of what was decided, as the head keeps it."""
    said = hosts["t1"].run(f"cat {KEPT}")
    return [each["name"] for each in json.loads(said.stdout)["tries"]] if said.rc == 0 else []


@pytest.fixture(scope="module")
def climbed(playbook: Playbook, hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The ladder's document. Its first run is killed while the second rung starts."""
    rungs = tmp_path_factory.mktemp("ladder") / "rungs.json"
    rungs.write_text(json.dumps(LADDER))
    log = rungs.with_name("killed.log")
    argv = playbook_argv("ladder", "-e", f"@{rungs}")
    with log.open("w") as file, subprocess.Popen(argv, cwd=ROOT, env=as_user(), stdout=file, stderr=file, text=True) as process:
        wait_for(lambda: tries(hosts) == ["first", "broken"] or process.poll() is not None, 3 * START_S)
        wait_for(lambda: phase(hosts["t1"]) in ("starting", "loading") or process.poll() is not None, START_S)
        assert process.poll() is None, log.read_text()[-4000:]
        kill(process)
    done = playbook("ladder", "-e", f"@{rungs}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "run.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "2 of 4 states were tried" in done.stdout and "whose ladder began" in " ".join((done.stdout + done.stderr).split())
    content: dict[str, Any] = json.loads((FOLDER / "ladder.json").read_text())
    return content


def test_it_ends_on_the_best_and_knows_why_the_others_are_not(climbed: dict[str, Any], hosts: dict[str, Host]) -> None:
    Draft202012Validator(_bench_schema.LADDER).validate(climbed)
    verdicts = {each["name"]: each["verdict"] for each in climbed["tries"]}
    assert list(verdicts) == ["first", "broken", "more-sequences", "whole-prompts"]
    assert (verdicts["first"], verdicts["broken"], verdicts["whole-prompts"]) == ("first", "failed", "better")
    # More sequences than there are prompts change nothing that one prompt could show; what else the machine does may.
    assert climbed["tries"][3]["on"] == ("more-sequences" if verdicts["more-sequences"] == "better" else "first")
    assert "kv-cache-dtype" in climbed["tries"][1]["why"] or "nonsense" in climbed["tries"][1]["why"]
    assert "t1.arguments: 64 became 512" in climbed["tries"][3]["differences"]
    assert all_serve(hosts)
    words = state(hosts["t1"]) and hosts["t1"].check_output("podman inspect gb10-lab --format '{{ .Config.Cmd }}'").split()
    assert words[words.index("--max-num-batched-tokens") + 1] == "512"
    assert json.loads(hosts["t1"].check_output(f"cat {KEPT}"))["done"]
    assert not hosts["t1"].check_output("cat /run/gb10/locks/lab.json")


def provision(folder: Path, *settings: str) -> tuple[int, str, dict[str, Any]]:
    """The example as a CI job runs it: exit status, output and summary."""
    command = [sys.executable, "examples/provision.py", INVENTORY, str(folder), *(word for each in settings for word in ("-e", each))]
    more = {
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=ROOT, env=as_user() | more, capture_output=True, text=True, timeout=900, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def keep(climbed: dict[str, Any]) -> str:
    """What the ladder says to put into the inventory, on top of what it began from."""
    kept = yaml.safe_load((FOLDER / "keep.yml").read_text())["cluster_profile_changes"]["engine"]["arguments"]
    first = FIRST["cluster_profile_changes"]["engine"]["arguments"]
    return f"cluster_profile_changes={json.dumps({'engine': {'arguments': {**first, **kept}}})}"


def test_a_job_that_deploys_what_was_kept_restarts_nothing(keep: str, hosts: dict[str, Host], tmp_path: Path) -> None:
    folder = tmp_path / "artefacts"
    began = state(hosts["t1"])["since"]
    status, said, summary = provision(folder, keep, "verify_only=health,key,models,chat,logprobs")
    assert status == 0 and summary["succeeded"], said
    assert [(step["playbook"], step["status"]) for step in summary["steps"]] == [
        (playbook, "successful") for playbook in ("plan", "site", "verify", "status")
    ]
    assert state(hosts["t1"])["since"] == began
    assert {path.name for path in folder.iterdir()} == {"plan.json", "gate.json", "verify.json", "status.json", "runner", "summary.json"}
    assert json.loads((folder / "gate.json").read_text())["problems"] == []
    assert json.loads((folder / "status.json").read_text())["serving"]
    assert hosts["t1"].check_output("cat /etc/gb10/lab/api-key") not in "".join(
        path.read_text() for path in folder.rglob("*") if path.is_file()
    )


def test_a_job_whose_fabric_gate_fails_is_not_0_and_leaves_the_measurement(
    keep: str, playbook: Playbook, hosts: dict[str, Host], tmp_path: Path
) -> None:
    folder = tmp_path / "artefacts"
    assert playbook("stop").returncode == 0
    status, said, summary = provision(folder, keep, "fabric_gate_max_age=0", "fabric_gate_leg_gb_per_s=1000")
    assert status == 1 and not summary["succeeded"], said
    assert [step["status"] for step in summary["steps"][:2]] == ["successful", "failed"] and "verify" not in str(summary["steps"])
    assert "1000" in " ".join(summary["steps"][1]["failures"]), summary
    assert json.loads((folder / "gate.json").read_text())["problems"]
    assert not any(phase(host) == "serving" for host in hosts.values())
