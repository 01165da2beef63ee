#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Compiles the kernels for both targets, without a GPU, and compares registers, spills, shared memory and instructions per tile
# with kernels/results/resources.json. Takes nvcc 13.0.88 from PATH, or else from its wheels into tests/output/nvcc.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $(nvcc --version 2>/dev/null) != *V13.0.88* ]]; then
    target=$PWD/tests/output/nvcc
    [[ -d $target ]] || python3 -m pip install -q --no-deps --target "$target" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    # The wheels have no lib64, where the linker looks for the runtime.
    [[ -e $target/nvidia/cu13/lib64 ]] || ln -s lib "$target/nvidia/cu13/lib64"
    export PATH=$target/nvidia/cu13/bin:$PATH
fi
output=$(mktemp -d)
trap 'rm -r "$output"' EXIT
PYTHONPATH=kernels/exl3 python3 -m gb10_exl3.native --output "$output/libgb10_exl3.so" --check kernels/results/resources.json
