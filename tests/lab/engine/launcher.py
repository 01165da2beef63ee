# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image's `vllm` command: vLLM's own, started in less than half the processor time and with a fifth less memory.

An engine is a tree of processes (server, engine core, worker), and each of them needs some 5 s to import vLLM. On CPUs vLLM insists on
new interpreters for them (`spawn`), because it wants to bind OpenMP's threads before any exists. The lab binds none
(VLLM_CPU_OMP_THREADS_BIND=nobind), so the children can be forks that have everything imported; VLLM_WORKER_MULTIPROC_METHOD=spawn in
the environment gives vLLM's own way back.

vLLM's workers ask the kernel for the memory nodes that they may use. One without cpusets, as that of a User-Mode Linux is, does not say; it
has a single node. Nothing else of vLLM is changed.
"""

from __future__ import annotations

import gc
import os
import sys

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def main() -> int | None:
    """Import all that the children will need, then run vLLM's command line."""
    method = os.environ.setdefault(_METHOD, "fork")
    gc.disable()  # an import makes no garbage, only a fifth more work for its collector
    import vllm.entrypoints.cli.serve
    import vllm.utils.cpu_resource_utils as resources
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.entrypoints.cli.main import main as command
    from vllm.platforms.cpu import CpuPlatform

    adjust = CpuPlatform.check_and_update_config

    def check_and_update_config(_cls: type[CpuPlatform], vllm_config: object) -> None:
        adjust(vllm_config)
        os.environ[_METHOD] = method

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    if not resources.get_memory_affinity():
        resources.get_memory_affinity = lambda _pid=0: [0]
    gc.freeze()  # what is imported stays, and the children share its memory for as long as nobody counts it
    gc.enable()
    return command()


if __name__ == "__main__":  # a spawned child imports this file again, and needs none of it
    sys.exit(main())
