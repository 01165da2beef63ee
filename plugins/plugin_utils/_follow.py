# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of a module that begins a job on the member: asks again and again, and shows how far it is."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.gb10.cluster.plugins.module_utils import _progress
from ansible_collections.gb10.cluster.plugins.plugin_utils import _channel

PATIENCE_S = 60
"""For a connection that is lost; the job goes on without it."""
RETRY_S = 3


class FollowingAction(ActionBase):
    """Runs the module of the task until its job has ended. An action plugin derives from it and is named like the module."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's last answer."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        begin, shown = time.monotonic(), ""
        result = self._ask(arguments, task_vars or {})
        while not (result.get("failed") or result.get("finished", True) or arguments.get("state") == "started"):
            line = _progress.line(result.get("progress", {}))
            if line != shown and not self._task.no_log:
                _channel.tell((task_vars or {}).get("inventory_hostname", ""), time.monotonic() - begin, line)
                shown = line
            arguments["state"] = "awaited"  # a job that ends in between is not begun again
            result = self._ask(arguments, task_vars or {})
        return result

    def _ask(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """One answer, across a connection that is lost for a moment."""
        lost = None
        while True:
            try:
                result: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=task_vars)
                return result
            except AnsibleConnectionFailure:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > PATIENCE_S:
                    raise
                time.sleep(RETRY_S)
