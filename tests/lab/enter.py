# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start a process inside a container: in the control groups and in all namespaces of its PID 1.

Instead of nsenter(1), which stops itself when its child is stopped. A host that shuts down stops all of its processes for a moment;
nsenter then never collects its child, and the kernel keeps the host's PID 1, which waits for that, from ending: no reboot.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from . import cgroups

# linux/sched.h: mount, cgroup, UTS, IPC, PID and network namespace (hosts share the machine's user namespace)
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def inside(leader: int) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: what is executed after it runs beside the process `leader`; its exit status comes back."""

    def enter() -> None:
        cgroups.join_groups_of(leader)
        handle = os.pidfd_open(leader)
        if _libc.setns(handle, _NAMESPACES) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
        os.chdir("/")
        if child := os.fork():  # a process namespace is entered by children only: this process waits for the one that executes
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them what tells subprocess that the command has been executed
            _pid, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)

    return enter
