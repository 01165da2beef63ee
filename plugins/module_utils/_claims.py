# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What this collection claims and no machine without the hardware can prove: each claim once, with the step of the playbook acceptance that measures it.

docs/on-real-sparks.md is made of this list (tools/pages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _readings
from ._readings import View

ALWAYS, SERVING, LOAD, STOPPED, AROUND, REBOOT = "always", "serving", "load", "stopped", "around", "reboot"
"""When a step may run: at any time; while the group serves; the same, with requests of its own; without a running group; around such steps, to stop
and start it; with a member rebooted."""

NEEDS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "rdma": (lambda plan: bool(plan["cluster"]["devices"]), "this inventory has no RDMA (cluster_devices is empty)"),
    "gpu": (
        lambda plan: any(each["rank_config"]["container"]["gpus"] for each in plan["members"].values()),
        "this inventory has no GPU (cluster_gpu is false)",
    ),
}
"""What a claim is about: whether a plan has it, and what to say where it has not."""


@dataclass(frozen=True)
class Step:
    """One measurement: tasks of a role, or a file of playbooks/tasks; `keep` names the registered results that its claims are read from."""

    name: str
    when: str
    keep: Sequence[str] = ()
    role: str = ""
    tasks: str = ""
    file: str = ""


@dataclass(frozen=True)
class Claim:
    """`command` proves it alone (`gb10.cluster.NAME` is a playbook), and `see` is what that shows. Without a `step` it is proven by hand."""

    id: str
    statement: str
    command: str
    see: str
    step: str = ""
    read: Callable[[View], str] | None = None
    needs: Sequence[str] = ()


STEPS = (
    Step("cabling", ALWAYS, ("__fabric_preflight", "__fabric_cables", "__fabric_cables_later"), role="fabric", tasks="preflight"),
    Step("legs", ALWAYS, ("__fabric_legs", "__fabric_roce"), role="fabric", tasks="verify"),
    Step("checkpoint", ALWAYS, ("__storage_state", "__storage_memory"), role="storage", tasks="verify"),
    Step("image", ALWAYS, ("__runtime_state",), role="runtime", tasks="verify"),
    Step("check", ALWAYS, ("__runtime_check",), role="runtime", tasks="check"),
    Step("answers", SERVING, ("verify_probe", "verify_nccl"), file="probes"),
    Step("environment", SERVING, ("acceptance_proof",), file="acceptance_environment"),
    Step("stop", AROUND, file="acceptance_stop"),
    Step("gate", STOPPED, ("__fabric_gate_measured", "__fabric_gate_later"), role="fabric", tasks="gate"),
    Step("gpu", STOPPED, ("__fabric_gpu",), role="fabric", tasks="gpu"),
    Step("kernels", STOPPED, ("__runtime_check",), role="runtime", tasks="check"),
    Step("memory", STOPPED, ("__storage_memory",), role="storage", tasks="verify"),
    Step("start", AROUND, ("__service_unit", "__service_wait"), role="service", tasks="apply"),
    Step("bench", LOAD, ("bench_cold", "bench_decode"), file="acceptance_bench"),
    Step("reboot", REBOOT, ("__fabric_legs", "__fabric_roce", "acceptance_reboot"), file="acceptance_reboot"),
    Step("end", ALWAYS, ("acceptance_status",), file="acceptance_status"),
)
"""In the order in which they are run."""

