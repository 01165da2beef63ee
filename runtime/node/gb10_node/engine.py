# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The container of a rank, through the command line that docker and podman share."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

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


class RankContainer:
    """A running container: its output goes to this process's own (the journal), its last lines are kept."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.grace_s = config.stop_s
        self.log: deque[str] = deque(maxlen=KEPT_LINES)
        self.heard_at = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def tail(self) -> list[str]:
        """The last log lines."""
        return list(self.log)[-TAIL_LINES:]

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

    async def over_memory(self) -> bool:
        """Of a container that exited: whether one of its processes was killed for going over the memory limit."""
        return await self._engine("inspect", "--format", "{{.State.OOMKilled}}", self.config.container.name) == "true"

    async def stop(self) -> None:
        """Ask, wait `grace_s`, kill; nothing of the container is left afterwards."""
        process = self._process
        if process is not None and process.returncode is None:
            await self._engine("stop", "-t", str(int(self.grace_s)), self.config.container.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLIENT_EXIT_S)
            if process.returncode is None:  # stopped before the engine had made the container: end the engine's client itself
                process.terminate()
        await self.remove()
        if process is not None:
            await self.wait()

    async def remove(self) -> None:
        """Remove the container by name, if there is one: also what a killed start left."""
        await self._engine("rm", "--force", self.config.container.name)

    async def _engine(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            self.config.engine, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        return (await process.communicate())[0].decode("utf-8", "replace").strip()
