# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers that an earlier life left, in every state that an engine has, over stand-ins for docker and podman; scenario service has the real podman."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gb10_node import engine
from gb10_node.engine import RankContainer, Stuck

ENGINE = """#!{python}
import pathlib, sys
here, verb = pathlib.Path(__file__).parent, sys.argv[1]
with open(here / "calls", "a") as calls: calls.write(" ".join(sys.argv[1:]) + "\\n")
if (here / "down").exists(): sys.exit("cannot connect")
full = (here / "full").exists()
if full: tries = int((here / "full").read_text() or 99) - 1; (here / "full").write_text(str(tries)); full = tries >= 0
if verb == "rm":
    if full: sys.exit("Error: database or disk is full")
    if "storage" not in (here / "left").read_text() or "--force" in sys.argv: (here / "left").write_text("")
if verb == "ps":
    # A container that only the storage knows is listed with --external alone.
    left = (here / "left").read_text()
    if "storage" not in left or "--external" in sys.argv: print(left.replace(" storage", ""), end="")
if verb == "inspect": print((here / "pid").read_text() if (here / "pid").exists() else "0", "sha256:0")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REMOVE_PAUSE_S", 0.01)
    monkeypatch.setattr(engine, "CLIENT_EXIT_S", 0.2)


def container(root: Path, program: str, left: str, name: str = "gb10-lab") -> RankContainer:
    path = root / program
    path.write_text(ENGINE.format(python=sys.executable))
    path.chmod(0o755)
    (root / "left").write_text(left)
    (root / "proc").mkdir(exist_ok=True)
    config: Any = SimpleNamespace(
        engine=str(path),
        container=SimpleNamespace(name=name),
        procfs=str(root / "proc"),
        stop_s=1,
        start=SimpleNamespace(log_lines={}),
    )
    return RankContainer(config)


def calls(root: Path, verb: str) -> list[str]:
    return [line for line in (root / "calls").read_text().splitlines() if line.split()[0] == verb]


@pytest.mark.parametrize("program", ["docker", "podman"])
@pytest.mark.parametrize("left", ["", "a1 gb10-lab\n", "a1 other,gb10-lab\nb2 gb10-lab-2\n", "a1 gb10-lab-gate\n"])
def test_what_bears_the_name_goes(tmp_path: Path, program: str, left: str) -> None:
    asyncio.run(container(tmp_path, program, left).remove())
    assert len(calls(tmp_path, "rm")) == 1 and calls(tmp_path, "ps")


def test_a_container_that_only_the_storage_knows_goes(tmp_path: Path) -> None:
    asyncio.run(container(tmp_path, "podman", "a1 gb10-lab storage\n").remove())
    assert (tmp_path / "left").read_text() == "" and "--external" in calls(tmp_path, "ps")[0]


def test_a_disk_that_is_full_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("2")
    asyncio.run(container(tmp_path, "podman", "a1 gb10-lab\n").remove())
    assert (tmp_path / "left").read_text() == ""


def test_what_stays_is_one_sentence_with_the_engines_reason(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    with pytest.raises(Stuck) as stuck:
        asyncio.run(container(tmp_path, "podman", "a1 gb10-lab\n").remove())
    assert str(stuck.value).startswith(
        "an earlier container gb10-lab cannot be removed (Error: database or disk is full): see that the disk has room, then run "
    )


def test_an_engine_that_does_not_answer_is_not_taken_for_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "down").touch()
    with pytest.raises(Stuck, match="cannot connect"):
        asyncio.run(container(tmp_path, "docker", "").remove())


def test_what_runs_on_of_a_forgotten_container_is_killed(tmp_path: Path) -> None:
    """As podman's monitor would: named conmon, with its container's process as its child."""
    script = tmp_path / "conmon"
    script.symlink_to(sys.executable)
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    name = f"gb10-stale-{os.getpid()}"  # of no lab that runs on this machine: what bears it is killed
    with subprocess.Popen([str(script), "-c", code, "-n", name, "--more"]) as monitor:
        one = container(tmp_path, "podman", "", name)
        one.config.procfs = "/proc"  # type: ignore[misc]
        while len(found := engine._host.descendants(monitor.pid)) < 2:
            pass
        with subprocess.Popen([str(script), "-c", "import time; time.sleep(60)", "-n", f"{name}-2", "--more"]) as other:
            asyncio.run(one.remove())
            assert monitor.wait(10) == -9 and other.poll() is None
            other.kill()
    assert not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found)


def test_what_the_engine_cannot_stop_is_killed_by_its_number(tmp_path: Path) -> None:
    """podman stops nothing while the disk is full (5.4.2): the process of the rank would go on."""
    (tmp_path / "full").touch()

    async def run() -> tuple[int | None, int | None]:
        one = container(tmp_path, "podman", "a1 gb10-lab\n")
        process = await asyncio.create_subprocess_exec("sleep", "60", stdout=asyncio.subprocess.PIPE)
        client = await asyncio.create_subprocess_exec("sleep", "60", stdout=asyncio.subprocess.PIPE)
        (tmp_path / "pid").write_text(str(process.pid))
        one._process, one._reader = client, asyncio.create_task(one._relay(client))
        await one.stop()
        return await process.wait(), client.returncode

    assert asyncio.run(run()) == (-9, -15)
