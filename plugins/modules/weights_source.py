#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A directory of this member, served to the other members for as long as they copy it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_source
short_description: Serve a directory read-only to other members over the fabric
version_added: 0.1.0
description:
  - Runs one rsync daemon per address as a transient systemd unit C(gb10-weights-NAME@ADDRESS). It answers the peers only, cannot write, and ends
    by itself after a day, so that a controller that is lost in between leaves nothing for good.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode: {support: full}
  diff_mode:
    support: N/A
    details:
      - What it writes is gone when the source stops.
  idempotent: {support: full}
options:
  name:
    description: The source's name, in M(gb10.cluster.weights_replica) as well.
    type: str
    required: true
  state:
    description: V(started) serves, V(stopped) ends that.
    type: str
    choices: [started, stopped]
    default: started
  path:
    description: The directory.
    type: path
  addresses:
    description: This member's addresses to serve on. The source listens on no other.
    type: list
    elements: str
  peers:
    description: The addresses that may read.
    type: list
    elements: str
  port:
    description: TCP port.
    type: int
    default: 8730
notes:
  - Beside the directory it serves the offer that M(gb10.cluster.weights_replica) keeps, the list of files that were verified.
seealso:
  - module: gb10.cluster.weights_replica
"""

EXAMPLES = r"""
- name: Serve the checkpoint on the leg to t2
  gb10.cluster.weights_source:
    name: smollm2-135m-instruct
    path: /var/lib/gb10/models/smollm2-135m-instruct
    addresses: [10.10.0.1]
    peers: [10.10.0.2]

- name: Stop serving it
  gb10.cluster.weights_source:
    name: smollm2-135m-instruct
    state: stopped
"""

RETURN = r"""
actions:
  description: What was done, or would be done in check mode, one sentence each.
  returned: always
  type: list
  elements: str
"""

import errno
import socket
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _relay, _replica
from ..module_utils._job import alone

PATIENCE_S = 10
"""For a daemon to listen; it takes a few hundredths of a second."""


def check_address(module: AnsibleModule, address: str, port: int) -> None:
    """Fail where the daemon could not listen; it would say so in the journal only."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            others = _host.run(["systemctl", "list-units", "--plain", "--no-legend", _replica.unit("*", address)]).out.split()
            ours = f" by {others[0]} of a run that was cut: run that to its end, or systemctl stop {others[0]}" if others else ""
            known = {
                errno.EADDRINUSE: f"port {port} of {address} is taken on this member{ours or ': set storage_port to a free one'}",
                errno.EADDRNOTAVAIL: f"{address} is no address of this member: run site.yml --tags fabric first",
            }
            other = f"nothing can listen on {address} port {port} ({error.strerror}): correct the source's addresses"
            module.fail_json(msg=known.get(error.errno or 0, other))


def start(module: AnsibleModule, name: str, address: str, port: int) -> None:
    """Start the daemon of one address and return when it listens."""
    done = _host.run(_replica.source_argv(name, address))
    unit = _replica.unit(name, address)
    if done.status:
        module.fail_json(msg=f"{unit} does not start ({done.message}): see journalctl -u {unit} on this member")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                module.fail_json(msg=f"{unit} does not listen ({error.strerror}): see journalctl -u {unit} on this member")
            time.sleep(0.02)


def main() -> None:
    """Compare the running daemons with the wanted ones, and act."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
            "path": {"type": "path"},
            "addresses": {"type": "list", "elements": "str"},
            "peers": {"type": "list", "elements": "str"},
            "port": {"type": "int", "default": _replica.PORT},
        },
        required_if=[("state", "started", ("path", "addresses", "peers"))],
        supports_check_mode=True,
    )
    name, port = module.params["name"], module.params["port"]
    if not _replica.is_name(name):
        module.fail_json(msg=f"{name!r} cannot name a source: use letters, digits, dots, dashes and underscores")

    config_path = _replica.config_path(name)
    wanted: dict[str, str] = {}
    config = b""
    if module.params["state"] == "started":
        wanted = {_replica.unit(name, address): address for address in module.params["addresses"]}
        config = _replica.config(name, module.params["path"], port, module.params["peers"], _replica.offer_folder(name)).encode()
    with alone(f"source-{name}"):
        listed = _host.run(["systemctl", "list-units", "--plain", "--no-legend", _replica.units(name)])
        running = {line.split()[0] for line in listed.out.splitlines() if line.strip()}
        outdated = running if _host.read_bytes(config_path) != config else running - set(wanted)
        new = [unit for unit in wanted if unit not in running - outdated]
        actions = [f"stop {unit}" for unit in sorted(outdated)] + [f"start {unit}" for unit in new]

        if not module.check_mode:
            if outdated:
                _host.run(["systemctl", "stop", *sorted(outdated)])
            for unit in new:
                check_address(module, wanted[unit], port)
            if new:
                _host.write(config_path, config)
            for unit in new:
                start(module, name, wanted[unit], port)
            if not wanted:
                for path in (config_path, _replica.offer_folder(name) / _relay.OFFER_FILE):
                    path.unlink(missing_ok=True)
    module.exit_json(changed=bool(actions), actions=actions)


if __name__ == "__main__":
    main()
