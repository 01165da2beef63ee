# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that the collection's modules declare."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation shared by modules."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return the changes that it would make.
  diff_mode:
    description: Returns what changed, or would change, in C(--diff).
  idempotent:
    description: When run twice in a row without a change between the two, the second run reports no change.
"""

    STATEFUL = r"""
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
"""

    INFO_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module changes nothing.
  diff_mode:
    support: N/A
    details:
      - This module changes nothing.
  idempotent:
    support: full
    details:
      - This module changes nothing.
"""

    JOB = r"""
options:
  wait:
    description: Longest time in seconds after which the module reports back to the controller, which shows the progress and asks again.
    type: float
    default: 5
attributes:
  action:
    support: full
    description: Runs partly on the controller, which shows the progress.
"""

    ENGINE = r"""
options:
  engine:
    description: The container engine.
    type: str
    choices: [docker, podman]
    required: true
"""

    ENDPOINT = r"""
options:
  group:
    description: Name of the group, whose API key is read from C(/etc/gb10/GROUP/api-key).
    type: str
    required: true
  port:
    description: Port of the endpoint.
    type: int
    required: true
  model:
    description: Served model name.
    type: str
    required: true
"""
