# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plugin in vLLM's own processes: found, qualified or refused, and out of the way of other models."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gb10_vllm import levers, qualification
from gb10_vllm.errors import OverlayError

PACKAGE = Path(qualification.__file__).parent
VERSION, FOLDER = qualification.installed()
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins(); print('went on')"


def vllm(program: str, package: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own; `package`: the folder that holds another gb10_vllm."""
    paths = [str(package)] if package else []
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *sys.path]), "VLLM_TARGET_DEVICE": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, env=variables, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the plugin, to break."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_vllm_finds_it_and_other_models_are_left_alone() -> None:
    done = vllm(
        LOAD
        + """
import gb10_vllm
gb10_vllm.register()
gb10_vllm.register()
from vllm.model_executor.custom_op import op_registry_oot
from vllm.transformers_utils.config import _CONFIG_REGISTRY
import sys
print(_CONFIG_REGISTRY["deepseek_v41"].__name__, op_registry_oot, "gb10_vllm.model" in sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "Gb10DeepseekV41Config {} False"


def test_another_vllm_ends_the_process(package: Path) -> None:
    (package / "gb10_vllm/qualified.json").write_text('{"0.1.0": {}}')
    done = vllm(LOAD, package)
    assert done.returncode == 1
    assert f"OverlayError: vLLM {VERSION} is not qualified for gb10_vllm (0.1.0 are)" in done.stderr
    assert "went on" not in done.stdout


def test_a_plugin_that_cannot_be_imported_ends_the_process(package: Path) -> None:
    """Only because the entry module imports nothing: what fails there, vLLM ignores."""
    (package / "gb10_vllm/plugin.py").write_text("this is no Python\n")
    done = vllm(LOAD, package)
    assert done.returncode == 1 and "SyntaxError" in done.stderr


def test_a_plugin_that_is_not_there_leaves_a_checkpoint_that_vllm_refuses(package: Path, checkpoint: Any) -> None:
    (package / "gb10_vllm/__init__.py").write_text("this is no Python\n")
    folder, _tensors = checkpoint("experts")
    program = f"""
{LOAD}
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model={str(folder)!r}, max_model_len=1024).create_engine_config()
print("configured")
"""
    done = vllm(program, package, HF_HUB_OFFLINE="1")
    assert "went on" in done.stdout and "configured" not in done.stdout
    assert "Unknown quantization method: exl3" in done.stderr, done.stderr[-2000:]


def test_the_entry_module_imports_nothing() -> None:
    text = (PACKAGE / "__init__.py").read_text()
    outside = [line for line in text.splitlines() if re.match(r"(import|from) ", line)]
    assert outside == ["from __future__ import annotations"]


def test_this_vllm_is_the_qualified_one() -> None:
    qualification.check(VERSION, FOLDER, qualification.table())


@pytest.mark.parametrize("symbol", [qualification.SYMBOLS[0], "models.deepseek_v41.common.engram:Engram"])
def test_a_definition_that_moved_or_changed_is_named(tmp_path: Path, symbol: str) -> None:
    module, name = symbol.split(":")
    relative = Path(*module.split("."))
    source = FOLDER / relative / "__init__.py" if (FOLDER / relative).is_dir() else (FOLDER / relative).with_suffix(".py")
    for other in {one.split(":")[0] for one in qualification.SYMBOLS}:
        path = Path(*other.split("."))
        path = path / "__init__.py" if (FOLDER / path).is_dir() else path.with_suffix(".py")
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / path, tmp_path / path)
    qualified = qualification.table()
    qualification.check(VERSION, tmp_path, qualified)
    changed = tmp_path / source.relative_to(FOLDER)
    text = changed.read_text()
    changed.write_text(re.sub(rf"((?:class|def) {name}\b)", r"\1_moved", text, count=1))
    with pytest.raises(OverlayError, match=rf"says that it is vLLM {VERSION}, but its {re.escape(symbol)} is not that of the release"):
        qualification.check(VERSION, tmp_path, qualified)
    assert qualification.changed(qualification.fingerprints(tmp_path), qualified[VERSION]) == [symbol]


def test_the_levers_are_whole_and_say_what_they_do() -> None:
    assert len({lever.variable for lever in levers.LEVERS}) == len(levers.LEVERS)
    for lever in levers.LEVERS:
        re.compile(lever.proof)


def test_the_wheel_has_all_that_runs(tmp_path: Path) -> None:
    source = tmp_path / "overlay"
    shutil.copytree(PACKAGE.parent, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".json")}
    assert sources <= set(names)
    points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "[vllm.general_plugins]\ngb10_vllm = gb10_vllm:register" in zipfile.ZipFile(wheel).read(points).decode()


def test_the_selfcheck(package: Path) -> None:
    program = "import runpy; runpy.run_module('gb10_vllm.selfcheck', run_name='__main__')"
    done = vllm(program)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.splitlines()[0] == f"ok      vLLM {VERSION} is qualified"
    assert done.stdout.splitlines()[1].startswith("ok      Engram rows from disk are right (")
    table = package / "gb10_vllm/engram/rows.c"
    table.write_text(table.read_text().replace("memcpy(scales, both + WIDTH, SCALES);", "memset(scales, 127, SCALES);", 1))
    done = vllm(program, package)
    assert (done.returncode, done.stdout.splitlines()[-1][:40]) == (1, "FAILED  Engram rows read eagerly are not")
