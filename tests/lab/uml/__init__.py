# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lab hosts with a kernel of their own: User-Mode Linux."""
