#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The units of a group on one member."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_unit
short_description: Install, start, stop and remove this member's rank of a group
version_added: 0.1.0
description:
  - Writes the systemd units, the node services and the rank's configuration, and enables the group at boot.
  - A running rank is restarted only when what it runs differs from what is wanted. That is decided by the state of the running rank, so a run that
    failed half-way is repaired by the next one.
  - The rank runs the image by its id. Ranks with another image (by its content, see M(gb10.cluster.image_info)), plan or node services than the
    head's do not start.
  - The ranks of all members find one another and start together, the workers first and the head last. See M(gb10.cluster.group_wait).
  - A group that keeps failing waits longer before each start and then stays down. To start or restart it by this module ends that.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  group:
    description: Name of the group.
    type: str
    required: true
  state:
    description:
      - V(started) writes the files, enables the group and starts it, or restarts it where it runs out of date.
      - V(restarted) does the same, and restarts it in any case.
      - V(stopped) stops the rank; with one rank the whole group stops computing. A boot brings it back.
      - V(suspended) stops the rank, and a boot does not bring it back. V(started) ends that.
      - V(absent) stops the rank and removes every file that was written.
    type: str
    choices: [started, restarted, stopped, suspended, absent]
    default: started
  config:
    description: The rank's configuration, from the plan (C(members.NAME.rank_config)).
    type: dict
  package:
    description: The node services, from P(gb10.cluster.node_package#lookup).
    type: str
  api_key:
    description: API key of the endpoint. Left out, the head makes one at the first start and keeps it in C(/etc/gb10/GROUP/api-key).
    type: str
  tls_certificate:
    description:
      - The certificate of the endpoint with its chain, in PEM, for the head of a group that is planned with TLS. Left out, the one that the head has stays.
      - Another one restarts the group, since the engine reads it once.
    type: str
  tls_key:
    description: Its private key, in PEM, without a passphrase.
    type: str
  sysfs_root:
    description: Where the rank finds the member's RDMA devices before each start.
    type: path
    default: /sys
  gate_max_age:
    description:
      - Seconds for which a measurement of the fabric gate holds. Where none holds at a start, the head's rank starts all the same and says so among
        the events of its state. Left out, it does not look.
    type: float
  allow_disruption:
    description: Permit what ends a running group.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Run this member's rank
  gb10.cluster.rank_unit:
    group: "{{ plan.service.group }}"
    config: "{{ plan.members[inventory_hostname].rank_config }}"
    package: "{{ lookup('gb10.cluster.node_package') }}"
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
digest:
  description: What the ranks compare themselves by before a start, made of plan, image, C(config.json) and node services.
  returned: for O(state=started) and O(state=restarted)
  type: str
remembered:
  description: Whether what is set up is the newest generation that M(gb10.cluster.generation) has kept.
  returned: for O(state=started) and O(state=restarted)
  type: bool
started_at:
  description: The member's clock just before the rank was started, or looked at where it was running already; seconds since 1970.
  returned: always
  type: float
"""

import base64
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _generation, _host, _image, _units
from ..module_utils._engine import Engine
from ..module_utils._files import FileSet, ManagedFile

SYSTEMCTL_TIMEOUT_S = 300


def systemctl(module: AnsibleModule, *arguments: str) -> None:
    """Run systemctl or fail with what it said."""
    done = _host.run(["systemctl", *arguments], timeout=SYSTEMCTL_TIMEOUT_S)
    if done.status:
        module.fail_json(msg=f"systemctl {' '.join(arguments)} failed ({done.message}): see journalctl -u {arguments[-1]} on this member")


def api_key_for(parameters: Mapping[str, Any]) -> str | None:
    """The head's key: given, or kept, or new. A worker has none."""
    if parameters["config"]["rank"]:
        return None
    kept = _host.read(f"/etc/gb10/{parameters['group']}/api-key")
    return parameters["api_key"] or kept or secrets.token_urlsafe(32)


def tls_for(module: AnsibleModule) -> list[ManagedFile]:
    """The head's certificate and key where the plan has TLS."""
    parameters = module.params
    try:
        certificate, key = _units.tls_for(parameters["config"], parameters["tls_certificate"] or "", parameters["tls_key"] or "")
    except ValueError as error:
        module.fail_json(msg=str(error))
    return _units.tls_files(parameters["group"], certificate, key) if certificate else []


def image_of(module: AnsibleModule, config: Mapping[str, Any]) -> tuple[str, str]:
    """Id and content of the image that the plan names: a name may mean another image on each member. In check mode it may not be there yet."""
    engine, reference = config["engine"], config["container"]["image"]
    try:
        image = Engine(engine).image(reference)
    except _image.ImageError as error:
        module.fail_json(msg=str(error))
    if image is None and not module.check_mode:
        module.fail_json(msg=_image.verdict(reference, image, None))
    return (image.id, image.content) if image else (reference, reference)


def files_for(module: AnsibleModule) -> FileSet:
    """The files of this rank, none for state absent."""
    wanted, parameters = [], module.params
    if parameters["state"] in ("started", "restarted"):
        package, config = base64.b64decode(parameters["package"]), parameters["config"]
        config_json = _units.config_hash(config["start"]["checkpoint"])
        wanted = _units.rank_files(
            config,
            package,
            image_of(module, config),
            api_key_for(parameters),
            config_json,
            parameters["sysfs_root"],
            parameters["gate_max_age"],
            tls_for(module),
        )
    return FileSet(f"service-{parameters['group']}", wanted)


def forget_failures(unit: str, group: str) -> None:
    """A person starts the group: what has failed before no longer counts, neither for systemd's start limit nor for the breaker and its waits."""
    _host.run(["systemctl", "reset-failed", unit])
    Path(_units.failures_file(group)).unlink(missing_ok=True)


def main() -> None:
    """Decide from the state of the running rank, then act."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "restarted", "stopped", "suspended", "absent"], "default": "started"},
            "config": {"type": "dict"},
            "package": {"type": "str"},
            "api_key": {"type": "str", "no_log": True},
            "tls_certificate": {"type": "str"},
            "tls_key": {"type": "str", "no_log": True},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "gate_max_age": {"type": "float"},
            "allow_disruption": {"type": "bool", "default": False},
        },
        required_together=[("tls_certificate", "tls_key")],
        required_if=[("state", "started", ("config", "package")), ("state", "restarted", ("config", "package"))],
        supports_check_mode=True,
    )
    group, wanted_state = module.params["group"], module.params["state"]
    running = _units.read_rank_state(group)
    unit, target = _units.rank_unit(group), _units.target_unit(group)
    actions: list[str] = []
    diff: list[dict[str, str]] = []
    # What failed before is not what a wait is about, also where the rank runs already and waits for the others.
    started_at = time.time()

    enabled = _host.run(["systemctl", "is-enabled", target]).out.strip() == "enabled"
    if wanted_state in ("stopped", "suspended"):
        if running.is_active:
            actions.append(f"stop {target}")
            if not module.check_mode:
                systemctl(module, "stop", target, unit)
                # A rank that ended because another was stopped first counts as failed; it is stopped as asked.
                _host.run(["systemctl", "reset-failed", unit])
        if wanted_state == "suspended" and enabled:
            actions.append(f"disable {target}")
            if not module.check_mode:
                systemctl(module, "disable", target)
        module.exit_json(changed=bool(actions), actions=actions, started_at=started_at, diff=diff)

    files = files_for(module)
    diff = [change.diff() for change in files.changes]
    actions += [f"{'write' if change.after else 'remove'} {change.path}" for change in files.changes]
    if wanted_state == "absent":
        if running.is_active:
            actions.insert(0, f"stop {target}")
        if running.holds_group and not module.params["allow_disruption"] and not module.check_mode:
            module.fail_json(
                msg=f"group {group} runs ({running.phase}): stop it first (playbook gb10.cluster.stop) or set cluster_allow_disruption=true"
            )
        if actions and not module.check_mode:
            _host.run(["systemctl", "disable", "--now", target, unit, *_units.companion_units(group)], timeout=SYSTEMCTL_TIMEOUT_S)
            files.apply()
            for path in _units.memories(group):
                Path(path).unlink(missing_ok=True)
            systemctl(module, "daemon-reload")
        module.exit_json(changed=bool(actions), actions=actions, started_at=started_at, diff=diff)

    rank_json = next(file.content for file in files.wanted if file.path.endswith("/rank.json"))
    down = not running.is_active or running.is_ending
    restart = wanted_state == "restarted" or _units.needs_restart(running, rank_json)
    if running.is_active and restart:
        actions.append(f"restart {unit}" + (", which ends the running group" if running.holds_group else ""))
        if running.holds_group and not module.params["allow_disruption"] and not module.check_mode:
            module.fail_json(
                msg=f"group {group} runs ({running.phase}) and this change restarts it: stop it first (playbook gb10.cluster.stop) "
                "or set cluster_allow_disruption=true"
            )
    elif down:
        actions.append(f"start {unit}")
    if not enabled:
        actions.append(f"enable {target}")

    if not module.check_mode:
        if files.changes:
            files.apply()
            systemctl(module, "daemon-reload")
        if not enabled:
            systemctl(module, "enable", target)
        if restart or down:
            # Not `restart`: the time must lie between the two lives, since the old one may note its own end as a failure.
            systemctl(module, "stop", unit)
            started_at = time.time()
            forget_failures(unit, group)
            systemctl(module, "restart", *_units.companion_units(group))
            systemctl(module, "start", target, unit)
        elif not running.holds_group:
            # It waits, or is about to start again by itself. A life whose failure is reset while its unit tidies up is no failed one any more, and
            # systemd would not run it again: told to start, it does in any case.
            forget_failures(unit, group)
            systemctl(module, "start", target, unit)
    rank = json.loads(rank_json)
    known = _generation.parse(_host.read(f"{_generation.FOLDER}/{group}.json"))
    now = _generation.identity(module.params["config"]["digest"], rank["files"]["image"], rank["start"]["config_hash"])
    remembered = bool(known) and known[-1].digest == now
    module.exit_json(changed=bool(actions), actions=actions, started_at=started_at, diff=diff, digest=rank["digest"], remembered=remembered)


if __name__ == "__main__":
    main()
