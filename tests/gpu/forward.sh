#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Whole forward passes of vLLM's engine with the plugin on the GPU of this machine: tests/gpu/forward.sh [RUN ...]
# What it leaves in forward.json is kept as kernels/results/h200-forward.json; tools/pages makes the pages' tables of it.
# Needs nvcc and a C compiler, and a Python with PyTorch for CUDA and vLLM's CUDA wheel with what that needs.
set -euo pipefail
# shellcheck source=tests/gpu/overlay_env.sh
source "$(dirname "$0")/overlay_env.sh"
export VLLM_PLUGINS=gb10_vllm,forward VLLM_NO_USAGE_STATS=1 VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_WORKER_MULTIPROC_METHOD=spawn TOKENIZERS_PARALLELISM=false
python3 -m gb10_vllm.selfcheck
python3 -m tests.gpu.forward "$OUT" "$@"
