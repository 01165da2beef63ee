#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an image can do on this member what it will be needed for."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_check
short_description: Run an image's self-check on this member, and remember that it passed
version_added: 0.1.0
description:
  - Runs a program in a container of the image that is removed afterwards. On a member with a GPU the container gets it, unless the group serves.
  - A pass is kept in C(/var/lib/gb10/checks) by the image's content, and holds for this image and this program. A failure is told by its line.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.ENGINE]
attributes:
  check_mode:
    support: full
    details:
      - Runs nothing, and says whether it would.
  diff_mode:
    support: N/A
    details:
      - It changes nothing that could be shown.
  idempotent: {support: full}
options:
  reference:
    description: The image's name.
    type: str
    required: true
  program:
    description: The program's text, C(runtime/image/check.py).
    type: str
    required: true
  gpu:
    description: Whether containers get the GPU.
    type: bool
    default: false
  group:
    description: The group that may serve on this member. While it does, the check leaves the GPU alone, and the pass holds for a member without one.
    type: str
    default: ""
seealso:
  - module: gb10.cluster.image_info
"""

EXAMPLES = r"""
- name: Prove the image before the first start
  gb10.cluster.image_check:
    engine: docker
    reference: localhost/gb10-cluster:0.33.0
    program: "{{ lookup('ansible.builtin.file', 'runtime/image/check.py') }}"
    gpu: true
"""

RETURN = r"""
checks:
  description: Result and line of each check, by name.
  returned: success
  type: dict
seconds:
  description: How long it took; 0 where the kept pass holds.
  returned: success
  type: float
"""

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _image, _units
from ..module_utils._engine import Engine

FOLDER = Path("/var/lib/gb10/checks")
TIMEOUT_S = 900
"""For all kernels to be compared on a GPU, and imports from a cold disk."""


def run(argv: list[str], program: str) -> tuple[int, str]:
    """Exit status and output of the container, which reads its program from its standard input."""
    try:
        # Not AnsibleModule.run_command: what a container writes to both streams is one text.
        done = subprocess.run(  # pylint: disable=ansible-bad-function
            argv,
            input=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, f"{error.stdout or ''}\nno end within {TIMEOUT_S} s"
    return done.returncode, done.stdout


def results_of(output: str) -> dict[str, Any] | None:
    """The results on the last line of the program's output; None where it did not come so far."""
    try:
        content: dict[str, Any] = json.loads((output.strip().splitlines() or [""])[-1])["checks"]
    except (ValueError, KeyError, TypeError):
        return None
    return content


def failure(reference: str, status: int, output: str) -> str:
    """The sentence with the line that failed."""
    results = results_of(output)
    if results is None:
        lines = [line for line in output.splitlines() if line.strip()] or [f"status {status}"]
        return f"the check of {reference} did not run ({lines[-1].strip()}): see that the image starts on this member"
    failed = [f"{name}: {each['line']}" for name, each in results.items() if each["result"] == "FAILED"]
    return f"{reference} fails its check ({'; '.join(failed)}): take another image, or see the kernels' and the overlay's versions"


def main() -> None:
    """Recall, or run and keep."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "program": {"type": "str", "required": True},
            "gpu": {"type": "bool", "default": False},
            "group": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    reference, program, group = module.params["reference"], module.params["program"], module.params["group"]
    engine = Engine(module.params["engine"])
    try:
        image = engine.image(reference)
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    if image is None:
        if module.check_mode:
            module.exit_json(changed=True, checks={}, seconds=0.0)
        module.fail_json(msg=_image.verdict(reference, None, None))
    gpu = module.params["gpu"] and not (group and _units.read_rank_state(group).is_active)
    file = FOLDER / f"{image.content}.json"
    digest = hashlib.sha256(program.encode()).hexdigest()
    kept = json.loads(_host.read(file) or "{}")
    # A pass on the GPU holds for a check without it.
    if kept.get("passed") and kept["program"] == digest and kept["gpu"] >= gpu:
        module.exit_json(changed=False, checks=kept["checks"], seconds=0.0)
    if module.check_mode:
        module.exit_json(changed=True, checks={}, seconds=0.0)
    name = f"gb10-check-{group or 'image'}"
    argv = [engine.program, "run", "--rm", "--interactive", "--name", name, "--network", "none"]
    if gpu:
        argv += ["--gpus", "all"] if engine.program == "docker" else ["--device", "nvidia.com/gpu=all"]
    required = image.labels.get(_image.REQUIRES_LABEL, "")
    argv += ["--entrypoint", "python3", image.id, "-", *(["--gpu"] if gpu else []), *([f"--require={required}"] if required else [])]
    engine.run("rm", "--force", name)  # what a killed run left
    began = time.monotonic()
    status, output = run(argv, program)
    engine.run("rm", "--force", name)  # a container that ran into the time limit outlives its client
    results = results_of(output)
    artefact = {
        "image": {"reference": reference, "id": image.id, "content": image.content, "stamp": image.stamp},
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": os.uname().nodename,
        "program": digest,
        "gpu": gpu,
        "passed": status == 0 and results is not None,
        "checks": results or {},
        "output": output.splitlines()[-40:],
    }
    _host.write(file, (json.dumps(artefact, indent=1) + "\n").encode())
    if not artefact["passed"]:
        module.fail_json(msg=failure(reference, status, output), checks=results or {})
    module.exit_json(changed=True, checks=results, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
