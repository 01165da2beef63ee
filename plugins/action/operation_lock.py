# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of operation_lock: who asks, and whether the run that holds the lock is still there when it was one of this controller."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def is_gone(pid: int) -> bool:
    """Whether no process has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class ActionModule(ActionBase):
    """See the module's documentation."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask; where an earlier run of this controller holds the lock and is gone, say so and ask again."""
        super().run(tmp, task_vars)
        # Actions run in a child of the run's own process.
        own = {
            "who": f"{getpass.getuser()}@{socket.gethostname()}",
            "boot": BOOT_ID.read_text() if BOOT_ID.exists() else "",
            "pid": os.getppid(),
        }
        arguments = {**self._task.args, **own}
        result: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=task_vars)
        owner = (result.get("lock") or {}).get("owner", {})
        if result.get("failed") and (owner.get("who"), owner.get("boot")) == (own["who"], own["boot"]) and is_gone(owner["pid"]):
            result = self._execute_module(module_args={**arguments, "gone": owner["pid"]}, task_vars=task_vars)
        if result.get("took_over"):
            display.warning(result["took_over"])
        return result
