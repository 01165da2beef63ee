# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/tutorial-ring3.md followed by a machine: its commands in their order, with the lab's inventory in the place of ~/ring3, by the collection as its
tarball installs it into an empty place without a network; then playbook acceptance."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _acceptance
from jsonschema import Draft202012Validator
from testinfra.host import Host

from extensions.molecule.tests.lab_hosts import ROOT, as_user

pytestmark = pytest.mark.tutorial

TUTORIAL = (ROOT / "docs/tutorial-ring3.md").read_text()
COMMANDS = re.findall(r"^    (ansible(?:-playbook)? -i ~/ring3 .+)$", TUTORIAL, re.MULTILINE)
SHOWN = re.findall(r"^    - (?:'(group .+)'|(t\d  rank .+))$", TUTORIAL, re.MULTILINE)

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a command where nothing is but the installed collection and the one that it depends on."""
    empty = tmp_path_factory.mktemp("empty")
    collections = empty / "collections/ansible_collections"
    programs = Path(sys.executable).parent
    environment = as_user() | {"ANSIBLE_COLLECTIONS_PATH": str(empty / "collections"), "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(programs / words[0]), *words[1:]], cwd=empty, env=environment, capture_output=True, text=True, timeout=1200, check=False
        )

    subprocess.run([programs / "ansible-galaxy", "collection", "build", "--output-path", empty], cwd=ROOT, check=True, capture_output=True)
    shutil.copytree(ROOT / ".ansible/collections/ansible_collections/ansible/posix", collections / "ansible/posix")
    done = run("ansible-galaxy", "collection", "install", "--offline", str(next(empty.glob("*.tar.gz"))), "-p", str(empty / "collections"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (collections / "gb10/cluster/MANIFEST.json").exists()
    return run


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.partition("~/ring3 ")[2])
def test_a_command_of_the_tutorial_does_what_it_says(command: Command, line: str) -> None:
    words = [str(ROOT / "inventories/lab") if word == "~/ring3" else word for word in shlex.split(line, comments=True)]
    done = command(*words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_last_run_changes_nothing(command: Command) -> None:
    assert COMMANDS[-1].endswith("gb10.cluster.site")
    done = command("ansible-playbook", "-i", str(ROOT / "inventories/lab"), "gb10.cluster.site")
    assert done.returncode == 0, done.stdout[-4000:]
    assert {int(count) for count in re.findall(r"changed=(\d+)", done.stdout)} == {0}


def test_the_status_is_as_shown(command: Command) -> None:
    """But for the free memory, which is this machine's."""
    done = command("ansible-playbook", "-i", str(ROOT / "inventories/lab"), "gb10.cluster.status")
    text = " ".join(done.stdout.split())
    lines = [first or second for first, second in SHOWN]
    assert len(lines) == 4
    assert not [line for line in lines if " ".join(line.split()).partition(", 7.8 of")[0] not in text], done.stdout


def test_acceptance_measures_what_this_machine_has(command: Command, tmp_path: Path, hosts: dict[str, Host]) -> None:
    """A slow probe is left out; nothing here is a claim about Sparks."""
    done = command(
        "ansible-playbook",
        *(
            "-i",
            str(ROOT / "inventories/lab"),
            "gb10.cluster.acceptance",
            "-e",
            f"acceptance_dir={tmp_path}/here",
            "-e",
            "acceptance_allow=stop,reboot",
        ),
        *("-e", "verify_only=health,key,models,chat,logprobs"),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    document = json.loads((tmp_path / "here/acceptance.json").read_text())
    Draft202012Validator(_acceptance.DOCUMENT).validate(document)
    verdicts = {claim["id"]: (claim["verdict"], claim["result"]) for claim in document["claims"]}
    measured = {name for name, (verdict, _result) in verdicts.items() if verdict == "measured"}
    assert measured >= {
        "cabling",
        "legs",
        "checkpoint",
        "image",
        "image-check",
        "answers",
        "environment",
        "gate",
        "start",
        "reboot",
        "guard",
    }
    assert {result for verdict, result in verdicts.values() if verdict == "failed"} == set()
    assert "no RDMA" in verdicts["transport"][1] and "no GPU" in verdicts["kernels"][1] and "load" in verdicts["figures"][1]
    assert (tmp_path / "here.tar.gz").exists()
    key = hosts["t1"].file("/etc/gb10/lab/api-key").content_string.strip()
    assert key
    assert not [path.name for path in (tmp_path / "here").iterdir() if key in path.read_text()]
