# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real test hosts on one machine: systemd hosts in network namespaces, cabled like a ring of DGX Sparks."""
