# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Progress of a run, beside whatever stdout callback is chosen."""

from __future__ import annotations

DOCUMENTATION = r"""
name: progress
type: aggregate
short_description: Which host is at which step, how far long work is, and what took longest
version_added: 0.1.0
author: gb10.cluster contributors (!UNKNOWN)
description:
  - On a terminal, lines at the bottom show the running task, for how long it runs, on how many hosts it has ended, and for each host with long work
    (downloads, copies, image builds, a group that starts) how far it is, at what rate, and how long it will take.
  - Elsewhere the same is printed as plain lines, at most one a host in ten seconds.
  - At the end the steps that took longest are listed.
  - Only names of tasks and hosts, and what the actions of this collection say of their own progress, are shown; nothing of a task with C(no_log) but its name.
requirements:
  - enabled by C(callbacks_enabled)
options:
  slowest:
    description: How many of the slowest steps are listed at the end; 0 for none.
    type: int
    default: 8
    env: [{name: GB10_PROGRESS_SLOWEST}]
    ini: [{section: callback_gb10_progress, key: slowest}]
"""

EXAMPLES = r"""
# ansible.cfg, or ANSIBLE_CALLBACKS_ENABLED=gb10.cluster.progress
# [defaults]
# callbacks_enabled = gb10.cluster.progress
"""

import atexit
import os
import shutil
import sys
import threading
import time
from typing import Any, TextIO

from ansible.plugins.callback import CallbackBase
from ansible_collections.gb10.cluster.plugins.module_utils._progress import time_text
from ansible_collections.gb10.cluster.plugins.plugin_utils import _channel

TICK_S = 0.5
QUIET_S = 1.0
"""A task that ends sooner is not shown while it runs: it would only flicker."""
PLAIN_EVERY_S = 10.0
"""Between two plain lines of one host, which a log keeps."""


class Screen:
    """Lines at the bottom of a terminal that give way to all other output, which goes through `Stream`.

    They are written to the file descriptor: Ansible's own lock is held while it writes to a stream, and this class has one of its own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._drawn = 0
        self._at_start = True

    def write(self, stream: TextIO, text: str) -> int:
        """What somebody else prints, above the lines."""
        with self._lock:
            self._erase()
            written = stream.write(text)
            stream.flush()
            if text:
                self._at_start = text.endswith("\n")
        return written

    def draw(self, lines: list[str]) -> None:
        """Show these lines instead of those before; not behind an unfinished line of somebody else."""
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            self._erase()
            if lines and self._at_start:
                self._put("\r\n".join(line[:width] for line in lines))
                self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self._put("\r" + f"\x1b[{self._drawn - 1}A" * (self._drawn > 1) + "\x1b[J")
            self._drawn = 0

    def _put(self, text: str) -> None:
        os.write(self._stream.fileno(), text.encode(errors="replace"))


class Stream:
    """Standard output or error while the screen has lines."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen = screen
        self._stream = stream

    def write(self, text: str) -> int:
        """As of a stream."""
        return self._screen.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CallbackModule(CallbackBase):
    """Keeps what runs since when; a thread shows it."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gb10.cluster.progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps: dict[str, dict[str, Any]] = {}
        self._running: dict[str, dict[str, Any]] = {}
        self._said: dict[str, str] = {}
        self._printed: dict[str, float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._reader = _channel.open_channel()
        self._screen: Screen | None = None
        self._streams = (sys.stdout, sys.stderr)
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._screen = Screen(sys.stdout)
            sys.stdout = Stream(self._screen, sys.stdout)
            if sys.stderr.isatty():
                sys.stderr = Stream(self._screen, sys.stderr)
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """A task begins; only here its name has its variables' values."""
        now = time.monotonic()
        with self._lock:
            self._steps[task._uuid] = {
                "name": task.get_name(),
                "hidden": bool(task.no_log),
                "began": now,
                "ended": now,
                "over": 0,
                "of": 0,
                "last": "",
            }

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """The same."""
        self.v2_playbook_on_task_start(task, is_conditional=False)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """A host begins a task."""
        with self._lock:
            if step := self._steps.get(task._uuid):
                step["of"] += 1
                self._running[host.get_name()] = step
                self._said.pop(host.get_name(), None)

    def v2_runner_on_ok(self, result: Any) -> None:
        """A host has ended a task."""
        now, name = time.monotonic(), result.host.get_name()
        with self._lock:
            step = self._running.pop(name, None)
            self._said.pop(name, None)
            if step:
                step |= {"ended": now, "over": step["over"] + 1, "last": name}

    v2_runner_on_skipped = v2_runner_on_ok
    v2_runner_on_unreachable = v2_runner_on_ok

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """The same."""
        self.v2_runner_on_ok(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The end: what took longest."""
        self._end()
        slowest = sorted(self._steps.values(), key=lambda step: step["began"] - step["ended"])[: max(self.get_option("slowest"), 0)]
        if slowest:
            self._display.banner("SLOWEST STEPS")
        for step in slowest:
            last = f" (last on {step['last']})" if step["of"] > 1 else ""
            self._display.display(f"{step['ended'] - step['began']:8.1f} s  {step['name']}{last}")

    def _show(self) -> None:
        while not self._over.wait(TICK_S):
            self._hear()
            if self._screen:
                self._screen.draw(self._lines())

    def _hear(self) -> None:
        """Take what actions said; without a terminal, print it."""
        for host, text in _channel.received(self._reader):
            with self._lock:
                step = self._running.get(host)
                if step is None or step["hidden"] or self._said.get(host) == text:
                    continue
                self._said[host] = text
                now = time.monotonic()
                due = now - self._printed.get(host, -PLAIN_EVERY_S) >= PLAIN_EVERY_S
            if not self._screen and due:
                self._printed[host] = now
                self._display.display(f"  {now - step['began']:5.0f} s  {host}: {text}"[: _channel.LINE_WIDTH])

    def _lines(self) -> list[str]:
        """A line for each task that runs, and one below it for each host that said how far it is."""
        now, lines = time.monotonic(), []
        with self._lock:
            steps = {id(step): step for step in self._running.values() if now - step["began"] >= QUIET_S}
            for step in steps.values():
                hosts = [host for host, its in self._running.items() if its is step]
                where = f"{step['over']} of {step['of']} hosts, waits for {', '.join(hosts)}" if step["of"] > 1 else hosts[0]
                lines.append(f"{step['name']}  {time_text(now - step['began'])}  {where}")
                lines += [f"  {host}: {self._said[host]}" for host in hosts if host in self._said]
        return lines

    def _end(self) -> None:
        """Give the terminal back."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._hear()
            if self._screen:
                self._screen.draw([])
                sys.stdout, sys.stderr = self._streams
