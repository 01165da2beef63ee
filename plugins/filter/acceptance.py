# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the playbook acceptance: which of its steps may run, and all that is sent back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _acceptance
from ansible_collections.gb10.cluster.plugins.plugin_utils import _acceptance_page, _filters, _inputs

if TYPE_CHECKING:
    from collections.abc import Callable


def version() -> str:
    """The collection's, from what an installed one has beside it, or a checkout."""
    installed = _inputs.COLLECTION / "MANIFEST.json"
    if installed.exists():
        return str(json.loads(installed.read_text(encoding="utf-8"))["collection_info"]["version"])
    return str(yaml.safe_load((_inputs.COLLECTION / "galaxy.yml").read_text(encoding="utf-8"))["version"])


@_filters.door
def acceptance_steps(allow: Any, running: bool, serving: bool, check_mode: bool = False) -> list[dict[str, Any]]:
    """See acceptance_steps.yml."""
    return _acceptance.steps(_acceptance.permissions(str(allow)), running, serving, check_mode)


@_filters.door
def acceptance_report(plan: Any, run: Any, secrets: Any = ()) -> dict[str, Any]:
    """See acceptance_report.yml."""
    plan, run = _inputs.plain(plan, "plan"), _inputs.plain(run, "run")
    values = [str(secret) for secret in secrets]
    versions = {"gb10.cluster": version(), **run["versions"]}
    document = _acceptance.document(plan, {**run, "allow": _acceptance.permissions(str(run["allow"])), "versions": versions}, values)
    evidence = _acceptance.evidence(run, values)
    return {
        "document": document,
        "evidence": evidence,
        "lines": _acceptance.lines(document),
        "html": _acceptance_page.html(document, evidence),
    }


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"acceptance_steps": acceptance_steps, "acceptance_report": acceptance_report}
