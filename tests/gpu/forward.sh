#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Whole forward passes of vLLM's engine with the plugin on the GPU of this machine: tests/gpu/forward.sh [RUN ...]
# What it leaves in forward.json is kept as kernels/results/h200-forward.json.
# Needs nvcc and a C compiler, and a Python with PyTorch for CUDA and vLLM's CUDA wheel with what that needs. Results go to $OUT (tests/output/gpu).
# The library is built unless GB10_EXL3_LIBRARY names one.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-tests/output/gpu}
mkdir -p "$OUT"
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
mkdir -p "$build/ansible_collections/gb10" "$build/gb10_vllm-0.dist-info"
ln -s "$PWD" "$build/ansible_collections/gb10/cluster"
# The entry point that a wheel of the plugin would bring, and that of the harness.
printf 'Metadata-Version: 2.1\nName: gb10-vllm\nVersion: 0\n' >"$build/gb10_vllm-0.dist-info/METADATA"
printf '[vllm.general_plugins]\ngb10_vllm = gb10_vllm:register\nforward = tests.gpu.forward:harness\n' >"$build/gb10_vllm-0.dist-info/entry_points.txt"
export PYTHONPATH=$PWD:$PWD/runtime/overlay:$PWD/kernels/exl3:$build${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export VLLM_PLUGINS=gb10_vllm,forward VLLM_NO_USAGE_STATS=1 VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_WORKER_MULTIPROC_METHOD=spawn TOKENIZERS_PARALLELISM=false

if [[ -z ${GB10_EXL3_LIBRARY:-} ]]; then
    export GB10_EXL3_LIBRARY=$build/libgb10_exl3.so
    arch=$(python3 -c 'import torch; print("sm_%d%da" % torch.cuda.get_device_capability())')
    python3 -m gb10_exl3.native --arch "$arch" --output "$GB10_EXL3_LIBRARY"
fi
python3 -m gb10_vllm.selfcheck 2>&1 | tail -3
python3 -m tests.gpu.forward "$OUT" "$@"
