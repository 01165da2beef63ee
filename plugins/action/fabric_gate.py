# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of fabric_gate: gives the module the program that runs in the container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

PROGRAM = Path(__file__).resolve().parents[2] / "runtime" / "gate" / "gb10_gate.py"


class ActionModule(ActionBase):
    """See the module's documentation."""

    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module with the program."""
        super().run(tmp, task_vars)
        arguments = {**self._task.args, "program": PROGRAM.read_text(encoding="utf-8")}
        result: dict[str, Any] = self._execute_module(
            module_name="gb10.cluster.fabric_gate", module_args=arguments, task_vars=task_vars or {}, wrap_async=bool(self._task.async_val)
        )
        return result
