# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""OCI runtime of the lab's hosts: lowers each requested resource limit to the hard limit of this machine, then runs crun.

A machine without CAP_SYS_RESOURCE refuses `--ulimit memlock=-1`, which every container with RDMA asks for. What was asked for stays
visible in `podman inspect`; only the kernel's value is lower. Where the capability is there, nothing is changed.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys

CRUN = "/usr/bin/crun"
CAP_SYS_RESOURCE = 24  # linux/capability.h


def may_raise_limits() -> bool:
    with open("/proc/self/status") as status:
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1)


def clamp(configuration: str) -> None:
    with open(configuration) as file:
        document = json.load(file)
    for limit in document["process"].get("rlimits", []):
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"] = min(limit["hard"], hard)
            limit["soft"] = min(limit["soft"], hard)
    with open(configuration, "w") as file:
        json.dump(document, file)


def main() -> None:
    arguments = sys.argv[1:]
    if {"create", "run"} & set(arguments) and not may_raise_limits():
        named = [value for option, value in itertools.pairwise(arguments) if option in ("-b", "--bundle")]
        clamp(os.path.join(named[0] if named else ".", "config.json"))
    os.execv(CRUN, [CRUN, *arguments])


if __name__ == "__main__":
    main()
