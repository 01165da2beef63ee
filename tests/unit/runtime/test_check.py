# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The self-check of an image, run as a member runs it: piped into a Python of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECK = (ROOT / "runtime/image/check.py").read_text()


def run(path: str = "", *arguments: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, checks and output of the program with these modules in its path."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-", *arguments], input=CHECK, capture_output=True, text=True, env=variables, check=False)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1])["checks"] if lines else {}, done.stdout + done.stderr


def package(folder: Path, name: str, files: dict[str, str], version: str = "1") -> str:
    """A synthetic package with its metadata; the path that it is found under."""
    for path, text in {"__init__.py": "", **files}.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def test_a_part_that_is_not_there_is_absent_unless_it_is_required() -> None:
    status, checks, _output = run()
    assert status == 0 and {each["result"] for each in checks.values()} == {"absent"}
    status, checks, output = run("", "--require=overlay")
    assert status == 1 and checks["overlay"]["result"] == "FAILED"
    assert "FAILED overlay: there is no Python module gb10_vllm\n" in output


def test_a_part_that_is_there_and_broken_fails_with_its_line_and_the_others_are_asked_all_the_same(tmp_path: Path) -> None:
    path = package(tmp_path, "vllm", {"__init__.py": "import no_such_extension\n"}, "0.33.0")
    status, checks, _output = run(path)
    assert status == 1
    assert checks["engine"] == {"result": "FAILED", "line": "ModuleNotFoundError: No module named 'no_such_extension'"}
    assert list(checks) == ["engine", "nccl", "library", "kernels", "engram", "overlay"]


@pytest.mark.parametrize(("version", "result"), [("0.33.0", "ok"), ("0.33.0+cpu", "ok"), ("0.32.0", "FAILED")])
def test_the_engine_is_the_release_that_the_image_was_made_for(tmp_path: Path, version: str, result: str) -> None:
    path = package(tmp_path, "vllm", {}, version)
    package(tmp_path, "torch", {"__init__.py": "__version__ = 'synthetic'\n"})
    _status, checks, _output = run(path, GB10_CHECK_ENGINE="0.33.0")
    assert checks["engine"]["result"] == result
    assert version in checks["engine"]["line"]


@pytest.mark.parametrize(
    ("held", "result"), [("NCCL_IB_SUBNET_AWARE_ROUTING\0", "ok"), ("NCCL_IB_SUBNET_AWARE_ROUTINGS\0", "FAILED"), ("", "FAILED")]
)
def test_nccl_knows_what_the_fabric_needs_or_the_build_fails(tmp_path: Path, held: str, result: str) -> None:
    library = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF" + held.encode())
    _status, checks, _output = run(str(tmp_path), GB10_CHECK_NCCL="IB_SUBNET_AWARE_ROUTING")
    assert checks["nccl"]["result"] == result


def test_an_overlay_that_does_not_know_this_engine_fails(tmp_path: Path) -> None:
    """With the overlay's own table and check."""
    path = package(tmp_path, "vllm", {}, "0.1.0")
    _status, checks, _output = run(f"{path}:{ROOT / 'runtime/overlay'}")
    assert checks["overlay"]["result"] == "FAILED" and "0.1.0" in checks["overlay"]["line"]


def test_a_check_that_does_not_exist_is_a_mistake() -> None:
    done = subprocess.run([sys.executable, "-", "--require=kernel"], input=CHECK, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no such check: kernel" in done.stderr
