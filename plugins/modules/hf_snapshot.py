#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint on this member, downloaded from a hub or a web server."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hf_snapshot
short_description: Download a pinned revision of a checkpoint, resumed and verified
version_added: 0.1.0
description:
  - Compares the directory with the repository's files at one revision, and downloads what is missing or different, several files at a time. A
    file gets its name when its content is right, by the SHA-256 that the hub lists, by its git id, or by O(manifest).
  - The download is a job on the member that outlives the connection, shown while it runs. A second run finds it and goes on waiting; one that
    was cut goes on where it ended, inside a file as well. Where all is there, the second run asks nobody on the network if O(manifest) is given.
  - The disk is asked for room for what is missing before anything is downloaded.
  - Files that the repository does not have are let be. Files beyond 50 GB come through hf_xet, and are begun again where they were cut.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.JOB]
attributes:
  check_mode:
    support: full
    details:
      - Returns what would be downloaded. RV(manifest) is returned where all hashes are known without a download.
  diff_mode: {support: full}
  idempotent: {support: full}
requirements:
  - huggingface_hub 2.x on the member, in O(library) or where its Python finds it; not where nothing is to be downloaded
options:
  path:
    description: The checkpoint's directory on this member. It is made where it does not exist.
    type: path
    required: true
  name:
    description: The checkpoint's name. Neighbours can take each file from M(gb10.cluster.weights_source) of this name as soon as it is whole.
    type: str
    required: true
  state:
    description:
      - V(present) downloads and waits, V(started) only begins, V(awaited) waits for what was begun.
      - V(stopped) ends a download that runs. What it has got stays.
    type: str
    choices: [present, started, awaited, stopped]
    default: present
  repository:
    description: The repository on the hub, as OWNER/NAME.
    type: str
  revision:
    description: A commit, tag or branch of the repository. Only a commit means the same for ever.
    type: str
    default: main
  url:
    description: Instead of a repository, an address below which the files of O(manifest) lie, such as that of a bucket.
    type: str
  endpoint:
    description: The hub's address. Unless given that of the environment variable E(HF_ENDPOINT) on the member, else C(https://huggingface.co).
    type: str
  token:
    description: What gives access to files that are not public. It is in no log and no process list.
    type: str
  include:
    description: Patterns of the files to download, such as C(*.json); all unless given.
    type: list
    elements: str
    default: []
  exclude:
    description: Patterns of the files not to download.
    type: list
    elements: str
    default: []
  manifest:
    description: The files as they should be, as for M(gb10.cluster.checkpoint_verify). Then the hub is not asked which files there are.
    type: dict
  library:
    description: Folder on the member with huggingface_hub and what it needs.
    type: path
  jobs:
    description: Files to download at a time.
    type: int
    default: 8
  group:
    description: Name of the group that reads the directory. While it runs, no file is written.
    type: str
    default: ""
  allow_disruption:
    description: Write even while the group runs, which may end it.
    type: bool
    default: false
  max_used_percent:
    description: How full the download may make the disk.
    type: int
    default: 85
seealso:
  - module: gb10.cluster.weights_replica
  - module: gb10.cluster.checkpoint_verify
"""

EXAMPLES = r"""
- name: Download the checkpoint to the head
  gb10.cluster.hf_snapshot:
    path: /var/lib/gb10/models/deepseek-v4.1-flash-exl3-3.5bpw
    name: deepseek-v4.1-flash-exl3-3.5bpw
    repository: bot-lab-21/DeepSeek-V4.1-Flash-EXL3-3.5bpw-Pollard
    revision: f129e31a81e1337aa33e129e2d847fc7e37c8733
    token: "{{ hub_token }}"
  register: snapshot

- name: Keep what was learned of its files
  ansible.builtin.copy:
    content: "{{ snapshot.manifest | to_nice_json }}"
    dest: manifests/deepseek-v4.1-flash-exl3-3.5bpw.json
    mode: "0644"
  delegate_to: localhost
"""

RETURN = r"""
ok:
  description: Whether the directory holds all the files, or will when the download ends.
  returned: success
  type: bool
finished:
  description: Whether nothing is being downloaded any more.
  returned: success
  type: bool
directory:
  description: The directory.
  returned: success
  type: str
commit:
  description: The commit that the revision means; the revision itself where O(manifest) was given.
  returned: success, unless O(state=stopped)
  type: str
copied:
  description: Paths of the files that were downloaded, are being downloaded, or would be in check mode.
  returned: success, unless O(state=stopped)
  type: list
  elements: str
copy_bytes:
  description: Size of these files.
  returned: success, unless O(state=stopped)
  type: int
manifest:
  description: The files with size and SHA-256.
  returned: where all hashes are known
  type: dict
progress:
  description: How far the download is.
  returned: while it runs
  type: dict
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

from ..module_utils import _checkpoint, _fetch, _relay, _replica, _snapshot, _space, _units
from ..module_utils._job import Job, JobError, Report, answer, key_of
from ..module_utils._snapshot import Remote
from ..module_utils._survey import STAMPS, survey

LISTING_TIMEOUT_S = 30
LISTING_TRIES = 3
SETTLE_S = 0.2


def listing(url: str, where: str, token: str) -> dict[str, Any]:
    """What the hub says of a revision."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    reason = ""
    for attempt in range(1, LISTING_TRIES + 1):
        try:
            with open_url(url, headers=headers, timeout=LISTING_TIMEOUT_S) as response:
                content: dict[str, Any] = json.load(response)
                return content
        except HTTPError as error:
            sentence, reason = _snapshot.refusal(error.code, where, bool(token)), f"HTTP {error.code}"
            if sentence:
                raise JobError(sentence) from None
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error))
        if attempt < LISTING_TRIES:
            time.sleep(_fetch.delay(attempt))
    raise JobError(f"{where} gives no list of its files ({reason}): check the endpoint and this member's way to it")


def wanted_files(parameters: dict[str, Any], origin: _snapshot.Origin, endpoint: str) -> tuple[str, list[Remote]]:
    """The commit and all files that the directory is to hold."""
    if parameters["manifest"]:
        files = _checkpoint.parse_manifest(parameters["manifest"])
        return parameters["revision"], [Remote(file.path, file.size, file.sha256) for file in files]
    url = _snapshot.listing_url(endpoint, parameters["repository"], parameters["revision"])
    commit, files = _snapshot.parse_listing(listing(url, origin.where, parameters["token"] or ""), origin.where)
    return commit, _snapshot.select(files, parameters["include"], parameters["exclude"], origin.where)


def missing_files(directory: Path, files: Sequence[Remote], stamps: Path | None) -> tuple[list[Remote], dict[str, str]]:
    """The files whose content is not here, and the SHA-256 of those that are."""
    found = survey(directory, {file.path: file.size for file in files}, False, None, stamps).found
    hashed = {}
    for file in files:
        for path in (file.path, file.path + _checkpoint.ORIGINAL):  # a file that was prepared since has its original beside it
            here = found.get(path)
            if here and here.sha256:
                blob = "" if file.sha256 else _fetch.hashes(directory / path)[1]
                if file.matches(here.sha256, blob):
                    hashed[file.path] = here.sha256
    return [file for file in files if file.path not in hashed], hashed


def refuse(module: AnsibleModule, missing: Sequence[Remote]) -> None:
    """Fail where the files cannot be written."""
    parameters, directory = module.params, Path(module.params["path"])
    need = sum(file.size - _fetch.present(directory, file) for file in missing)
    shortage = _space.shortage(parameters["path"], need, _space.disk_of(directory), parameters["max_used_percent"])
    if shortage:
        raise JobError(shortage)
    if missing and parameters["group"] and _units.read_rank_state(parameters["group"]).holds_group:
        sentence = (
            f"group {parameters['group']} runs, and {parameters['path']} needs other files: stop it first (playbook gb10.cluster.stop) "
            "or set cluster_allow_disruption=true"
        )
        if module.check_mode:
            module.warn(sentence)
        elif not parameters["allow_disruption"]:
            raise JobError(sentence)


def download(module: AnsibleModule, job: Job, key: str, common: dict[str, Any]) -> None:
    """Look, refuse or begin; answers where there is nothing to wait for."""
    parameters, directory = module.params, Path(module.params["path"])
    endpoint = (parameters["endpoint"] or os.environ.get("HF_ENDPOINT") or _snapshot.ENDPOINT).rstrip("/")
    if parameters["url"]:
        origin = _snapshot.prefix(parameters["url"])
    elif _snapshot.is_repository(parameters["repository"]):
        origin = _snapshot.hub(endpoint, parameters["repository"], parameters["revision"])
    else:
        raise JobError(f"{parameters['repository']!r} is no repository: give OWNER/NAME")
    commit, files = wanted_files(parameters, origin, endpoint)
    if not parameters["url"]:
        # From here on what the revision means now, though somebody may move it meanwhile.
        origin = _snapshot.hub(endpoint, parameters["repository"], commit)
    missing, hashed = missing_files(directory, files, None if module.check_mode else STAMPS)
    refuse(module, missing)
    common |= {
        "commit": commit,
        "copied": [file.path for file in missing],
        "copy_bytes": sum(file.size for file in missing),
        "diff": {
            "before_header": parameters["path"],
            "after_header": parameters["path"],
            "before": "",
            "after": "".join(f"{file.path} ({_checkpoint.size_text(file.size)})\n" for file in missing),
        },
    }
    if known := _snapshot.learned(files, hashed):
        common["manifest"] = _checkpoint.manifest_of(known)
    if module.check_mode or not missing:
        module.exit_json(changed=bool(missing), finished=True, **common)

    def work(report: Report) -> dict[str, Any]:
        publisher = _relay.Publisher(_replica.offer_folder(parameters["name"]), directory, sorted(hashed), 0)
        try:
            through = _fetch.library(parameters["library"] or "")
            fetch = _fetch.Fetch(origin, parameters["token"] or "", directory, STAMPS, through, publisher.add)
            # The manifest must be whole before the neighbours can begin, and the hashes of these files are not listed.
            first = [file for file in missing if not file.sha256]
            learnt = {file.path: file.sha256 for file in fetch.run(first, parameters["jobs"], report)}
            job.tell(manifest=_checkpoint.manifest_of(_snapshot.learned(files, hashed | learnt) or []))
            fetch.run([file for file in missing if file.sha256], parameters["jobs"], report)
        finally:
            publisher.depth(None)
        return {}

    job.start(key, work, common)


def settle(job: Job) -> None:
    """Wait until the manifest is known, or the download has failed."""
    while (state := job.look()).running and "manifest" not in state.about:
        time.sleep(SETTLE_S)


def main() -> None:
    """Compare, download or wait, and say how far it is."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "started", "awaited", "stopped"], "default": "present"},
            "repository": {"type": "str"},
            "revision": {"type": "str", "default": "main"},
            "url": {"type": "str"},
            "endpoint": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "include": {"type": "list", "elements": "str", "default": []},
            "exclude": {"type": "list", "elements": "str", "default": []},
            "manifest": {"type": "dict"},
            "library": {"type": "path"},
            "jobs": {"type": "int", "default": 8},
            "group": {"type": "str", "default": ""},
            "allow_disruption": {"type": "bool", "default": False},
            "max_used_percent": {"type": "int", "default": _space.MAX_USED_PERCENT},
            "wait": {"type": "float", "default": 5},
        },
        mutually_exclusive=[("repository", "url")],
        required_if=[("state", "present", ("repository", "url"), True), ("state", "started", ("repository", "url"), True)],
        required_by={"url": ("manifest",)},
        supports_check_mode=True,
    )
    parameters = module.params
    if not _replica.is_name(parameters["name"]):
        module.fail_json(msg=f"{parameters['name']!r} cannot name a checkpoint: use letters, digits, dots, dashes and underscores")
    job = Job(f"fetch-{parameters['name']}")
    common = {"directory": parameters["path"], "ok": True}
    if parameters["state"] == "stopped":
        running = job.look().running
        if running and not module.check_mode:
            job.stop()
        module.exit_json(changed=running, finished=True, **common)
    if parameters["state"] != "awaited":
        key = key_of(parameters, "path", "repository", "revision", "url", "endpoint", "include", "exclude", "manifest")
        try:
            with nullcontext() if module.check_mode else job.turn():
                state = job.look()
                if not state.running or state.key != key or module.check_mode:
                    if not module.check_mode:
                        job.stop()
                    download(module, job, key, common)
        except (JobError, _checkpoint.ManifestError) as error:
            module.fail_json(msg=str(error))
        settle(job)
    answer(module, job.wait(0 if parameters["state"] == "started" else parameters["wait"]), common)


if __name__ == "__main__":
    main()
