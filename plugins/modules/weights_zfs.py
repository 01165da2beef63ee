#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint as a ZFS dataset, sent from one member to others."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_zfs
short_description: Send a checkpoint's dataset over the fabric, or receive it
version_added: 0.1.0
description:
  - The head keeps the checkpoint in a dataset of its own, takes a snapshot when it is verified, and gives that to the members that are named. A
    member that has an older snapshot gets what is new. A stream that is cut goes on where it ended.
  - Sending and receiving are jobs on the members that outlive the connection. The sender serves until O(state=stopped).
  - Datasets of others are not written. What was changed in a replica is rolled back before the next increment. The two newest snapshots stay.
  - What M(gb10.cluster.checkpoint_verify) says of the files afterwards is not this module's business.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.JOB]
attributes:
  check_mode:
    support: full
    details:
      - Whether a replica is out of date is only known to the sender, so a check run reports a change where the replica has no snapshot of O(digest).
  diff_mode:
    support: N/A
    details:
      - There is nothing to show.
  idempotent: {support: full}
requirements:
  - zfsutils-linux and a pool, on both ends
options:
  name:
    description: The checkpoint's name.
    type: str
    required: true
  path:
    description: The checkpoint's directory, where the dataset is mounted.
    type: path
    required: true
  dataset:
    description: The dataset, as POOL/NAME. It is made where it does not exist.
    type: str
    required: true
  state:
    description:
      - V(present) makes the dataset on the head, before files arrive there.
      - V(sent) takes a snapshot and serves it; V(stopped) ends that.
      - V(received) brings the snapshot here; V(awaited) waits for that.
    type: str
    choices: [present, sent, received, awaited, stopped]
    required: true
  digest:
    description: What the content is, such as the SHA-256 of its manifest. Needed for V(sent) and V(received).
    type: str
  addresses:
    description: The addresses to serve on, or to receive from.
    type: list
    elements: str
    default: []
  peers:
    description: The addresses that may receive.
    type: list
    elements: str
    default: []
  port:
    description: TCP port.
    type: int
    default: 8732
seealso:
  - module: gb10.cluster.weights_replica
"""

EXAMPLES = r"""
- name: Serve the checkpoint's snapshot to t2
  gb10.cluster.weights_zfs:
    name: smollm2-135m-instruct
    path: /var/lib/gb10/models/smollm2-135m-instruct
    dataset: models/smollm2-135m-instruct
    state: sent
    digest: "{{ manifest | to_json | hash('sha256') }}"
    addresses: [10.10.0.1]
    peers: [10.10.0.2]

- name: Receive it
  gb10.cluster.weights_zfs:
    name: smollm2-135m-instruct
    path: /var/lib/gb10/models/smollm2-135m-instruct
    dataset: models/smollm2-135m-instruct
    state: received
    digest: "{{ manifest | to_json | hash('sha256') }}"
    addresses: [10.10.0.1]
"""

RETURN = r"""
finished:
  description: Whether nothing is being received any more.
  returned: success
  type: bool
streams:
  description: The streams that were received, C(full), C(increment) or C(rest) of one that was cut.
  returned: when something was received
  type: list
  elements: str
seconds:
  description: How long it took.
  returned: when something was received
  type: float
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _replica, _zfs, _zfs_stream
from ..module_utils._job import Job, JobError, answer, key_of


def make(module: AnsibleModule) -> bool:
    """Make the head's dataset; whether there was none."""
    dataset, path, name = (module.params[key] for key in ("dataset", "path", "name"))
    if not module.get_bin_path("zfs", opt_dirs=["/sbin", "/usr/sbin"]):
        raise JobError("zfs is missing on this member: install it (apt-get install zfsutils-linux), or copy by rsync")
    if mountpoint := _zfs_stream.value(dataset, "mountpoint"):
        if mountpoint != path:
            raise JobError(f"{dataset} is mounted at {mountpoint} and not at {path}: name another dataset, or set its mountpoint")
        return False
    pool = dataset.partition("/")[0]
    if not _zfs_stream.value(pool, "used"):
        raise JobError(f"there is no pool {pool} on this member: make one (zpool create {pool} DEVICE), or copy by rsync")
    if any(not entry.startswith(".") for entry in _host.names(path)):
        raise JobError(f"{path} has files that are in no dataset: move them away, or copy by rsync")
    if not module.check_mode:
        _zfs_stream.command(_zfs.create_argv(dataset, path, name))
    return True


