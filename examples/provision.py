#!/usr/bin/env python
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster from a CI job: deployed, probed and, if asked for, measured through ansible-runner, with everything a person needs afterwards in one folder.

    pip install ansible-runner
    examples/provision.py inventory artefacts
    examples/provision.py inventory artefacts --bench -e cluster_allow_disruption=true

Status 0 only where the fabric gate passed, the group serves and every probe of the profile holds. In the folder:

    summary.json     each step with its status, seconds, failures, and the verdict
    plan.json        what was to be
    gate.json        the fabric's last measurement, also one that was refused
    verify.json      every request of the probes with its reply
    bench/           with --bench
    status.json      the state of every member
    evidence/        where something failed: what the members kept of it
    runner/          output and events of each step, as ansible-runner has them

ansible-runner also writes down the variables that it was given and its whole environment, in which a job has its secrets: that stays in a folder that
is gone afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner


@dataclass
class Step:
    """A playbook of the collection, and what its events said."""

    playbook: str
    status: str = "not run"
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Provisioning:
    """Runs the steps in order and collects what they leave."""

    def __init__(self, inventory: Path, folder: Path, settings: dict[str, str]) -> None:
        self.inventory = inventory.resolve()
        self.folder = folder.resolve()
        self.settings = settings
        self.steps: list[Step] = []
        # A folder with results of another run would tell of both.
        self.folder.mkdir(parents=True)

    def run(self, playbook: str, **variables: Any) -> bool:
        """One playbook; true where it ended well."""
        step = Step(playbook)
        self.steps.append(step)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="provision-") as private:
            done = ansible_runner.run(
                private_data_dir=private,
                ident=playbook,
                playbook=f"gb10.cluster.{playbook}",
                inventory=str(self.inventory),
                extravars={**self.settings, **variables},
                event_handler=lambda event: self.follow(step, event),
                quiet=True,
            )
            kept = self.folder / "runner" / f"{len(self.steps)}-{playbook}"
            kept.mkdir(parents=True)
            for name in ("stdout", "job_events"):
                shutil.move(Path(private, "artifacts", playbook, name), kept / name)
        step.status, step.seconds = done.status, round(time.monotonic() - began, 1)
        say(f"{playbook}: {step.status} after {step.seconds:.0f} s")
        return done.status == "successful"

    def follow(self, step: Step, event: dict[str, Any]) -> bool:
        """Show an event where it matters, keep the gate's measurement; true, so that ansible-runner keeps the event as well."""
        kind, data = event["event"], event.get("event_data", {})
        result = data.get("res") or {}
        artefact = result.get("artefact")
        if isinstance(artefact, dict) and "measurements" in artefact:
            write(self.folder / "gate.json", artefact)
        if kind == "playbook_on_play_start":
            say(f"{step.playbook}: {data['name']}")
        elif kind in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            step.failures.append(f"{data['host']}: {data['task']}: {result.get('msg', 'failed')}")
            say(f"{step.playbook}: {step.failures[-1]}")
        return True

    def summary(self, succeeded: bool) -> None:
        """What came of it."""
        write(self.folder / "summary.json", {"succeeded": succeeded, "steps": [asdict(step) for step in self.steps]})


def say(line: str) -> None:
    """A line for the job's log, when it happens."""
    print(line, flush=True)


def write(path: Path, content: Any) -> None:
    """JSON for the next program."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Deploy, prove, measure; on a failure collect the evidence."""
    parser = argparse.ArgumentParser(description="Deploys and proves a cluster of Sparks; every result goes into one folder.")
    parser.add_argument("inventory", type=Path)
    parser.add_argument("artefacts", type=Path)
    parser.add_argument("--bench", action="store_true", help="measure the serving group as well")
    parser.add_argument("-e", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="a variable, as of ansible-playbook")
    options = parser.parse_args(arguments)
    if unclear := [setting for setting in options.settings if "=" not in setting]:
        parser.error(f"-e {unclear[0]} is not NAME=VALUE")
    if options.artefacts.exists():
        parser.error(f"{options.artefacts} exists: name a folder that does not")
    here = Provisioning(options.inventory, options.artefacts, dict(setting.split("=", 1) for setting in options.settings))
    folder = here.folder

    succeeded = (
        here.run("plan", plan_file=str(folder / "plan.json"))
        and here.run("site")
        and here.run("verify", verify_evidence=str(folder / "verify.json"))
        and (not options.bench or here.run("bench", bench_folder=str(folder / "bench")))
    )
    # Without a plan there is no member to ask.
    if (folder / "plan.json").exists():
        here.run("status", status_file=str(folder / "status.json"))
        if not succeeded:
            here.run("evidence", evidence_dir=str(folder / "evidence"))
    here.summary(succeeded)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
