# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all filters share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ansible.errors import AnsibleFilterError

from ..module_utils._errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable


def door(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a mistake in the input, also a wrong number of arguments, into an error that Ansible shows as one sentence."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (PlanError, TypeError) as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapper
