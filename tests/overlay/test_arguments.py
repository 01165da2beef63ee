# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each profile's whole command line, as the plan makes it for each rank, is taken by vLLM's own parser. Those that serve in the collection's own
image name no variable that nothing in it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _serving
from ansible_collections.gb10.cluster.plugins.module_utils._topology import Member
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"DO_NOT_TRACK", "HF_HUB_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TRANSFORMERS_OFFLINE"}
"""Read by libraries of the release."""
PROFILES = sorted(path.stem for path in _inputs.PROFILES.glob("*.yml"))


@pytest.fixture(scope="module")
def parser() -> Any:
    from tests.overlay import engine

    assert engine
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    whole = FlexibleArgumentParser()
    commands = whole.add_subparsers(dest="command")
    for command in serve.cmd_init():
        command.subparser_init(commands)
    return whole


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile(parser: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = _inputs.load_profile(name)
    count = profile["parallelism"]["tensor_parallel_size"]
    ranks = [Member(f"t{rank + 1}", rank, f"198.51.100.{rank + 1}", "eth0") for rank in range(count)]
    for rank in range(count):
        command = _serving.arguments(profile, ranks, rank, 8000)
        assert command[:2] == ["vllm", "serve"]
        try:
            parsed = parser.parse_args(command[1:])
        except SystemExit:
            pytest.fail(f"rank {rank}: {capsys.readouterr().err.splitlines()[-1]}")
        assert (parsed.tensor_parallel_size, parsed.nnodes, parsed.node_rank) == (count, count, rank)
        assert bool(parsed.headless) == (rank > 0)


@pytest.mark.parametrize("name", [name for name in PROFILES if _inputs.load_profile(name)["image"]["source"]["kind"] == "build"])
def test_a_variable_is_read_by_something_in_the_own_image(name: str) -> None:
    from gb10_vllm import levers
    from vllm import envs

    image = set(re.findall(r"\b([A-Z][A-Z0-9_]+)=", (ROOT / "runtime/image/Containerfile").read_text()))
    known = {lever.variable for lever in levers.LEVERS} | image | set(envs.environment_variables) | OTHERS
    assert set(_inputs.load_profile(name)["engine"]["environment"]) <= known
