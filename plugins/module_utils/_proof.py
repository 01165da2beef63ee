# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank's processes really run with, against what they were given. Values of variables are compared and never shown."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")

MORE = ("CUDA_", "GLOO_", "NCCL_", "TORCH_", "VLLM_")
"""Beginnings of variables that steer an engine: one that nobody gave comes from the image or a hook."""


@dataclass(frozen=True)
class Process:
    """A process of the container: its number on the member, its arguments, and its variables; none where it has overwritten them with its title."""

    pid: int
    arguments: Sequence[str]
    environment: Mapping[str, str]


def is_secret(name: str) -> bool:
    """Whether a variable of this name counts as a secret, whose value goes nowhere."""
    return _SECRET.search(name.upper()) is not None


def container_argv(engine: str, name: str) -> list[str]:
    """Asks an engine for what `container` reads."""
    return [engine, "inspect", "--format", "{{.State.Pid}} {{.Image}}", name]


def container(shown: str) -> tuple[int, str]:
    """Process and image of a running container; 0 and nothing where none runs."""
    pid, _gap, image = shown.strip().partition(" ")
    return (int(pid), image) if pid.isdigit() and int(pid) else (0, "")


def arguments_of(cmdline: bytes) -> list[str]:
    """/proc/PID/cmdline as words. A process that has set a title has one word, padded."""
    return [word.decode("utf-8", "replace") for word in cmdline.rstrip(b"\0 ").split(b"\0")]


def environment_of(environ: bytes) -> dict[str, str]:
    """/proc/PID/environ as a mapping."""
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in environ.split(b"\0") if b"=" in entry)
    return {name: value for name, dummy, value in pairs}


def given(env_file: str) -> dict[str, str]:
    """Variables of an engine's environment file."""
    return {name: value for name, dummy, value in (line.partition("=") for line in env_file.splitlines() if line)}


def digest(environment: Mapping[str, str]) -> str:
    """One hash over variables, by which members can be compared without a value."""
    return hashlib.sha256("\0".join(f"{name}={value}" for name, value in sorted(environment.items())).encode()).hexdigest()[:16]


def judge(
    wanted: Mapping[str, Any], environment: Mapping[str, str], image: str, processes: Sequence[Process]
) -> tuple[list[str], dict[str, Any]]:
    """What differs, in words, and what was seen. `wanted`: the container of rank.json; `environment`: what it was given; `image`: what runs.

    The first process is the container's own; its last words are the planned command but for the program, which a script's line names
    otherwise. Children of the engine overwrite theirs with a title.
    """
    problems = []
    if image.removeprefix("sha256:") != str(wanted["image"]).removeprefix("sha256:"):
        problems.append(f"image {image} runs instead of {wanted['image']}")
    first, command = processes[0], [str(word) for word in wanted["command"]]
    tail = list(first.arguments)[-len(command) + 1 :] if len(command) > 1 else []
    if tail != command[1:]:
        extra = [word for word in tail if word not in command] or [word for word in command[1:] if word not in tail]
        problems.append(f"process {first.pid} has other arguments than planned, the first is {extra[0] if extra else 'their order'}")
    for process in processes:
        if not process.environment:
            continue
        for name, value in sorted(environment.items()):
            if process.environment.get(name) != value:
                what = "another value of" if name in process.environment else "no"
                problems.append(f"process {process.pid} has {what} {name}")
    steering = {name: value for name, value in first.environment.items() if name.startswith(MORE)}
    return problems, {
        "image": image,
        "arguments": list(first.arguments),
        "variables": sorted(steering.keys() | environment.keys()),
        "not_given": sorted(steering.keys() - environment.keys()),
        "environment": digest({name: first.environment.get(name, "") for name in environment}),
        "processes": [{"pid": each.pid, "title": each.arguments[0], "read": bool(each.environment)} for each in processes],
    }
