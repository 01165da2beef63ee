#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a NCCL log proves, against the plan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_verdict
short_description: Read what NCCL's log proves of the transport
version_added: 0.1.0
description:
  - Reads the log of one or more ranks, written with E(NCCL_DEBUG=INFO), and says for each rank and channel which transport and device it
    used, over which interface the ranks met, and for every known failure its cause and its cure.
  - Sockets where RDMA was planned are a failure, whatever the model answers.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  paths:
    description: The logs, one for each rank or one of several; each is a file on the host where the module runs.
    type: list
    elements: path
  text:
    description: The log itself.
    type: str
  group:
    description: Read the journal of this group's rank on the host where the module runs, from the start of the rank's present life.
    type: str
  plan:
    description:
      - The plan. Its devices, interfaces, variables and cabling are what each rank's log is held against.
      - Without it only the transport is.
    type: dict
  transport:
    description: The planned transport. By default the plan's (V(Socket) where C(cluster_devices) is empty), and V(IB) without a plan.
    type: str
    choices: [IB, Socket]
  this_host:
    description:
      - The log is of the host where the module runs. Its devices, kernel and limits then tell apart what a log alone leaves open.
    type: bool
    default: true
  loaded:
    description: Also look which NCCL libraries the processes of this host have loaded now, and whether these know what the plan needs.
    type: bool
    default: false
  procfs_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
  sysfs_root:
    description: Where sysfs is mounted.
    type: path
    default: /sys
  strict:
    description: Fail when the verdict is bad; otherwise only report it.
    type: bool
    default: true
notes:
  - Lines of NCCL appear at the start of a rank only, so a log that was cut there proves nothing.
seealso:
  - plugin: gb10.cluster.nccl_env
    plugin_type: filter
  - module: gb10.cluster.roce_info
"""

EXAMPLES = r"""
- name: Prove that the ranks talk over the legs
  gb10.cluster.nccl_verdict:
    group: "{{ plan.service.group }}"
    plan: "{{ plan }}"
    loaded: true

- name: Read the log of a test
  gb10.cluster.nccl_verdict:
    text: "{{ test.stdout }}"
    plan: "{{ plan }}"

- name: Read the logs of all ranks that were collected somewhere
  gb10.cluster.nccl_verdict:
    paths: [rank0.log, rank1.log, rank2.log]
    this_host: false
    strict: false
  delegate_to: localhost
"""

RETURN = r"""
passed:
  description: Whether nothing stands against the log.
  returned: always
  type: bool
transport:
  description: What the channels went over, as V(NET/IB) or V(NET/Socket); V(none) when there are no channels.
  returned: always
  type: str
ranks:
  description:
    - Per rank (or process, where its rank is unknown) its C(host), C(versions) of NCCL, C(bootstrap) interface and address, C(devices),
      C(transports) and C(channels), each of these with C(channel), C(from), C(to), C(direction), C(transport) and C(device).
  returned: always
  type: list
  elements: dict
findings:
  description:
    - What is wrong, the worst first, each with C(severity) (V(refuse) or V(warn)), C(code), C(sentence) (the ranks, the cause and the cure)
      and C(evidence) (the line that says so).
  returned: always
  type: list
  elements: dict
against:
  description: Sentences of what stands against a group that runs. That its log lacks NCCL's lines, which come at a start only, does not.
  returned: always
  type: list
  elements: str
libraries:
  description:
    - With O(loaded) the processes that have NCCL loaded, each with its C(libraries), their versions, features and hashes, and which of them
      C(torch) and C(vllm) use, where that can be told.
  returned: always
  type: list
  elements: dict
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _host, _nccl_library, _nccl_log, _nccl_verdict, _platform, _roce, _units
from ..module_utils._errors import PlanError
from ..module_utils._findings import REFUSE, refused
from ..module_utils._nccl import Requirement


def lines_of(path: str) -> Iterator[str]:
    """A log's lines, one at a time: a rank that has served for weeks has written much that is not NCCL's."""
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from file


def journal_of(group: str) -> Iterator[str]:
    """What the group's rank has written since it was started."""
    unit = _units.rank_unit(group)
    life = _host.run(["systemctl", "show", "--property", "InvocationID", "--value", unit]).out.strip()
    if not life:
        raise PlanError(f"{unit} has not run on this host: start the group, or name a log")
    journal = _host.run(["journalctl", "--no-pager", "--quiet", "--output", "cat", f"_SYSTEMD_INVOCATION_ID={life}"], timeout=300)
    yield from journal.out.splitlines()


def judge(parameters: dict[str, Any]) -> dict[str, Any]:
    """The verdict as the module returns it."""
    plan, procfs, sysfs = (parameters[key] for key in ("plan", "procfs_root", "sysfs_root"))
    running = _nccl_library.processes(procfs) if parameters["loaded"] else []
    host: dict[str, Any] = {}
    if parameters["this_host"]:
        host = {**_platform.read_platform(procfs, sysfs), "hcas": len(_roce.read_hcas(sysfs))}
        limits = [process.memlock for process in running]
        if limits:
            host["memlock"] = min((limit for limit in limits if limit is not None), default=None)
    sources = [(path, lines_of(path)) for path in parameters["paths"] or []]
    if parameters["text"] is not None:
        sources.append(("text", iter(parameters["text"].splitlines())))
    if parameters["group"] is not None:
        sources.append((_units.rank_unit(parameters["group"]), journal_of(parameters["group"])))
    expected = _nccl_verdict.expected_of(plan, parameters["transport"] or "")
    verdict = _nccl_verdict.judge(_nccl_log.parse(sources), expected, host)
    needed = plan["fabric"]["nccl"]["library"] if plan else []
    found = _nccl_library.judge_libraries(running, [Requirement(each["feature"], each["reason"]) for each in needed])
    verdict["passed"] = verdict["passed"] and not refused(found)
    verdict["findings"] = [asdict(finding) for finding in [*verdict["findings"], *found]]
    # NCCL writes at a rank's start only: that a journal has lost these lines is no failure.
    verdict["against"] = [each["sentence"] for each in verdict["findings"] if each["severity"] == REFUSE and each["code"] != "no-lines"]
    return {**verdict, "libraries": [asdict(process) for process in running]}


def main() -> None:
    """Read, judge, report."""
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path"},
            "text": {"type": "str"},
            "group": {"type": "str"},
            "plan": {"type": "dict"},
            "transport": {"type": "str", "choices": ["IB", "Socket"]},
            "this_host": {"type": "bool", "default": True},
            "loaded": {"type": "bool", "default": False},
            "procfs_root": {"type": "path", "default": "/proc"},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "strict": {"type": "bool", "default": True},
        },
        required_one_of=[("paths", "text", "group")],
        supports_check_mode=True,
    )
    try:
        verdict = judge(module.params)
    except OSError as error:
        module.fail_json(msg=f"the log {error.filename} cannot be read ({error.strerror}): name a file on this host")
    except PlanError as error:
        module.fail_json(msg=str(error))
    if not verdict["passed"] and module.params["strict"]:
        bad = [finding["sentence"] for finding in verdict["findings"] if finding["severity"] == REFUSE]
        module.fail_json(msg="; ".join(bad), **verdict)
    module.exit_json(changed=False, **verdict)


if __name__ == "__main__":
    main()
