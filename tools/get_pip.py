# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in for get-pip.py that needs no server but the package index: see tools/sanity, which puts it where it is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

GET_PIP_ONLY = {"--no-setuptools", "--no-wheel"}

# ansible-test keeps PIP_* variables (an index, a certificate) from its pip; as a file of the environment they reach it.
shutil.copy(Path(__file__).with_name("pip.conf"), sys.prefix)
subprocess.check_call([sys.executable, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
arguments = [argument for argument in sys.argv[1:] if argument not in GET_PIP_ONLY]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *arguments]))
