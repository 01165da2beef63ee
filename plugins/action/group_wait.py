# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of group_wait: asks the member again and again, and shows what it answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible_collections.gb10.cluster.plugins.plugin_utils import _channel


class ActionModule(ActionBase):
    """See the module's documentation.

    A rank that is not running at all tells no other, which would wait for it until the time is over. So a wait that failed leaves word to those of the
    same task, in the folder that the workers of one run share.
    """

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module until it has an answer or the time is over."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        host = task_vars.get("inventory_hostname", "")
        if self._task.check_mode:
            return {"changed": False, "skipped": True, "msg": "nothing is started in check mode"}
        begin, shown = time.monotonic(), ""
        word = Path(constants.DEFAULT_LOCAL_TMP) / f"group_wait-{self._task._uuid}"
        while True:
            arguments = self._task.args | {"waited": time.monotonic() - begin}
            result: dict[str, Any] = self._execute_module(module_name="gb10.cluster.group_wait", module_args=arguments, task_vars=task_vars)
            waited = time.monotonic() - begin
            if result.get("failed"):
                word.write_text(f"{host}: {result.get('msg', '')}", encoding="utf-8")
                return result
            if result.get("phase") == "serving":
                return result
            if word.exists() and (said := word.read_text(encoding="utf-8")):
                return result | {"failed": True, "msg": said, "log": []}
            what = f"{result['phase']}{': ' if result['detail'] else ''}{result['detail']}"
            if waited > float(self._task.args.get("timeout", 1800)):
                return result | {
                    "failed": True,
                    "msg": f"the group did not serve within {waited:.0f} s; {host} is {what}: see the playbook gb10.cluster.logs",
                }
            line = f"{what} | {result['line'].splitlines()[-1] if result['line'] else ''}"
            if line != shown and not self._task.no_log:
                _channel.tell(host, waited, line)
                shown = line
