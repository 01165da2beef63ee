# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Command line: build what the lab serves and print where it is.

usage: python -m tests.lab.engine image | model [--tiny] | reference [--tiny] [--prompt TEXT]
"""

from __future__ import annotations

import argparse
import sys

from ..progress import LabError
from . import image, model, reference, tiny


def main() -> int:
    """Exit status: 0 done, 1 failed with one sentence on standard error."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.engine", description="build what the lab serves and print where it is")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("image", help="the container image with vLLM for CPUs")
    for name, text in (("model", "a checkpoint and its manifest"), ("reference", "the tokens that one rank alone gives")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--tiny", action="store_true", help=f"the random model {tiny.NAME}, not {model.SMOL}")
        if name == "reference":
            command.add_argument("--prompt", default=reference.PROMPT)
    arguments = parser.parse_args()
    try:
        if arguments.command == "image":
            print(image.engine_image())
            return 0
        checkpoint = model.checkpoint(tiny.NAME if arguments.tiny else model.SMOL)
        print(checkpoint if arguments.command == "model" else reference.reference(checkpoint, arguments.prompt))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
