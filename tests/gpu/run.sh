#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Builds the kernels for the GPU of this machine, checks and times them, all in one call: tests/gpu/run.sh [check|time ...]
# Needs nvcc, compute-sanitizer and a Python with PyTorch, numpy, hypothesis and pytest. Results go to $OUT (tests/output/gpu).
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-tests/output/gpu}
steps=" ${*:-check time sanitize} "
mkdir -p "$OUT"
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
export PYTHONPATH=kernels/exl3:. PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 GB10_EXL3_LIBRARY=$build/libgb10_exl3.so

arch=$(python3 -c 'import torch; print("sm_%d%da" % torch.cuda.get_device_capability())')
python3 -m gb10_exl3.native --arch "$arch" --output "$GB10_EXL3_LIBRARY"
failed=0
pytest() { python3 -m pytest -q -p no:cacheprovider -W ignore "$@"; }

python3 -m gb10_exl3.selfcheck | tee "$OUT/selfcheck.txt" || failed=1
if [[ $steps == *" check "* ]]; then
    pytest tests/gpu --junitxml="$OUT/checks.xml" 2>&1 | tee "$OUT/checks.txt" || failed=1
fi
if [[ $steps == *" time "* ]]; then
    nvcc -O3 -std=c++17 "-gencode=arch=compute_${arch#sm_},code=$arch" -Ikernels/exl3/gb10_exl3/csrc -o "$build/ceiling" tests/gpu/ceiling.cu
    "$build/ceiling" >"$OUT/ceiling.json"
    python3 -m tests.gpu.bench "$OUT" || failed=1
fi
if [[ $steps == *" sanitize "* ]]; then
    # The self-check runs every kernel once; the checks marked so add the row counts with kernels of their own.
    for tool in memcheck racecheck initcheck synccheck; do
        echo "== compute-sanitizer $tool"
        timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m tests.gpu.sanitize 2>&1 | tail -n 15 | tee "$OUT/$tool.txt" || failed=1
    done
fi
exit $failed
