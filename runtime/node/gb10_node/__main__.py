# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Command line of the node services: `python3 gb10_node.pyz rank GROUP`."""

from __future__ import annotations

import argparse
import sys

EX_CONFIG = 78
"""Restarting cannot help: the unit lists it in RestartPreventExitStatus."""


def main() -> int:
    """Run the service named on the command line; the exit status is the unit's."""
    parser = argparse.ArgumentParser(prog="gb10_node", description=__doc__)
    services = parser.add_subparsers(dest="service", required=True)
    rank = services.add_parser("rank", help="run this member's rank of GROUP, together with all the others")
    rank.add_argument("group")
    guard = services.add_parser("guard", help="keep this member's free memory above its floors while GROUP starts and serves")
    guard.add_argument("group")
    exporter = services.add_parser("exporter", help="this member's state as Prometheus text, on its management address")
    exporter.add_argument("group")
    arguments = parser.parse_args()
    # Imported where it is used: the guard's memory is measured in MiB, and the supervisor's asyncio alone is half of it.
    if arguments.service == "guard":
        from gb10_node.guard_service import watch

        return watch(arguments.group)
    from gb10_node.config import ConfigError, load

    try:
        config = load(arguments.group)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EX_CONFIG
    if arguments.service == "exporter":
        from gb10_node.exporter import serve

        return serve(config)
    import asyncio

    from gb10_node.rank import supervise

    return asyncio.run(supervise(config))


if __name__ == "__main__":
    sys.exit(main())
