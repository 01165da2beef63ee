# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One small launch of every kernel, for a tool that watches each access."""

from __future__ import annotations

import numpy as np
import torch
from gb10_exl3 import ops, selfcheck
from gb10_exl3.format import CODEBOOKS


def main() -> None:
    """Runs the self-check's parts and the row counts that have kernels of their own."""
    for rows, bits in ((1, 3), (2, 3.5), (6, 2), (12, 4), (24, 5), (50, 2.5)):
        assert selfcheck.linear_error(rows, bits, 640, 256) <= 2 * selfcheck.HALF_BOUND
    # Into the original basis by itself: the product of many rows is a library's, whose stores initcheck does not see.
    layer = selfcheck.random_layer(np.random.default_rng(0), 256, 384, 6)
    dense = ops.dequant(*(selfcheck.cuda(tensor) for tensor in (layer.trellis, layer.suh, layer.svh)), CODEBOOKS["mul1"], torch.float16)
    assert selfcheck.error(dense, layer.dense()) <= 2 * selfcheck.HALF_BOUND
    # Slots found by each block, sorted, and sorted into tall ones.
    for tokens, experts in ((5, 8), (90, 70), (90, 8)):
        assert selfcheck.moe_error(tokens, experts, 128, 256) <= 2 * selfcheck.HALF_BOUND
    for name in ("decode", "engram", "stored layer"):
        check, bound = selfcheck.CHECKS[name]
        assert check() <= bound, name
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
