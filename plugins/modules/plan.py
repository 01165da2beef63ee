#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action plan, which runs on the controller alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Make the plan of the cluster, without touching a host
version_added: 0.1.0
description:
  - Makes the plan from inventory and profile, as the lookup P(gb10.cluster.plan#lookup) does. As a task it fails with one sentence where the inventory or the
    profile is wrong.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
attributes:
  action:
    support: full
    description: Runs on the controller.
options:
  changes:
    description: Settings (C(cluster_*)) that are to hold in place of the inventory's; C(cluster_profile_changes) adds to what is there.
    type: dict
    default: {}
  of:
    description: What is planned, for a message that says where a mistake is; empty for the inventory as it is.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Make the plan
  gb10.cluster.plan:

- name: Make the plan of another port
  gb10.cluster.plan:
    changes: {cluster_api_port: 8001}
    of: the second port
"""

RETURN = r"""
plan:
  description: The plan.
  returned: success
  type: dict
"""
