#!/usr/bin/env bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Builds the kernels for the GPU of this machine, checks and times them, all in one call: tests/gpu/run.sh [check|time ...]
# Needs nvcc, compute-sanitizer and a Python with PyTorch, numpy, hypothesis and pytest. Results go to $OUT (tests/output/gpu).
# The library is built unless GB10_EXL3_LIBRARY names one. With EXLLAMAV3=FOLDER, the unpacked wheel of exllamav3, that is
# timed beside them; the first time it builds its extension.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-tests/output/gpu}
steps=" ${*:-check time sanitize} "
mkdir -p "$OUT"
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
export PYTHONPATH=kernels/exl3:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

arch=$(python3 -c 'import torch; print("sm_%d%da" % torch.cuda.get_device_capability())')
if [[ -z ${GB10_EXL3_LIBRARY:-} ]]; then
    export GB10_EXL3_LIBRARY=$build/libgb10_exl3.so
    python3 -m gb10_exl3.native --arch "$arch" --output "$GB10_EXL3_LIBRARY"
fi
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
    # Small launches of every kernel; the tools beside each other, since they wait for the processor most of the time.
    declare -A tools
    for tool in memcheck racecheck initcheck synccheck; do
        timeout 200 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m tests.gpu.sanitize >"$OUT/$tool.txt" 2>&1 &
        tools[$tool]=$!
    done
    for tool in "${!tools[@]}"; do
        wait "${tools[$tool]}" || failed=1
        echo "== $tool"
        tail -n 3 "$OUT/$tool.txt"
    done
fi
exit $failed
