# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller's side of image_build: shows that its job goes on."""

from __future__ import annotations

from ansible_collections.gb10.cluster.plugins.plugin_utils._follow import FollowingAction


class ActionModule(FollowingAction):
    """See the module's documentation."""
