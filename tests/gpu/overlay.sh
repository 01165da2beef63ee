#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# The vLLM plugin's layers on the GPU of this machine: numbers against float64, graphs, loading, Engram rows, then a rank of the full-size model:
# tests/gpu/overlay.sh. What it leaves in overlay.json is kept as kernels/results/h200-overlay.json; tools/pages makes the pages' tables of it.
# Needs nvcc, and a Python with PyTorch for CUDA and vLLM as tools/overlay installs it.
set -euo pipefail
# shellcheck source=tests/gpu/overlay_env.sh
source "$(dirname "$0")/overlay_env.sh"
export VLLM_TARGET_DEVICE=cpu VLLM_PLUGINS=gb10_vllm GB10_TEST_DEVICE=cuda
failed=0
python3 -m gb10_vllm.selfcheck 2>&1 | tee "$OUT/overlay-selfcheck.txt" || failed=1
python3 -m pytest -c tests/overlay/pytest.ini --rootdir . tests/overlay/test_{numbers,loading,engram,gpu}.py --junitxml="$OUT/overlay.xml" 2>&1 |
    tee "$OUT/overlay.txt" || failed=1
python3 -m tests.gpu.overlay "$OUT" || failed=1
exit $failed
