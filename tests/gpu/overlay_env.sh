# shellcheck shell=bash
# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Sourced by overlay.sh and forward.sh: vLLM finds the plugin of this checkout, and the kernels are built for this machine's GPU unless
# GB10_EXL3_LIBRARY names a library. Results go to $OUT (tests/output/gpu).
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
OUT=${OUT:-tests/output/gpu}
mkdir -p "$OUT"
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
mkdir -p "$build/ansible_collections/gb10" "$build/gb10_vllm-0.dist-info"
ln -s "$PWD" "$build/ansible_collections/gb10/cluster"
# The entry point that a wheel of the plugin would bring, and one for what forward.py changes in vLLM; VLLM_PLUGINS says which are loaded.
printf 'Metadata-Version: 2.1\nName: gb10-vllm\nVersion: 0\n' >"$build/gb10_vllm-0.dist-info/METADATA"
printf '[vllm.general_plugins]\ngb10_vllm = gb10_vllm:register\nforward = tests.gpu.forward:harness\n' >"$build/gb10_vllm-0.dist-info/entry_points.txt"
export PYTHONPATH=$PWD:$PWD/runtime/overlay:$PWD/kernels/exl3:$build${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [[ -z ${GB10_EXL3_LIBRARY:-} ]]; then
    export GB10_EXL3_LIBRARY=$build/libgb10_exl3.so
    arch=$(python3 -c 'import torch; print("sm_%d%da" % torch.cuda.get_device_capability())')
    python3 -m gb10_exl3.native --arch "$arch" --output "$GB10_EXL3_LIBRARY"
fi
