# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside the engine's tree while it is built: what every process of every start would otherwise work out anew, on two cores.

usage: finish.py PACKAGES_DIRECTORY ARCHITECTURE...

Byte code: the time of a source differs from build to build; a hash that nobody checks does not, and costs nothing at start. Sources for
another Python do not compile, and are never imported.

Model classes: vLLM looks at one in a process of its own (which imports all of vLLM) and keeps the answer under VLLM_CACHE_ROOT, keyed
by the hash of the class's source. A container starts with an empty cache.
"""

from __future__ import annotations

import compileall
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

for package in sorted(Path(sys.argv[1]).iterdir()):
    print(package.name, flush=True)
    if package.is_dir():
        compileall.compile_dir(package, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    else:
        compileall.compile_file(package, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)

from vllm.model_executor.models import ModelRegistry  # noqa: E402

for architecture in sys.argv[2:]:
    ModelRegistry.models[architecture].inspect_model_cls()
