#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a group served with before."""

from __future__ import annotations

DOCUMENTATION = r"""
module: generation
short_description: Keep what a group serves with, and find what it served with before
version_added: 0.1.0
description:
  - A generation is a plan that served, with the id of its image and the hash of its checkpoint's C(config.json). The last two are kept on each member, in
    C(/var/lib/gb10/generations/GROUP.json), readable by root alone since a plan's variables may hold secrets.
  - The image of a kept generation gets a name of its own, and M(gb10.cluster.checkpoint_reclaim) leaves its checkpoint.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  group:
    description: Name of the group.
    type: str
    required: true
  state:
    description:
      - V(recorded) notes what this member's rank serves with. It fails where the rank does not serve.
      - V(previous) finds the newest generation that is not what is set up now, and sees that its image and its checkpoint are still here. Changes nothing.
      - V(absent) forgets all of them, and takes the names of their images away.
    type: str
    choices: [recorded, previous, absent]
    default: recorded
  plan:
    description: The plan that the group serves, for O(state=recorded).
    type: dict
"""

EXAMPLES = r"""
- name: Remember what serves
  gb10.cluster.generation:
    group: "{{ plan.service.group }}"
    plan: "{{ plan }}"

- name: Find what served before
  gb10.cluster.generation:
    group: "{{ plan.service.group }}"
    state: previous
  register: before
"""

RETURN = r"""
number:
  description: Number of the generation that was noted, or of the one that was found.
  returned: success, but for O(state=absent)
  type: int
digest:
  description: By which generations are told apart, the same on all members.
  returned: success, but for O(state=absent)
  type: str
at:
  description: When it was noted, in seconds since 1970.
  returned: success, but for O(state=absent)
  type: float
plan:
  description: Its plan, with the image by its id.
  returned: for O(state=previous)
  type: dict
"""

import json
import time
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _generation, _host, _image, _plan, _units
from ..module_utils._engine import Engine
from ..module_utils._generation import Generation


class Kept:
    """The generations of a group on this member."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.path = Path(_generation.FOLDER) / f"{group}.json"
        self.generations = _generation.parse(_host.read(self.path))

    def diff(self, wanted: list[Generation]) -> dict[str, str]:
        """The change as `--diff` shows it: no plan, which may hold secrets."""
        before, after = ("".join(f"{generation}\n" for generation in side) for side in (self.generations, wanted))
        return {"before_header": str(self.path), "after_header": str(self.path), "before": before, "after": after}

    def replace(self, wanted: list[Generation], engine: Engine) -> None:
        """Name the images of those that stay, write, and take the names of the others away."""
        for generation in wanted:
            engine.do("tag", generation.image, _generation.image_name(self.group, generation))
        if wanted:
            _host.write(self.path, _generation.text_of(wanted).encode(), 0o600)
        else:
            self.path.unlink(missing_ok=True)
        names = {_generation.image_name(self.group, generation) for generation in wanted}
        for generation in self.generations:
            if (name := _generation.image_name(self.group, generation)) not in names:
                engine.run("rmi", name)  # it may be gone already


def rank_json(module: AnsibleModule) -> dict[str, Any]:
    """The configuration of this member's rank."""
    group = module.params["group"]
    try:
        config: dict[str, Any] = json.loads(_host.read(f"/etc/gb10/{group}/rank.json") or "")
    except ValueError:
        module.fail_json(msg=f"group {group} is not set up on this member: run site.yml")
    return config


def record(module: AnsibleModule, kept: Kept) -> NoReturn:
    """Note what serves."""
    group, plan, config = module.params["group"], module.params["plan"], rank_json(module)
    state = _units.read_rank_state(group)
    if state.phase != "serving" or not state.is_active:
        module.fail_json(
            msg=f"the rank of group {group} does not serve ({state.phase}), so there is nothing to remember: run playbook gb10.cluster.start"
        )
    image, content = config["container"]["image"], config["files"]["image"]
    now = Generation(0, time.time(), plan, image, content, config["start"]["config_hash"])
    wanted = _generation.recorded(kept.generations, now)
    changed = wanted != kept.generations
    if changed and not module.check_mode:
        kept.replace(wanted, Engine(plan["cluster"]["engine"]))
    module.exit_json(changed=changed, number=wanted[-1].number, digest=wanted[-1].digest, at=wanted[-1].at, diff=kept.diff(wanted))


def find(module: AnsibleModule, kept: Kept) -> NoReturn:
    """The one to go back to, once it is known to be whole."""
    group, config = module.params["group"], rank_json(module)
    # The plan's own digest is no part of rank.json, which has one that counts the node services as well.
    set_up = next(
        (
            each.digest
            for each in kept.generations
            if _units.rank_digest(each.plan, each.content, each.config_hash, config) == config["digest"]
        ),
        "",
    )
    found = _generation.previous(kept.generations, set_up)
    if found is None:
        module.fail_json(
            msg=f"group {group} has served with nothing else on this member, so there is nothing to go back to: change the inventory or the profile"
        )
    what = f"generation {found.number} of group {group}"
    if found.plan["version"] != _plan.VERSION:
        module.fail_json(msg=f"{what} was planned by another version of this collection: check that version out, and run its site.yml")
    image = Engine(found.plan["cluster"]["engine"]).image(found.image)
    if image is None:
        module.fail_json(msg=f"the image of {what} is gone from this member ({found.image[:19]}): load it again, or go on with site.yml")
    config_hash = _units.config_hash(found.checkpoint)
    if config_hash != found.config_hash:
        how = "was changed since" if config_hash else "is not there"
        module.fail_json(
            msg=f"{found.checkpoint}/config.json of {what} {how}: bring that checkpoint back with site.yml --tags storage and its profile"
        )
    module.exit_json(changed=False, number=found.number, digest=found.digest, at=found.at, plan=found.pinned())


def forget(module: AnsibleModule, kept: Kept) -> NoReturn:
    """Forget all."""
    changed = kept.path.exists()
    if changed and not module.check_mode:
        if kept.generations:
            kept.replace([], Engine(kept.generations[-1].plan["cluster"]["engine"]))
        kept.path.unlink(missing_ok=True)
    module.exit_json(changed=changed, diff=kept.diff([]))


def main() -> None:
    """Note, find or forget."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["recorded", "previous", "absent"], "default": "recorded"},
            "plan": {"type": "dict"},
        },
        required_if=[("state", "recorded", ("plan",))],
        supports_check_mode=True,
    )
    try:
        {"recorded": record, "previous": find, "absent": forget}[module.params["state"]](module, Kept(module.params["group"]))
    except (OSError, _image.ImageError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
