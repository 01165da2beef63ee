# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""What an image must be able to do, asked inside of it: python3 check.py [--gpu] [--require NAME,NAME]

One line per check, `ok`, `absent` or `FAILED`, then one JSON line; status 1 if a check fails, or one of the required is absent. It is piped
into images that do not hold it, so it is one file and imports nothing that is not Python's own before a check needs it.

On a GPU the kernels run against their reference; without one the reference runs against its stored vectors.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import mmap
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

LAYER_BOUND = 2.0**-9
"""Of a layer computed in float64 against the one stored as halves."""


class Absent(Exception):
    """The image does not hold this part at all."""


def need(module: str) -> Any:
    """A module, imported. Raises Absent where the image has none of that name; one that is there and broken fails."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise Absent(f"there is no Python module {module.partition('.')[0]}")
    return importlib.import_module(module)


def check_engine() -> str:
    """vLLM imports and is the release that the image was made for."""
    need("vllm")
    found, wanted = metadata.version("vllm"), os.environ.get("GB10_CHECK_ENGINE", "")
    if wanted and found.partition("+")[0] != wanted:
        raise ValueError(f"vllm is {found}, the image was made for {wanted}")
    return f"vllm {found}, torch {need('torch').__version__}"


def check_gpu() -> str:
    """PyTorch reaches the GPU and gets a right sum from it."""
    torch = need("torch")
    if not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU: is the container given one, and does the driver know the image's CUDA")
    total = torch.arange(4096, device="cuda").sum().item()
    if total != 4096 * 4095 // 2:
        raise ValueError(f"the GPU adds 0 to 4095 up to {total}")
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, capability {major}.{minor}, CUDA {torch.version.cuda}"


def check_nccl() -> str:
    """The NCCL that PyTorch loads knows what the fabric needs: a library ignores variables that it does not know."""
    # Not need(): the folder of NVIDIA's wheels is a namespace, which every part of CUDA shares.
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [file for place in places for file in Path(place).glob("**/libnccl.so.2")]
    if not files:
        raise Absent("there is no libnccl.so.2 beside PyTorch")
    wanted = os.environ.get("GB10_CHECK_NCCL", "").split()
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            lacking = [name for name in wanted if content.find(f"NCCL_{name}\0".encode()) < 0]
        if lacking:
            raise ValueError(f"{path} does not know NCCL_{' and NCCL_'.join(lacking)}")
    return f"{files[0]} knows {' '.join(wanted) or 'what it knows: nothing was asked for'}"


def check_library() -> str:
    """The CUDA library of the kernels loads."""
    native = need("gb10_exl3.native")
    path = Path(os.environ.get("GB10_EXL3_LIBRARY", native.DEFAULT))
    if not path.is_file():
        raise Absent(f"there is no {path}")
    native.library()
    return str(path)


def check_kernels(gpu: bool) -> str:
    """EXL3: every op against the reference on a GPU, else the reference against the stored tiles and the stored layer."""
    need("gb10_exl3")
    selfcheck = need("gb10_exl3.selfcheck")
    if gpu:
        failed = {name: value for name, (check, bound) in selfcheck.CHECKS.items() if not (value := check()) <= bound}
        if failed:
            raise ValueError(f"beyond their bounds: {', '.join(f'{name} by {value:.3g}' for name, value in failed.items())}")
        return f"{len(selfcheck.CHECKS)} checks on the GPU"
    numpy = need("numpy")
    layer, x, wanted = selfcheck.stored_layer()
    error = float(numpy.linalg.norm(layer.linear(x) - wanted) / numpy.linalg.norm(wanted))
    if not error <= LAYER_BOUND:  # so that NaN is none  # pylint: disable=unnecessary-negation
        raise ValueError(f"the reference is {error:.3g} off the stored layer, more than {LAYER_BOUND:.3g}")
    return f"reference, {error:.2g} off the stored layer"


def check_engram() -> str:
    """Rows of the Engram tables as the reference decodes them and as PyTorch does. The GPU's own gather is one of the kernels' checks."""
    rows = need("gb10_exl3.format").engram_rows
    numpy, torch = need("numpy"), need("torch")
    rng = numpy.random.default_rng(3)
    # 127 and 255 of e4m3 are no numbers; scales are powers of two around one.
    weight = rng.integers(0, 255, (64, 256), numpy.uint8)
    weight[weight % 128 == 127] = 0
    scale = rng.integers(100, 140, (64, 8), numpy.uint8)
    values = torch.from_numpy(weight).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    wanted = values * numpy.repeat(2.0 ** (scale.astype(numpy.float64) - 127), 32, axis=1)
    wrong = int((rows(weight, scale) != wanted).sum())
    if wrong:
        raise ValueError(f"{wrong} of {wanted.size} values differ from PyTorch's")
    return f"{wanted.size} values equal PyTorch's"


def check_overlay() -> str:
    """The overlay's table has this vLLM, and what it builds on there is unchanged."""
    qualification = need("gb10_vllm.qualification")
    version, folder = qualification.installed()
    qualification.check(version, folder, qualification.table())
    return f"gb10_vllm {metadata.version('gb10_vllm')} qualifies vLLM {version}"


def checks(gpu: bool) -> dict[str, Callable[[], str]]:
    """All checks by name, in their order."""
    found: dict[str, Callable[[], str]] = {"engine": check_engine}
    if gpu:
        found["gpu"] = check_gpu
    return {
        **found,
        "nccl": check_nccl,
        "library": check_library,
        "kernels": lambda: check_kernels(gpu),
        "engram": check_engram,
        "overlay": check_overlay,
    }


def run(gpu: bool, required: set[str]) -> dict[str, dict[str, str]]:
    """Every check, whatever the others say: its result and one line about it."""
    results = {}
    for name, check in checks(gpu).items():
        try:
            results[name] = {"result": "ok", "line": check()}
        except Absent as error:
            results[name] = {"result": "FAILED" if name in required else "absent", "line": str(error)}
        # What fails here is anything that an image can get wrong: a missing symbol, a CUDA error, a wrong number.
        except Exception as error:
            results[name] = {"result": "FAILED", "line": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(f"{results[name]['result']:6} {name}: {results[name]['line']}", flush=True)
    return results


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the container has a GPU")
    parser.add_argument("--require", default="", help="checks whose part must be there, with commas between them")
    options = parser.parse_args()
    required = set(filter(None, options.require.split(",")))
    unknown = required - set(checks(True))
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    results = run(options.gpu, required | ({"gpu"} if options.gpu else set()))
    print(json.dumps({"gpu": options.gpu, "checks": results}))
    return int(any(each["result"] == "FAILED" for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
