# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Services that run on a member, outside the container. Standard library only; packed into one file by the service role."""