SITE = "gb10.cluster.site"
MEASURED = (
    Claim(
        "devices",
        "the plan names the devices of a Spark, and its kernel, driver and firmware are of a pair that is known to work",
        f"{SITE} --tags fabric --check",
        "no finding; the four `enp1s0f…`/`enP2p1s0f…` names of `ip -br link`",
        "cabling",
        _readings.devices,
        ("rdma",),
    ),
    Claim(
        "cabling",
        "the halves of a cage share one wire, and a beacon arrives on both",
        "gb10.cluster.gate --tags cables",
        'all ports right, no "several neighbours", no "loop"',
        "cabling",
        _readings.cabling,
    ),
    Claim(
        "legs",
        "netplan as DGX OS has it (NetworkManager) addresses the legs, and packets of full size pass",
        f"{SITE} --tags fabric",
        "legs proven and confirmed",
        "legs",
        _readings.legs,
    ),
    Claim(
        "gids",
        "each HCA of a ConnectX-7 has a RoCE v2 GID of its leg",
        f"{SITE} --tags fabric",
        "`strict` passes",
        "legs",
        _readings.gids,
        ("rdma",),
    ),
    Claim(
        "checkpoint",
        "every member has the whole checkpoint, prepared",
        f"{SITE} --tags storage",
        "no refusal",
        "checkpoint",
        _readings.checkpoint,
    ),
    Claim("image", "every member has the same image", f"{SITE} --tags runtime", "one `content`", "image", _readings.image),
    Claim("image-check", "what is in the image fits together", f"{SITE} --tags runtime", "no `FAILED` line", "check", _readings.checks),
    Claim(
        "answers",
        "the group serves, and all probes of the profile pass",
        "gb10.cluster.verify",
        "`passed` for each",
        "answers",
        _readings.answers,
    ),
    Claim(
        "transport",
        "the ranks use RDMA, by NCCL's own log (the tests' lines are synthetic, from the format strings of 2.30.7)",
        "gb10.cluster.verify",
        "`NET/IB`, four devices a rank; the library knows `IB_SUBNET_AWARE_ROUTING`",
        "answers",
        _readings.transport,
        ("rdma", "gpu"),
    ),
    Claim(
        "environment",
        "what runs is what was planned: image, arguments, variables",
        "gb10.cluster.proof",
        "nothing differs",
        "environment",
        _readings.environment,
    ),
    Claim(
        "gate",
        "every way and all ranks together reach the marks of this inventory with right values",
        "gb10.cluster.gate",
        "a pass",
        "gate",
        _readings.gate,
    ),
    Claim(
        "bandwidth",
        "over RDMA that is the published bandwidth",
        "gb10.cluster.gate",
        "a ring of three about 23 GB/s, pairs above 21.9; where this harness reads lower than nccl-tests, set the `fabric_gate_*_gb_per_s` variables",
        "gate",
        _readings.gate,
        ("rdma", "gpu"),
    ),
    Claim(
        "gpu",
        "no GPU is latched or in its slow state",
        "gb10.cluster.gpu",
        "no finding on a healthy Spark",
        "gpu",
        _readings.gpu,
        ("gpu",),
    ),
    Claim(
        "kernels",
        "the kernels compute on a GB10 what the reference does",
        f"{SITE} --tags runtime",
        '`kernels` "7 checks on the GPU"',
        "kernels",
        _readings.checks,
        ("gpu",),
    ),
    Claim(
        "memory",
        "a serving rank takes no more of its member than the memory plan says",
        f"{SITE} --tags storage",
        "`need` of `memory_plan` against what is left: 4.1 to 5.8 GiB at TP2, by the kit's own figures",
        "memory",
        _readings.memory,
        # Where processor and GPU share a member's memory; without one a container's limit is the plan, and members may share a machine.
        ("gpu",),
    ),
    Claim(
        "start",
        "a stopped group starts: containers get `/dev/infiniband`, the GPU and unlimited memlock, and the memory that they ask for",
        "gb10.cluster.restart",
        "no refusal; the group serves",
        "start",
        _readings.started,
    ),
    Claim("figures", "figures with their spread", "gb10.cluster.bench", "no step refused", "bench", _readings.figures),
    Claim(
        "reboot",
        "a reboot of one member brings the group back without a command",
        "reboot the last member by hand",
        "serving",
        "reboot",
        _readings.rebooted,
    ),
    Claim(
        "hotplug",
        "moving `cx7-hotplug-enabled` aside keeps the ConnectX on the bus of a rebooted member's neighbours",
        f"{SITE} --tags fabric",
        "all legs and GIDs after the reboot",
        "reboot",
        _readings.after_reboot,
        ("rdma",),
    ),
    Claim(
        "guard",
        "memory stays above the guard's floors, also after long prefills",
        "gb10.cluster.status",
        'no "memory guard" line',
        "end",
        _readings.guarded,
    ),
)

