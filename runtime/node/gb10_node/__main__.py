# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Command line of the node services: `python3 gb10_node.pyz rank GROUP`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from gb10_node.config import ConfigError, load
from gb10_node.rank import supervise


def main() -> int:
    """Run the service named on the command line; the exit status is the unit's."""
    parser = argparse.ArgumentParser(prog="gb10_node", description=__doc__)
    services = parser.add_subparsers(dest="service", required=True)
    rank = services.add_parser("rank", help="run this member's rank of GROUP, together with all the others")
    rank.add_argument("group")
    arguments = parser.parse_args()
    try:
        config = load(arguments.group)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 78  # EX_CONFIG: restarting cannot help, the unit lists it in RestartPreventExitStatus
    return asyncio.run(supervise(config))


if __name__ == "__main__":
    sys.exit(main())
