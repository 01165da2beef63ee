# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the progress of a long action gets from the worker that runs it to the callback that shows it: a pipe that workers inherit with the fork."""

from __future__ import annotations

import contextlib
import json
import os
import select

from ansible.utils.display import Display

LINE_WIDTH = 160
"""Columns that are shown: progress has to stay one line on a terminal."""
MOST = select.PIPE_BUF
"""Bytes of one message: what several writers can put into a pipe without mixing."""


class _Ends:
    """Reading and writing end; the callback opens them in the main process before any worker is there."""

    reader = writer = -1


def open_channel() -> int:
    """The reading end. Neither end blocks: progress that nobody reads is dropped."""
    _Ends.reader, _Ends.writer = os.pipe()
    os.set_blocking(_Ends.reader, False)
    os.set_blocking(_Ends.writer, False)
    return _Ends.reader


def received(reader: int) -> list[tuple[str, str]]:
    """Messages that wait, as (host, text). Writers are atomic, so each line is whole."""
    content = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reader, 1 << 16):
            content += more
    return [tuple(json.loads(line)) for line in content.splitlines()]


def tell(host: str, seconds: float, text: str) -> None:
    """Show how far a host is: by the callback where it is on, else as a line of its own."""
    if _Ends.writer < 0:
        Display().display(f"  {seconds:5.0f} s  {host}: {text}"[:LINE_WIDTH])
        return
    message = json.dumps([host, text[:LINE_WIDTH]]).encode() + b"\n"
    if len(message) <= MOST:
        with contextlib.suppress(BlockingIOError):
            os.write(_Ends.writer, message)