BY_HAND = (
    Claim(
        "no-carrier",
        "an address stays without carrier (with Debian's NetworkManager 1.52 it did)",
        f"{SITE} --tags fabric",
        "unplug one cable: `ip address` still shows the address",
    ),
    Claim(
        "way-back",
        "a change of the network takes itself back",
        f"{SITE} --tags fabric -e cluster_leg_pool=10.20.0.0/16 -e fabric_revert_after=60",
        "kill it with Ctrl-\\ while it addresses the legs: a minute later `ip address` shows the old addresses",
    ),
    Claim(
        "ring-of-four",
        "a ring of four with a patched library; four ranks of the EXL3 image (`dsv41-exl3-3.5bpw-tp4`)",
        "gb10.cluster.acceptance, in `inventories/ring4` changed to your addresses",
        "the group serves",
    ),
    Claim(
        "slow-state",
        "the slow states of a GPU are told apart (the tests' series are synthetic)",
        "gb10.cluster.gpu",
        "`gpu-slow-state` after 15 minutes idle",
    ),
    Claim(
        "download",
        "a download by the head (files over 50 GB by hf_xet, aarch64 wheels) and the relay at the legs' own speed",
        f"{SITE} --tags storage",
        "three members in about the time of one; rates in its progress",
    ),
    Claim(
        "packing",
        "`engram_pack` on a Spark's NVMe",
        "`python -m tests.bench.engram_pack /var/lib/gb10 8192 5` in a checkout",
        "no less than 80 % of `dd`",
    ),
    Claim(
        "page-cache",
        "dropping the page cache gives MemFree back to the GPU",
        "`journalctl -u gb10-guard@GROUP` over a long prefill",
        'no "rank told to stop"; drops raise MemFree',
    ),
    Claim(
        "canary",
        "the canary keeps the GPU out of its slow state",
        "`gb10_canary_seconds` of the exporter over an idle hour",
        "it does not jump by half",
    ),
    Claim(
        "pressure",
        "`vm.min_free_kbytes` and swap off under memory pressure",
        "gb10.cluster.status during a long prefill",
        "memory stays above the reserve",
    ),
    Claim(
        "docker",
        "docker as the engine with a GPU and RDMA devices; in the lab Debian's 26.1.5 ran without them",
        "gb10.cluster.acceptance, with `cluster_engine: docker`",
        "as with podman",
    ),
    Claim(
        "build",
        "the image builds: fill `base.digest` of `runtime/image/lock.json` with what the refusal's command prints, choose a profile "
        "whose name ends in `-own`",
        f"{SITE} --tags runtime",
        "the build ends with seven `ok` lines; a second run changes nothing",
    ),
    Claim(
        "layers",
        "`docker save` of an image that was pulled for several machines, out of docker's containerd store and into one (archives go whole there)",
        f"{SITE} --tags runtime, with a registry that the workers cannot reach",
        "`content` of module `image_info` is one on all members",
    ),
    Claim(
        "profiles",
        "the profiles of DeepSeek-V4.1-Flash, of Qwen3.8-Flash-Next, and `dsv41-native-tp4`",
        "gb10.cluster.acceptance, with each profile",
        "the group serves, all probes of the profile pass",
    ),
    Claim(
        "overlay",
        "72 heads, EXL3 layers and tables on disk by the overlay",
        "gb10.cluster.acceptance, with `dsv41-exl3-2.9bpw-tp2-own` or `dsv41-exl3-3.5bpw-tp3-own`",
        "the group serves, so every rank has logged the levers' lines; all probes of the profile pass",
    ),
    Claim(
        "split",
        "the indexer's rows shared by the ranks: the same answers, and a faster prefill of a long prompt",
        "gb10.cluster.ladder on an `-own` profile, with a rung of `cluster_profile_changes: {engine: {environment: {GB10_INDEXER_SPLIT: '256'}}}`",
        "the rung passes every probe, and prefill at its longest prompt is `better`",
    ),
    Claim("graphs", "Engram rows inside a CUDA graph", "`python -m gb10_vllm.selfcheck` in the image", '"in a CUDA graph too"'),
    Claim(
        "rows",
        "reads of Engram rows at 90 % of `fio`, small batches as well",
        "`python -m gb10_vllm.engram.rows bench FILE --threads 32` beside fio",
        "both rates",
    ),
    Claim(
        "encoder",
        "prompts as the model's own encoder renders them",
        "`docker exec -i gb10-GROUP python3 - --encoder /models/DIRECTORY/encoding.py < runtime/parity/gb10_template.py` (the file's name as it is there)",
        '"0 differ"',
    ),
    Claim("flap", "GIDs at a start after a leg's flap", "gb10.cluster.restart", "`events` in `gb10.cluster.status -e output=json`"),
    Claim(
        "ras",
        "NCCL's RAS answers at a hang",
        "`kill -STOP` one rank's engine, then gb10.cluster.evidence",
        "`nccl-ras` of the head names the rank that is silent",
    ),
    Claim("stacks", "Python stacks after a hang", "gb10.cluster.evidence, with an image that has py-spy", "a `py-spy` file of each rank"),
    Claim(
        "sudo",
        "a user with sudo instead of root",
        "gb10.cluster.acceptance, with `ansible_user` and `ansible_become: true`",
        "as with root",
    ),
)

CLAIMS = MEASURED + BY_HAND
