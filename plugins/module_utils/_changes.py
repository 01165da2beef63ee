# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A profile with changes: a mapping is merged key by key, null takes a key away, anything else takes its place (JSON merge patch, RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHANGES = "cluster_profile_changes"


def changed(document: Any, changes: Any) -> Any:
    """What the changes make of a document, which is left as it is."""
    if not isinstance(changes, Mapping):
        return changes
    result = dict(document) if isinstance(document, Mapping) else {}
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = changed(result.get(key), value)
    return result


def composed(first: Any, then: Any) -> Any:
    """Changes that do what both do, one after the other. A key that `first` takes away and `then` makes a mapping again is changed, not made anew."""
    if not (isinstance(first, Mapping) and isinstance(then, Mapping)):
        return then
    return {**first, **{key: composed(first.get(key), value) for key, value in then.items()}}


def settings_with(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings (`cluster_*`) with others in their place; changes of the profile add to those that are there."""
    result = {**settings, **changes}
    if settings.get(CHANGES) and changes.get(CHANGES):
        # What is no mapping stays, and is refused as a setting.
        result[CHANGES] = composed(settings[CHANGES], changes[CHANGES]) if isinstance(settings[CHANGES], Mapping) else settings[CHANGES]
    return result
