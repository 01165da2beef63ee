#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# The vLLM plugin's layers on the GPU of this machine: numbers against float64, graphs, loading, Engram rows, then a rank of the full-size model:
# tests/gpu/overlay.sh. What it leaves in overlay.json is kept as kernels/results/h200-overlay.json; tools/pages makes the pages' tables of it.
# Needs nvcc, and a Python with PyTorch for CUDA and vLLM as tools/overlay installs it. Results go to $OUT (tests/output/gpu).
# The library is built unless GB10_EXL3_LIBRARY names one.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-tests/output/gpu}
mkdir -p "$OUT"
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
mkdir -p "$build/ansible_collections/gb10" "$build/gb10_vllm-0.dist-info"
ln -s "$PWD" "$build/ansible_collections/gb10/cluster"
# The entry point that a wheel of the plugin would bring.
printf 'Metadata-Version: 2.1\nName: gb10-vllm\nVersion: 0\n' >"$build/gb10_vllm-0.dist-info/METADATA"
printf '[vllm.general_plugins]\ngb10_vllm = gb10_vllm:register\n' >"$build/gb10_vllm-0.dist-info/entry_points.txt"
export PYTHONPATH=$PWD:$PWD/runtime/overlay:$PWD/kernels/exl3:$build${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export VLLM_TARGET_DEVICE=cpu VLLM_PLUGINS=gb10_vllm GB10_TEST_DEVICE=cuda

if [[ -z ${GB10_EXL3_LIBRARY:-} ]]; then
    export GB10_EXL3_LIBRARY=$build/libgb10_exl3.so
    arch=$(python3 -c 'import torch; print("sm_%d%da" % torch.cuda.get_device_capability())')
    python3 -m gb10_exl3.native --arch "$arch" --output "$GB10_EXL3_LIBRARY"
fi
failed=0
python3 -m gb10_vllm.selfcheck 2>&1 | tee "$OUT/overlay-selfcheck.txt" || failed=1
python3 -m pytest -c tests/overlay/pytest.ini --rootdir . tests/overlay/test_{numbers,loading,engram,gpu}.py --junitxml="$OUT/overlay.xml" 2>&1 |
    tee "$OUT/overlay.txt" || failed=1
python3 -m tests.gpu.overlay "$OUT" || failed=1
exit $failed