def has_snapshot(dataset: str, name: str) -> bool:
    """Whether the dataset has a snapshot of this name."""
    return name in (snapshot.name for snapshot in _zfs_stream.snapshots(dataset))


def send(module: AnsibleModule, job: Job) -> bool:
    """Take the snapshot and serve it; whether there was none."""
    parameters = module.params
    dataset, snapshot = parameters["dataset"], _zfs.snapshot_name(parameters["digest"])
    new = not has_snapshot(dataset, snapshot)
    if module.check_mode:
        return new
    if new:
        _zfs_stream.command(["zfs", "snapshot", f"{dataset}@{snapshot}"])
        _zfs_stream.prune(dataset)
    key = key_of(parameters, "dataset", "digest", "addresses", "peers", "port")
    with job.turn():
        state = job.look()
        if state.running and state.key == key:
            return new
        job.stop()
        sender = _zfs_stream.Sender(dataset, snapshot, parameters["addresses"], parameters["peers"], parameters["port"])
        job.start(key, sender.run)
        sender.close()
    return new


def receive(module: AnsibleModule, job: Job) -> bool:
    """Begin to receive, unless the snapshot is here; whether it is not."""
    parameters = module.params
    dataset = parameters["dataset"]
    if has_snapshot(dataset, _zfs.snapshot_name(parameters["digest"])) and _zfs_stream.value(dataset, "mounted") == "yes":
        return False
    pool = dataset.partition("/")[0]
    if not _zfs_stream.value(pool, "used"):
        raise JobError(f"there is no pool {pool} on this member: make one (zpool create {pool} DEVICE), or copy by rsync")
    if _zfs_stream.value(dataset, "used") and _zfs_stream.value(dataset, _zfs.OWNER) != parameters["name"]:
        raise JobError(f"{dataset} was not made by this collection, and a stream would replace it: name another dataset")
    if not _zfs_stream.value(dataset, "used") and any(not entry.startswith(".") for entry in _host.names(parameters["path"])):
        raise JobError(f"{parameters['path']} has files that are in no dataset: move them away, or copy by rsync")
    if not module.check_mode:
        Path(parameters["path"]).parent.mkdir(parents=True, exist_ok=True)
        receiver = _zfs_stream.Receiver(dataset, parameters["path"], parameters["name"], parameters["addresses"], parameters["port"])
        job.start(key_of(parameters, "dataset", "digest", "addresses", "port"), receiver.run)
    return True


def main() -> None:
    """Do what the state says."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "dataset": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "sent", "received", "awaited", "stopped"], "required": True},
            "digest": {"type": "str"},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "peers": {"type": "list", "elements": "str", "default": []},
            "port": {"type": "int", "default": _zfs.PORT},
            "wait": {"type": "float", "default": 5},
        },
        required_if=[("state", "sent", ("digest",)), ("state", "received", ("digest",))],
        supports_check_mode=True,
    )
    parameters, state = module.params, module.params["state"]
    if not _replica.is_name(parameters["name"]) or not _zfs.is_dataset(parameters["dataset"]):
        module.fail_json(msg=f"{parameters['dataset']!r} cannot be the dataset of {parameters['name']!r}: name it POOL/NAME")
    job = Job(f"zfs-{parameters['name']}")
    try:
        if state == "present":
            module.exit_json(changed=make(module), finished=True)
        if state == "sent":
            module.exit_json(changed=send(module, job), finished=True)
        if state == "stopped":
            running = job.look().running
            if running and not module.check_mode:
                job.stop()
            module.exit_json(changed=running, finished=True)
        if state == "received":
            lacking = receive(module, job)
            if module.check_mode or not lacking:
                module.exit_json(changed=lacking, finished=True)
    except JobError as error:
        module.fail_json(msg=str(error))
    answer(module, job.wait(parameters["wait"]), {})


if __name__ == "__main__":
    main()
