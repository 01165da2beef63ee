# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What tests of the storage role's parts share: modules run as Ansible runs them, and safetensors files made to measure."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gb10.cluster.plugins.module_utils._safetensors import BITS

Module = Callable[..., dict[str, Any]]
Writer = Callable[..., Path]


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str]) -> Module:
    """Runs a module of the collection; returns its result, a failed one's with `failed`."""

    def run(name: str, check: bool = False, **options: Any) -> dict[str, Any]:
        module = importlib.import_module(f"ansible_collections.gb10.cluster.plugins.modules.{name}")
        arguments = {**options, "_ansible_check_mode": check, "_ansible_diff": True}
        with patch_module_args(json.loads(json.dumps(arguments, default=str))), pytest.raises(SystemExit):
            module.main()
        result = json.loads(capsys.readouterr().out)
        if result.get("failed"):
            assert "\n" not in result["msg"]
        return result

    return run


@pytest.fixture
def write_tensors() -> Writer:
    """Writes a safetensors file with these tensors (dtype, shape) and data, by default a hole of the right size."""

    def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: bytes = b"") -> Path:
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + data)
            file.truncate(8 + len(text) + end)
        return path

    return write
