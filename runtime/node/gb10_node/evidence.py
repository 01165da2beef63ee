# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What a member keeps of a failure: one folder per event, with one name on all members, bounded in size and number, without secrets.

It is taken while the container still stands where it does: stacks of a rank that hangs are what nobody sees afterwards.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gb10_core import _host, _proof, _roce

from gb10_node.config import RankConfig

FAILED_START, FAILED_RUN, HANG = "failed-start", "failed-run", "hang"
KEPT = 10
"""Folders of a group; the oldest go first."""
FILE_LIMIT = 1 << 20
"""Bytes of one file; of a longer one the end is kept, where the cause is."""
PROCESSES = 16
"""Processes whose stacks are taken: a rank has a few, its compilers may be many."""
STACKS_S, ENGINE_S = 60.0, 20.0
"""Time for all stacks, and for one command of the engine."""
RAS_ADDRESS, RAS_S = "localhost:28028", 20.0
"""Where NCCL's RAS answers unless NCCL_RAS_ADDR says otherwise (NCCL 2.24 and later), and the time for all of its answer: it waits 5 s for a rank."""
HIDDEN = "(hidden)"


def event_name(kind: str, now: float) -> str:
    """The name of an event's folder: when, in UTC, and what."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{kind}"


@dataclass(frozen=True)
class Evidence:
    """What happened, as every rank knows it."""

    event: str
    reason: str
    culprit: str
    log: Iterable[str]


def collect(config: RankConfig, what: Evidence) -> Path:
    """Write this member's folder of an event. What cannot be had is left out: nothing here may keep a group from ending."""
    folder = config.evidence / what.event
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    hide = _hider(config)
    parts: dict[str, Callable[[], str]] = {
        "event.json": lambda: _event(config, what),
        "rank.log": lambda: "\n".join(what.log) + "\n",
        "meminfo": lambda: Path(f"{config.procfs}/meminfo").read_text(encoding="utf-8"),
        "gids": lambda: _gids(config),
        "state.json": lambda: (config.run_dir / "state.json").read_text(encoding="utf-8"),
        "rank.json": lambda: _plan(config),
        "environment": lambda: _environment(config.run_dir / "rank.env"),
        "nccl.log": lambda: "".join(f"{line}\n" for line in what.log if "NCCL" in line) or "no line of NCCL\n",
        "nccl-ras": lambda: _ras(config.container.environment),
        "sockets": lambda: _said("ss", "--numeric", "--tcp", "--info", "--oneline"),
        "queue-pairs": lambda: _said("rdma", "resource", "show", "qp"),
        "stacks": lambda: _stacks(config),
    }
    for name, part in parts.items():
        try:
            text = hide(part())
        except (OSError, ValueError) as error:
            text = f"cannot be had: {error}\n"
        _host.write(folder / name, text.encode()[-FILE_LIMIT:], 0o600)
    for old in sorted(path for path in config.evidence.iterdir() if path.is_dir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _hider(config: RankConfig) -> Callable[[str], str]:
    """Takes every secret out of a text, wherever it stands in it."""
    secrets = [value for name, value in config.container.environment.items() if _proof.is_secret(name)]
    found = [value for value in (*secrets, config.api_key or "") if len(value) > 3]

    def hide(text: str) -> str:
        for secret in found:
            text = text.replace(secret, HIDDEN)
        return text

    return hide


def _event(config: RankConfig, what: Evidence) -> str:
    return json.dumps(
        {
            "event": what.event,
            "at": time.time(),
            "group": config.group,
            "member": config.me.member,
            "rank": config.rank,
            "reason": what.reason,
            "culprit": what.culprit,
            "digest": config.digest,
            "image": config.container.image,
        },
        indent=1,
    )


def _said(*command: str) -> str:
    """What a command of the member prints."""
    done = _host.run(command, ENGINE_S)
    return f"{command[0]}: {done.message}\n" if done.status else done.out


def _ras(environment: Mapping[str, str]) -> str:
    """What NCCL's own observers know of all ranks and communicators; the container has the member's network."""
    if environment.get("NCCL_RAS_ENABLE") == "0":
        return "off (NCCL_RAS_ENABLE=0)\n"
    host, _colon, port = environment.get("NCCL_RAS_ADDR", RAS_ADDRESS).rpartition(":")
    deadline, said = time.monotonic() + RAS_S, b""
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), RAS_S) as ras:
        ras.sendall(b"verbose status\n")
        while len(said) < FILE_LIMIT and (left := deadline - time.monotonic()) > 0:
            ras.settimeout(left)
            try:
                part = ras.recv(1 << 16)
            except TimeoutError:
                part = b""
            if not part:
                break
            said += part
    return said.decode("utf-8", "replace")


def _gids(config: RankConfig) -> str:
    """Each HCA with its state and its whole table."""
    hcas = _roce.read_hcas(config.start.sysfs).values()
    lines = [f"{hca.name} {hca.netdev} {hca.state}\n" + "".join(f"  {gid} on {gid.netdev}\n" for gid in hca.gids) for hca in hcas]
    return "".join(lines) or "no HCA\n"


def _plan(config: RankConfig) -> str:
    """This rank's part of the plan, as the supervisor took it in; its environment is in a file of its own."""
    container = {key: value for key, value in vars(config.container).items() if key != "environment"}
    shown = {"group": config.group, "rank": config.rank, "digest": config.digest, "engine": config.engine, "container": container}
    return json.dumps(shown | {"start": vars(config.start)}, indent=1, default=str)


def _environment(path: Path) -> str:
    """What the container was given, secrets by their names alone."""
    given = _proof.given(path.read_text(encoding="utf-8"))
    return "".join(f"{name}={HIDDEN if _proof.is_secret(name) else value}\n" for name, value in given.items())


def _stacks(config: RankConfig) -> str:
    """Of each process of the container its state, where it waits in the kernel, and its Python stacks where the image has py-spy."""
    name, procfs = config.container.name, config.procfs
    root = _proof.container(_host.run(_proof.container_argv(config.engine, name), ENGINE_S).out)[0]
    if not root:
        return "no container runs\n"
    deadline, blocks = time.monotonic() + STACKS_S, []
    for pid in _host.descendants(root, procfs)[:PROCESSES]:
        status = dict(line.partition(":")[::2] for line in (_host.read(f"{procfs}/{pid}/status") or "").splitlines())
        inner = (status.get("NSpid") or "").split()
        blocks.append(f"== pid {pid} ({status.get('Name', '?').strip()}), state {status.get('State', '?').strip()}")
        blocks.append("-- kernel\n" + (_host.read(f"{procfs}/{pid}/stack") or "not readable"))
        if inner and time.monotonic() < deadline:
            # Privileged is this one command and not the container, which has no right to trace.
            command = [config.engine, "exec", "--privileged", name, "py-spy", "dump", "--pid", inner[-1]]
            done = _host.run(command, ENGINE_S)
            blocks.append("-- python\n" + (done.out if not done.status else f"py-spy: {done.message}"))
    return "\n".join(blocks) + "\n"
