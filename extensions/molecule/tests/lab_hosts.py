# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of all scenarios share: the lab's verbs, and waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def lab(*arguments: str) -> None:
    """A verb of the lab."""
    subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, check=True, timeout=300)


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Return when the condition holds; it may take so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.3)
