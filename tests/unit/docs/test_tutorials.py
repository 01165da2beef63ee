# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands of the tutorials are commands: ansible-playbook takes them, and the variables that they set are read somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _schema
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    path.stem: path.read_text()
    for path in (ROOT / "docs").glob("*.md")
    if path.stem.startswith(("tutorial", "new-profile", "troubleshooting"))
}
WORKFLOW = re.search(r"```yaml\n(.*?)```", PAGES["tutorial-ci"], re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """What follows `ansible-playbook`, and what ansible-runner would put there, in blocks and in code style."""
    lines = re.findall(r"(?:^ {4}|- run: |  run: |`)(ansible-(?:playbook|runner) [^`\n]+)", page, re.MULTILINE)
    found = []
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] == "ansible-runner":
            more = words.index("--cmdline") if "--cmdline" in words else None
            words = [words[words.index("-p") + 1], *(shlex.split(words[more + 1]) if more else [])]
        else:
            words = words[1:]
        found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_ansible_playbook_takes_every_command(page: str) -> None:
    from ansible.cli.playbook import PlaybookCLI

    found = commands(PAGES[page])
    assert found
    text = "\n".join(path.read_text() for folder in ("playbooks", "roles") for path in (ROOT / folder).rglob("*.yml"))
    for words in found:
        cli = PlaybookCLI(["ansible-playbook", *words])
        cli.init_parser()
        options = cli.parser.parse_args(words)
        for playbook in options.args:
            assert (ROOT / f"playbooks/{playbook.removeprefix('gb10.cluster.')}.yml").exists(), words
        for variable in (each.partition("=")[0] for each in options.extra_vars):
            assert variable in _schema.SETTINGS["properties"] or re.search(rf"\b{variable}\b", text), words


def test_the_workflow_is_a_workflow() -> None:
    assert WORKFLOW
    jobs = yaml.safe_load(WORKFLOW[1])["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len([run for run in runs if run.startswith("ansible-playbook ")]) == 5
    assert jobs["deploy"]["needs"] in jobs
    assert all("secrets." not in run for run in runs)


def test_the_profiles_page_lists_what_there_is() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| (\d) \| (\w+) \|$", PAGES["new-profile"], re.MULTILINE)
    listed = {name: (int(members), level) for names, members, level in rows for name in re.findall(r"`([^`]+)`", names)}
    profiles = [_inputs.load_profile(path.stem) for path in _inputs.PROFILES.glob("*.yml")]
    assert listed == {p["name"]: (p["parallelism"]["tensor_parallel_size"], p["status"]["level"]) for p in profiles}
