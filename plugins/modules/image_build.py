#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image from a recipe of the collection."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_build
short_description: Build a container image from its recipe
version_added: 0.1.0
description:
  - Builds the image unless the engine has one of that name whose label tells the same stamp. The build sees the files of the recipe and nothing else.
  - The build is a job on the member that outlives the connection. A second run finds it and goes on waiting. Its output is in
    C(/run/gb10/jobs/image-build.log); where it fails, the message has the line that failed.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.JOB, gb10.cluster._attributes.ENGINE]
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
  idempotent:
    support: full
    details:
      - Unless O(force=true).
options:
  reference:
    description: The name with a tag that the image gets.
    type: str
    required: true
  recipe:
    description: The recipe, from P(gb10.cluster.image_recipe#lookup).
    type: dict
    required: true
    suboptions:
      stamp:
        description: What names the recipe's files; the image's label.
        type: str
        required: true
      platform:
        description: What the image is for, such as V(linux/arm64). This member must be of that kind.
        type: str
        required: true
      arguments:
        description: The build's arguments.
        type: dict
        required: true
      containerfile:
        description: Path of the Containerfile in the archive.
        type: str
        required: true
      context:
        description: The files as a compressed tar, base64 encoded.
        type: str
        required: true
  force:
    description: Build even where the image is there.
    type: bool
    default: false
  state:
    description: V(present) builds and waits, V(awaited) waits for what was begun.
    type: str
    choices: [present, awaited]
    default: present
seealso:
  - module: gb10.cluster.image_info
  - plugin: gb10.cluster.image_recipe
    plugin_type: lookup
"""

EXAMPLES = r"""
- name: Build the collection's image on the head
  gb10.cluster.image_build:
    engine: docker
    reference: localhost/gb10-cluster:0.33.0
    recipe: "{{ lookup('gb10.cluster.image_recipe') }}"
"""

RETURN = r"""
ok:
  description: Whether the name leads to an image of the recipe, or would in check mode.
  returned: success
  type: bool
finished:
  description: Whether nothing is being built any more.
  returned: success
  type: bool
id:
  description: The engine's id of the image, in hex.
  returned: when it was built or is there
  type: str
progress:
  description: The newest line of the build.
  returned: while it runs
  type: dict
"""

import base64
import io
import re
import sys
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _image
from ..module_utils._engine import Engine
from ..module_utils._job import Job, JobError, Report, joined, key_of

FOLDER = Path("/var/lib/gb10")
JOB = "image-build"
TOLD = 40
"""Lines of a failed build's end among which the failing one is looked for."""
RULE = "------"
"""What BuildKit writes above and below the last lines of the step that failed. Below the second are lines of the Containerfile."""


def command(engine: str, reference: str, recipe: Mapping[str, Any], folder: str) -> list[str]:
    """The build. The member's own network, as its ranks have it: a bridge of the engine's may not exist, or overlap a leg."""
    arguments = [f"--build-arg={key}={value}" for key, value in recipe["arguments"].items()]
    return [
        *(engine, "build", "--network=host", f"--platform={recipe['platform']}", f"--tag={reference}"),
        *(f"--file={folder}/{recipe['containerfile']}", *arguments, folder),
    ]


def build(parameters: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Unpack, build, prove. Raises JobError."""
    engine, reference, recipe = Engine(parameters["engine"]), parameters["reference"], parameters["recipe"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    before = engine.image(reference)
    with tempfile.TemporaryDirectory(prefix="build-", dir=FOLDER) as folder:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(recipe["context"])), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
        argv = command(parameters["engine"], reference, recipe, folder)
        lines: deque[str] = deque(maxlen=TOLD)

        def tell(line: str) -> None:
            """Show a line in the job's log, and as its step."""
            sys.stdout.write(line)
            sys.stdout.flush()
            if line.strip():
                lines.append(line.strip())
                report({"step": line.strip()})

        status = _host.follow(argv, tell)
    if status:
        raise JobError(f"the build of {reference} failed ({failing_line(lines)}): see /run/gb10/jobs/{JOB}.log on this member")
    image = engine.image(reference)
    verdict = _image.verdict(reference, image, None, _image.own_platform())
    if verdict or image is None:
        raise JobError(verdict)
    if image.stamp != recipe["stamp"]:
        raise JobError(
            f"{reference} was built and has the label {_image.STAMP_LABEL}={image.stamp or 'none'}, expected {recipe['stamp']}: set it in the recipe"
        )
    return {"ok": True, "id": image.id, "diff": _image.diff(reference, before, image.id)}


def failing_line(lines: Iterable[str]) -> str:
    """The line that says what went wrong: the last of the program's own, before the engine's word about the step."""
    told = list(lines)
    if RULE in told:
        step = told[-2 - told[::-1].index(RULE)]
        # A step that runs no program has no lines but its name.
        return told[-1].removeprefix("ERROR: ") if step.startswith("> [") else re.sub(r"^\d+\.\d+ ", "", step)
    own = [
        line
        for line in told
        if not line.lower().startswith(("error: building", "error: failed to solve", "error: process", "------", "the command"))
    ]
    return (own or told or ["no output"])[-1]


def main() -> None:
    """Begin or go on waiting."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "recipe": {
                "type": "dict",
                "required": True,
                "options": {
                    "stamp": {"type": "str", "required": True},
                    "platform": {"type": "str", "required": True},
                    "arguments": {"type": "dict", "required": True},
                    "containerfile": {"type": "str", "required": True},
                    "context": {"type": "str", "required": True},
                },
            },
            "force": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "awaited"], "default": "present"},
            "wait": {"type": "float", "default": 5.0},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    reference, recipe = parameters["reference"], parameters["recipe"]
    job, made_of = Job(JOB), {"reference": reference, "stamp": recipe["stamp"], **recipe["arguments"]}
    if parameters["state"] == "present":
        if recipe["platform"] != _image.own_platform():
            module.fail_json(
                msg=f"the recipe makes an image for {recipe['platform']}, and this member runs {_image.own_platform()}: build it on a member of that kind"
            )
        try:
            image = Engine(parameters["engine"]).image(reference)
        except _image.ImageError as error:
            module.fail_json(msg=str(error))
        if image and image.stamp == recipe["stamp"] and not parameters["force"] and not job.look().running:
            module.exit_json(changed=False, ok=True, finished=True, id=image.id)
        if module.check_mode:
            module.exit_json(changed=True, ok=True, finished=True, diff=_image.diff(reference, image, f"of recipe {recipe['stamp']}"))

    def work(report: Report) -> dict[str, Any]:
        try:
            return build(parameters, report)
        except _image.ImageError as error:
            raise JobError(str(error)) from error

    joined(module, job, key_of(made_of, *sorted(made_of)), work, f"{JOB} of another image or recipe runs")


if __name__ == "__main__":
    main()
