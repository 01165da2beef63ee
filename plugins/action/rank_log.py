# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of rank_log: shows what a rank logs while it does."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
PAUSE_S = 1.0


class ActionModule(ActionBase):
    """See the module's documentation."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The last lines, and then the new ones for as long as is asked."""
        super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "")
        arguments = dict(self._task.args)
        end = time.monotonic() + float(arguments.get("follow") or 0)
        result: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=task_vars)
        while time.monotonic() < end and not result.get("failed"):
            for line in result["lines"]:
                display.display(f"{host}: {line}")
            time.sleep(PAUSE_S)
            result = self._execute_module(module_args=arguments | {"cursor": result["cursor"]}, task_vars=task_vars)
        return result
