#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image from a registry."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_pull
short_description: Pull a container image, prove which one it is, and give it the name that it is kept under
version_added: 0.1.0
description:
  - The pull is a job on the member that outlives the connection. A second run finds it and goes on waiting.
  - An image of another id, content or recipe than expected, or for another machine, is refused. The name then means what it did before.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.JOB, gb10.cluster._attributes.ENGINE]
attributes:
  check_mode:
    support: full
    details:
      - Says that it would pull; the registry is not asked.
  diff_mode: {support: full}
  idempotent:
    support: partial
    details:
      - It asks the registry whenever it is run, and reports a change where the name means another image afterwards.
options:
  reference:
    description: What to pull, a name with a tag or a digest.
    type: str
    required: true
  name:
    description: The name with a tag under which the image is kept; the reference unless given.
    type: str
  id:
    description: The id or content that the image must have.
    type: str
  stamp:
    description: The stamp of the recipe that it must be built from.
    type: str
  user:
    description: User of the registry.
    type: str
    default: ""
  token:
    description: The user's password or token. It is in no log, process list or file that stays.
    type: str
    default: ""
  required:
    description: Fail where it cannot be pulled, or is not the right one; else RV(verdict) says why.
    type: bool
    default: true
  state:
    description: V(present) pulls and waits, V(awaited) waits for what was begun.
    type: str
    choices: [present, awaited]
    default: present
seealso:
  - module: gb10.cluster.image_info
"""

EXAMPLES = r"""
- name: Pull the engine's image
  gb10.cluster.image_pull:
    engine: docker
    reference: registry.example.com/engine:1
    user: cluster
    token: "{{ vault_registry_token }}"
"""

RETURN = r"""
ok:
  description: Whether the name leads to the right image, or would in check mode.
  returned: success
  type: bool
verdict:
  description: Why not, in one sentence.
  returned: success
  type: str
finished:
  description: Whether nothing is being pulled any more.
  returned: success
  type: bool
id:
  description: The engine's id of the image, in hex.
  returned: when it was pulled
  type: str
progress:
  description: How far the pull is; engines tell nothing that could be measured.
  returned: while it runs
  type: dict
"""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _image, _obtain
from ..module_utils._engine import Engine
from ..module_utils._job import Job, JobError, Report, joined, key_of

PULL_TIMEOUT_S = 6 * 3600
"""22 GB at 10 Mbit/s."""


def pull(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Pull, prove, name. Raises ImageError with one sentence; the name then means what it did before."""
    reference, user = parameters["reference"], parameters["user"]
    name = parameters["name"] or reference
    with tempfile.TemporaryDirectory(prefix="gb10-login-") as folder:
        environment = {}
        if user or parameters["token"]:
            # Docker looks for config.json in a folder, podman for a file; both leave the user's own logins alone.
            path = Path(folder) / "config.json"
            _host.write(path, _obtain.login(_obtain.registry_of(reference), user, parameters["token"]), 0o600)
            environment = {"DOCKER_CONFIG": folder, "REGISTRY_AUTH_FILE": str(path)}
        engine = Engine(parameters["engine"], environment)
        before = engine.image(name)
        done = engine.run("pull", "--quiet", reference, timeout=PULL_TIMEOUT_S)
        if done.status:
            raise _image.ImageError(_obtain.pull_failure(reference, done, _image.own_platform()))
    image = engine.image(reference)
    verdict = wrong(reference, image, parameters)
    if verdict or image is None:
        if name == reference and image and before:
            engine.do("image", "tag", before.id, name)
        elif name == reference and image:
            engine.do("image", "rm", name)
        raise _image.ImageError(verdict)
    if name != reference:
        engine.do("image", "tag", image.id, name)
    changed = before is None or before.id != image.id
    return {"ok": True, "verdict": "", "id": image.id, "changed": changed, "diff": _image.diff(name, before, image.id)}


def wrong(reference: str, image: _image.Image | None, parameters: Mapping[str, Any]) -> str:
    """Why what was pulled may not serve; empty when it may."""
    verdict = _image.verdict(reference, image, None, _image.own_platform())
    if verdict or image is None:
        return verdict
    if not _image.is_wanted(image, parameters["id"]):
        return (
            f"{_obtain.registry_of(reference)} serves image {image.id} for {reference}, expected {parameters['id']}: "
            "correct the reference, or ask who keeps the registry"
        )
    if parameters["stamp"] and image.stamp != parameters["stamp"]:
        return (
            f"{_obtain.registry_of(reference)} serves an image of recipe {image.stamp or 'none'} for {reference}, expected {parameters['stamp']}: "
            "publish one of this recipe, or set runtime_obtain=build"
        )
    return ""


def main() -> None:
    """Begin or go on waiting."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["docker", "podman"], "required": True},
            "reference": {"type": "str", "required": True},
            "name": {"type": "str"},
            "id": {"type": "str"},
            "stamp": {"type": "str"},
            "user": {"type": "str", "default": ""},
            "token": {"type": "str", "default": "", "no_log": True},
            "required": {"type": "bool", "default": True},
            "state": {"type": "str", "choices": ["present", "awaited"], "default": "present"},
            "wait": {"type": "float", "default": 5.0},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    name = parameters["name"] or parameters["reference"]
    if module.check_mode:
        module.exit_json(
            changed=True,
            ok=True,
            verdict="",
            finished=True,
            diff=_image.diff(name, None, f"as pulled from {parameters['reference']}"),
        )
    key = key_of(parameters, "engine", "reference", "name", "id", "stamp", "required")
    # One job per name: pulls of two images do not wait for each other.
    job = Job(f"image-pull-{hashlib.sha256(name.encode()).hexdigest()[:12]}")

    def work(_report: Report) -> dict[str, Any]:
        try:
            return pull(parameters)
        except _image.ImageError as error:
            if parameters["required"]:
                raise JobError(str(error)) from error
            return {"ok": False, "verdict": str(error), "changed": False}

    joined(module, job, key, work, f"{name} is being pulled in another way")


if __name__ == "__main__":
    main()
