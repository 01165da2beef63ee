# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The container of a rank, through the command line that docker and podman share."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from gb10_core import _host, _proof

from gb10_node.config import RankConfig

TAIL_LINES = 40
"""Log lines kept for a failure's report: enough for a Python traceback's end and the line before it."""

KEPT_LINES = 2000
"""Log lines kept for the evidence of a failure: a start logs a few hundred."""
CHUNK = 65536
LINE_END = re.compile(r"[\r\n]")
"""Progress bars end a line by a return alone."""
STUCK_BUT_TALKING = "shm_broadcast"
"""Names the source of a line that the engine repeats every minute while a rank is stuck: no sign of life (MiaAI-Lab's two-Spark kit)."""

CLIENT_EXIT_S = 10.0
"""The engine's client follows its container's end within moments."""
ENGINE_S = 60.0
"""Time for one command of the engine, beyond what it is told to wait for."""
REMOVE_TRIES, REMOVE_PAUSE_S = 5, 2.0
"""What is busy at one moment (a mount, the engine's own clean-up) is not at the next."""
EVERY_CONTAINER = {
    # `--external`: podman keeps containers that only its storage still knows, after a crash or a full disk, and `ps --all` does not show them.
    "podman": ("ps", "--all", "--external", "--no-trunc", "--format", "{{.ID}} {{.Names}}"),
    "docker": ("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}"),
}
MONITOR = "conmon"
"""podman's process beside each container, which has the container's name after `-n`."""


class Stuck(Exception):
    """A container that cannot be removed; one sentence with its cure."""


def run_arguments(config: RankConfig, env_file: Path) -> list[str]:
    """Argument vector of the engine that runs this rank in the foreground.

    The environment goes through a file: a command line is public to every process of the member, and the API key is in it.
    """
    c = config.container
    argv = [config.engine, "run", "--name", c.name, "--network", "host", "--env-file", str(env_file)]
    argv += ["--shm-size", f"{c.shm_mib}m", "--memory", f"{c.memory_mib}m", "--oom-score-adj", str(c.oom_score_adj)]
    # The journal keeps the log: a second copy by the engine would grow without limit beside it.
    argv += ["--log-driver", "none"]
    for name in c.capabilities:
        argv += ["--cap-add", name]
    for name, value in sorted(c.ulimits.items()):
        argv += ["--ulimit", f"{name}={value}"]
    for device in c.devices:
        argv += ["--device", device]
    if c.gpus:
        argv += ["--gpus", "all"] if config.engine == "docker" else ["--device", "nvidia.com/gpu=all"]
    for volume in c.volumes:
        argv += ["--volume", f"{volume['source']}:{volume['target']}{':ro' if volume['read_only'] else ''}"]
    # Published images start `vllm serve`, or a script, by themselves: the command is the plan's, whole.
    return [*argv, "--entrypoint", c.command[0], c.image, *c.command[1:]]


def write_environment(config: RankConfig, path: Path, found: Mapping[str, str]) -> None:
    """Write the container's environment file, readable by root alone: the plan's, what this start found out, and on the head the API key."""
    environment = {**config.container.environment, **found}
    if config.api_key:
        environment["VLLM_API_KEY"] = config.api_key
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(f"{name}={value}\n" for name, value in sorted(environment.items()))


def named(listed: str) -> set[str]:
    """The names in a list of containers; docker gives one several, with commas."""
    return {name for line in listed.splitlines() for name in line.partition(" ")[2].strip().split(",")}


def monitors(name: str, procfs: str) -> list[int]:
    """podman's processes beside containers of this name."""
    command_lines = {int(pid): _host.read(f"{procfs}/{pid}/cmdline") or "" for pid in _host.names(procfs) if pid.isdigit()}
    return [pid for pid, line in command_lines.items() if Path(line.partition("\0")[0]).name == MONITOR and f"\0-n\0{name}\0" in line]


