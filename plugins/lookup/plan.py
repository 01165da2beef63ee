# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup gb10.cluster.plan: the inventory's own plan."""

from __future__ import annotations

DOCUMENTATION = r"""
name: plan
short_description: The plan of this inventory's cluster
version_added: 0.1.0
author: gb10.cluster contributors (!UNKNOWN)
description:
  - Reads the members from the group C(sparks), the settings from the C(cluster_*) variables and the profile that they name,
    checks them all and returns the plan, the document that every role of this collection works from.
  - No host is contacted. C(--limit) does not change the plan, since it is read from the whole group.
  - Settings are read where the lookup is used, and from the members' own variables where they are not visible there, so that
    a play on C(localhost) gets the same plan. They must agree over all members, except for C(cluster_address) and
    C(cluster_management_interface), which are each host's own.
options:
  _terms:
    description:
      - Settings (C(cluster_*)) that are to hold in place of the inventory's, one mapping at most. C(cluster_profile_changes) adds to what is there.
    type: list
    elements: dict
notes:
  - A profile given as a path is found relative to the inventory's folder.
seealso:
  - plugin: gb10.cluster.plan
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show where the service will be
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.plan').service.url }}"

- name: Show what another setting would make of it
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.plan', {'cluster_api_port': 8001}).service.url }}"

- name: Use this host's part of the plan
  ansible.builtin.debug:
    msg: "{{ lookup('gb10.cluster.plan').members[inventory_hostname].legs | map(attribute='address') }}"
"""

RETURN = r"""
_raw:
  description:
    - One plan, with the keys C(version), C(cluster), C(fabric), C(storage), C(image), C(service) and C(members).
    - Its form is the schema C(PLAN) in this collection's C(plugins/module_utils/_schema.py).
  type: list
  elements: dict
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.gb10.cluster.plugins.module_utils._changes import settings_with
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.module_utils._schema import SETTINGS
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = "sparks"
# Each host's own; and the name under which plays keep the plan itself.
PER_HOST = {"cluster_address", "cluster_management_interface"}
NOT_SETTINGS = PER_HOST | {"cluster_plan"}
KNOWN = set(SETTINGS["properties"]) - PER_HOST


class LookupModule(LookupBase):
    """Collects what the inventory says and hands it to the core.

    A task's arguments and conditions name parts of the plan many times over, each time by this lookup. What all members' variables say is then read
    once: it is kept for as long as the variables are the same object, as they are for all that one worker renders of its task.
    """

    _said: ClassVar[tuple[Any, dict[str, Any], list[dict[str, Any]], str]] = (None, {}, [], "")

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        try:
            if kwargs or len(terms) > 1 or not all(isinstance(term, Mapping) for term in terms):
                raise PlanError("lookup gb10.cluster.plan takes one mapping of settings at most: the inventory says everything else")
            return [self._plan(variables or {}, *terms)]
        except PlanError as error:
            raise AnsibleLookupError(str(error)) from error

    def _plan(self, variables: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._said[0] is not variables:
            LookupModule._said = (variables, *_inventory(variables))
        _variables, common, members, base = self._said
        settings = settings_with({**common, **self._visible_settings(variables)}, _inputs.plain(changes or {}, "settings"))
        return _inputs.plan(members, settings, base=base)

    def _visible_settings(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the task itself sees, which play or extra variables may have changed."""
        return {key: _typed(key, self._templar.template(variables[key])) if key in KNOWN else None for key in _setting_names(variables)}


def _inventory(variables: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The settings that the members agree upon, the members, and the inventory's folder."""
    names = list(variables.get("groups", {}).get(GROUP, []))
    if not names:
        raise PlanError(f"inventory: group {GROUP} has no hosts: list the members in it, the head first")
    hosts = [variables["hostvars"][name] for name in names]
    members = [_member(name, host) for name, host in zip(names, hosts, strict=True)]
    return _common_settings(names, hosts), members, hosts[0].get("inventory_dir") or "."


def _typed(key: str, value: Any) -> Any:
    """`-e KEY=VALUE` gives text, whatever the setting is: read it as YAML where text cannot be meant."""
    kinds = SETTINGS["properties"][key].get("type", "string")
    if not isinstance(value, str) or "string" in kinds:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _setting_names(variables: Mapping[str, Any]) -> list[str]:
    return [key for key in variables if key.startswith("cluster_") and key not in NOT_SETTINGS]


def _common_settings(names: Sequence[str], hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The members' settings, which must be the same for all. The value of an unknown one is left alone, its name is the mistake."""
    settings: dict[str, Any] = {}
    for key in sorted({key for host in hosts for key in _setting_names(host)}):
        values = [_inputs.plain(host.get(key), key) if key in KNOWN else None for host in hosts]
        for name, value in zip(names, values, strict=True):
            if value != values[0]:
                raise PlanError(
                    f"inventory: {key} is {values[0]!r} for {names[0]}, but {value!r} for {name}: "
                    f"set it once, in the group variables of {GROUP}"
                )
        settings[key] = values[0]
    return settings


def _member(name: str, host: Mapping[str, Any]) -> dict[str, Any]:
    """A member as the core takes it."""
    member = {"name": name, "address": host.get("cluster_address") or host.get("ansible_host") or name}
    if "cluster_management_interface" in host:
        member["interface"] = host["cluster_management_interface"]
    return member
