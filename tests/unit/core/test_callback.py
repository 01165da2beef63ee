# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees of a run: the callback in real runs of ansible-playbook, into a pipe and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SECRET = "not-for-a-log"
# A copy that is a quarter further each time it is asked, as the collection's own jobs are followed.
MODULE = """\
import json
import pathlib
import time

from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule({"file": {"type": "path"}, "what": {"type": "str"}, "state": {"type": "str"}})
path = pathlib.Path(module.params["file"])
done = int(path.read_text()) + 1 if path.exists() else 0
path.write_text(str(done))
time.sleep(0.9)
progress = {"files": 4, "files_done": done, "bytes": 4 << 30, "bytes_done": done << 30, "rate": float(1 << 30), "seconds_left": 4.0 - done, "current": []}
progress["current"] = [[module.params["what"], 1, 2]]
module.exit_json(changed=False, finished=done == 4, progress=progress)
"""
ACTION = """\
from ansible_collections.gb10.cluster.plugins.plugin_utils._follow import FollowingAction


class ActionModule(FollowingAction):
    pass
"""
TASKS = [
    {"name": "Copy to {{ inventory_hostname }}", "slow_copy": {"file": "{{ playbook_dir }}/{{ inventory_hostname }}", "what": "shard-1"}},
    {"name": "Say it", "ansible.builtin.debug": {"msg": "one\ntwo\nthree"}},
    {"name": "Hidden", "slow_copy": {"file": "{{ playbook_dir }}/hidden-{{ inventory_hostname }}", "what": SECRET}, "no_log": True},
]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A run of three tasks on two hosts."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "slow_copy.py").write_text(MODULE)
    (tmp_path / "action_plugins").mkdir()
    (tmp_path / "action_plugins" / "slow_copy.py").write_text(ACTION)
    hosts = {
        "all": {"hosts": dict.fromkeys(("t1", "t2")), "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts))
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([{"name": "Copies", "hosts": "all", "gather_facts": False, "tasks": TASKS}], sort_keys=False)
    )
    return [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", "play.yml"]


def environment(**more: str) -> dict[str, str]:
    """Without this checkout's own ansible.cfg."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    return clean | {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "100"} | more


def piped(command: list[str], folder: Path, **more: str) -> str:
    """Output of a run into a pipe."""
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "callback" not in done.stderr, done.stderr
    return done.stdout


def on_terminal(command: list[str], folder: Path, **more: str) -> str:
    """All bytes of a run on a terminal of its own."""
    main, side = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment(TERM="xterm", **more), stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        content = b""
        while True:
            try:
                more_bytes = os.read(main, 4096)
            except OSError:  # the other end is closed
                break
            if not more_bytes:
                break
            content += more_bytes
        os.close(main)
    assert process.returncode == 0, content.decode()
    return content.decode()


def screen(content: str) -> list[str]:
    """What such a terminal shows in the end, line by line; it knows the three movements that the callback makes."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", content):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif up := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(up[1])
        elif piece == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        else:
            assert not piece.startswith("\x1b"), piece
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return lines


def test_in_a_pipe_progress_is_plain_lines_and_the_slowest_steps_come_last(command: list[str], tmp_path: Path) -> None:
    said = piped(command, tmp_path, ANSIBLE_CALLBACKS_ENABLED="gb10.cluster.progress", GB10_PROGRESS_SLOWEST="2")
    assert "\x1b" not in said and "\r" not in said and SECRET not in said
    assert re.search(r"^ +\d+ s  t1: 0 of 4 files, 0 bytes of 4.0 GiB \(0 %\), 1.0 GiB/s, 4 s left \| shard-1 50 %$", said, re.MULTILINE), (
        said
    )
    slowest = said.partition("SLOWEST STEPS")[2].splitlines()[1:]
    assert len(slowest) == 2 and all(re.fullmatch(r" +\d+\.\d s  (Copy to t1|Hidden) \(last on t[12]\)", line) for line in slowest), slowest


def test_without_the_callback_progress_is_as_it_was(command: list[str], tmp_path: Path) -> None:
    said = piped(command, tmp_path)
    assert "SLOWEST" not in said and SECRET not in said
    assert len(re.findall(r"^ +\d+ s  t1: \d of 4 files", said, re.MULTILINE)) == 4


def test_a_terminal_shows_what_runs_and_keeps_all_other_output(command: list[str], tmp_path: Path) -> None:
    content = on_terminal(command, tmp_path, ANSIBLE_CALLBACKS_ENABLED="gb10.cluster.progress", GB10_PROGRESS_SLOWEST="0")
    assert re.search(r"Copy to t1  \d s  [01] of 2 hosts, waits for t[12]", content), content
    assert re.search(r"  t2: 2 of 4 files, 2.0 GiB of 4.0 GiB \(50 %\), 1.0 GiB/s, 2 s left", content)
    assert re.search(r"Hidden  \d s  ", content) and SECRET not in content
    for path in tmp_path.glob("*t[12]"):
        path.unlink()
    # When it is over, the screen is as it would be without the callback, but for the order of the hosts.
    plain = [line.rstrip() for line in piped(command, tmp_path).splitlines() if not re.match(r" +\d+ s  t[12]: ", line)]
    shown = [line.rstrip() for line in screen(content)]
    assert sorted(line for line in shown if line) == sorted(line for line in plain if line)
