# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""These tests run in the environment that tools/overlay makes: the real vLLM on a CPU build of PyTorch, and the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.overlay import checkpoints, models


@pytest.fixture(scope="session")
def plugin() -> None:
    """The plugin, registered in the process that ranks are forked from, with all modules that they would import."""
    from tests.overlay import engine

    assert engine
    import gb10_vllm

    gb10_vllm.register()
    import gb10_vllm.model
    from vllm.models.deepseek_v41.nvidia import dspark

    assert gb10_vllm.model and dspark


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that stands in for the release's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    models.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> object:
    """Folder and tensors of a kind of checkpoint; each is written once."""
    made: dict[str, tuple[Path, checkpoints.Tensors]] = {}

    def make(kind: str) -> tuple[Path, checkpoints.Tensors]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, checkpoints.write(folder, kind, tokenizer)
        return made[kind]

    return make
