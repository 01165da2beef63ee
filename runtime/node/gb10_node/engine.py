# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The container of a rank, through the command line that docker and podman share."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from pathlib import Path

from gb10_node.config import RankConfig

TAIL_LINES = 40
"""Log lines kept for a failure's report: enough for a Python traceback's end and the line before it."""

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
    return [*argv, c.image, *c.command]


def write_environment(config: RankConfig, path: Path) -> None:
    """Write the container's environment file, readable by root alone; the head's holds the API key."""
    environment = dict(config.container.environment)
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
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Remove what a killed start left under our name, then run."""
        await self.remove()
        for volume in self.config.container.volumes:
            if not volume["read_only"]:  # a cache's folder; podman does not make it, as docker does
                Path(volume["source"]).mkdir(parents=True, exist_ok=True)
        env_file = self.config.run_dir / "rank.env"
        write_environment(self.config, env_file)
        self._process = await asyncio.create_subprocess_exec(
            *run_arguments(self.config, env_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._relay(self._process))

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while chunk := await process.stdout.read(65536):
            text = chunk.decode("utf-8", "replace")
            print(text, end="", flush=True)
            self.tail.extend(line for line in text.splitlines() if line.strip())

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
        """Remove the container by name, if there is one."""
        await self._engine("rm", "--force", self.config.container.name)

    async def _engine(self, *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            self.config.engine, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        return (await process.communicate())[0].decode("utf-8", "replace").strip()
