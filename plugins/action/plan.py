# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan as a task: a bad inventory or profile is one sentence, not a chain of template errors."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import lookup_loader


class ActionModule(ActionBase):
    """See the module's documentation."""

    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the plan on the controller."""
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(
            {"changes": {"type": "dict", "default": {}}, "of": {"type": "str", "default": ""}}
        )
        lookup = lookup_loader.get("gb10.cluster.plan", loader=self._loader, templar=self._templar)
        try:
            return {"changed": False, "plan": lookup.run([arguments["changes"]], variables=task_vars)[0]}
        except AnsibleError as error:
            return {"failed": True, "msg": f"{arguments['of']}: {error}" if arguments["of"] else str(error)}
