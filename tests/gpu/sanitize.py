# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One small launch of every kernel, for a tool that watches each access."""

from __future__ import annotations

import numpy as np
import torch
from gb10_exl3 import selfcheck


def main() -> None:
    """Runs the self-check's parts and the row counts that have kernels of their own."""
    rng = np.random.default_rng(0)
    for rows, bits in ((1, 3), (12, 4), (24, 5), (50, 2.5)):
        layer, x = selfcheck.random_layer(rng, 640, 256, bits), rng.normal(size=(rows, 640)).astype(np.float16)
        assert selfcheck.error(selfcheck.run_linear(layer, x), layer.linear(x)) <= selfcheck.HALF_BOUND
    for name in ("decode", "moe", "engram", "stored layer"):
        check, bound = selfcheck.CHECKS[name]
        assert check() <= bound, name
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