def end_orphans(pids: Sequence[int], procfs: str) -> None:
    """Kill what runs on of a container that its engine has forgotten: it holds the memory and the ports that the next start needs."""
    for pid in pids:
        orphans = _host.descendants(pid, procfs)
        print(f"gb10: kills the processes {orphans} of an earlier container, which its engine has forgotten", flush=True)
        for orphan in orphans[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


class RankContainer:
    """A running container: its output goes to this process's own (the journal), its last lines are kept."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.grace_s = config.stop_s
        self.log: deque[str] = deque(maxlen=KEPT_LINES)
        self.heard_at = time.monotonic()
        self._awaited = {name: re.compile(pattern) for name, pattern in config.start.log_lines.items()}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def tail(self) -> list[str]:
        """The last log lines."""
        return list(self.log)[-TAIL_LINES:]

    @property
    def unsaid(self) -> list[str]:
        """What the plan wants to be logged and was not yet, by name."""
        return sorted(self._awaited)

    async def start(self, found: Mapping[str, str]) -> None:
        """Run, with what the checks before this start found out in the environment."""
        for volume in self.config.container.volumes:
            if not volume["read_only"]:  # a cache's folder; podman does not make it, as docker does
                Path(volume["source"]).mkdir(parents=True, exist_ok=True)
        env_file = self.config.run_dir / "rank.env"
        write_environment(self.config, env_file, found)
        self._process = await asyncio.create_subprocess_exec(
            *run_arguments(self.config, env_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._relay(self._process))

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what is read as it comes; a line is kept once it is whole, for a part of a secret would not be known as one."""
        assert process.stdout is not None
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while chunk := await process.stdout.read(CHUNK):
            text = decoder.decode(chunk)
            print(text, end="", flush=True)
            *whole, rest = LINE_END.split(rest + text)
            lines = [line for line in whole if line.strip()]
            self.log.extend(lines)
            self._awaited = {name: line for name, line in self._awaited.items() if not any(map(line.search, lines))}
            if any(STUCK_BUT_TALKING not in line for line in lines or [rest]):
                self.heard_at = time.monotonic()
            if len(rest) > CHUNK:  # no end in sight
                self.log.append(rest)
                rest = ""
        if rest.strip():
            self.log.append(rest)

    async def wait(self) -> int:
        """Exit status of the container, once its output is read to the end."""
        assert self._process is not None and self._reader is not None
        status = await self._process.wait()
        await self._reader
        return status

    async def first_process(self) -> int:
        """Process id of what the container runs; 0 while it does not run."""
        shown = await self._engine(*_proof.container_argv(self.config.engine, self.config.container.name)[1:])
        return _proof.container(shown.out)[0]

    async def over_memory(self) -> bool:
        """Of a container that exited: whether one of its processes was killed for going over the memory limit."""
        return (await self._engine("inspect", "--format", "{{.State.OOMKilled}}", self.config.container.name)).out.strip() == "true"

    async def stop(self) -> None:
        """Ask, wait `grace_s`, kill; nothing of the container is left afterwards."""
        process = self._process
        if process is not None and process.returncode is None:
            await self._engine("stop", "-t", str(int(self.grace_s)), self.config.container.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLIENT_EXIT_S)
            if process.returncode is None:
                # The engine had not made the container yet, or cannot stop it: podman stops nothing while the disk is full.
                await self._kill()
                process.terminate()
        try:
            await self.remove()
        except Stuck as left:  # the next start tries again, and says so where it cannot either
            print(f"gb10: {left}", flush=True)
        if process is not None:
            await self.wait()

    async def _kill(self) -> None:
        """End the container's first process, and with it all of them, without the engine."""
        if pid := await self.first_process():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def remove(self) -> None:
        """Remove whatever bears the container's name, in whatever state an earlier life left it; raises Stuck where something stays."""
        engine, name = self.config.engine, self.config.container.name
        for attempt in range(REMOVE_TRIES):
            if attempt:
                await asyncio.sleep(REMOVE_PAUSE_S)
            removed = await self._engine("rm", "--force", name)
            listed = await self._engine(*EVERY_CONTAINER.get(Path(engine).name, EVERY_CONTAINER["docker"]))
            if not listed.status and name not in named(listed.out):
                if monitors(name, self.config.procfs):
                    await asyncio.sleep(REMOVE_PAUSE_S)  # that of a container which has just ended goes by itself
                    end_orphans(monitors(name, self.config.procfs), self.config.procfs)
                return
        raise Stuck(
            f"an earlier container {name} cannot be removed ({(listed if listed.status else removed).message}): see that the disk has room, then "
            f"run {engine} rm --force {name} on this member, and where that does not help, reboot it"
        )

    async def _engine(self, *arguments: str) -> _host.Result:
        """What a command of the engine left."""
        return await asyncio.to_thread(_host.run, [self.config.engine, *arguments], self.grace_s + ENGINE_S)
