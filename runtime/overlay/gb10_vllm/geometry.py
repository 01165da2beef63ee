# SPDX-License-Identifier: Apache-2.0
"""Sizes that do not divide by the ranks, made so that they do.

The rules are those of the collection's `_padding`, which plans with them; a test holds the two together.
"""

from __future__ import annotations

import math

from gb10_vllm.errors import OverlayError

BLOCK = 128
"""EXL3's rotation: a rank's part of a quantized matrix is whole blocks."""


def up(value: int, step: int) -> int:
    """The least multiple of `step` that is no less than `value`."""
    return -(-value // step) * step


def padded_groups(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """Heads and output groups, padded by whole groups. Raises OverlayError where a rank would hold invented heads only."""
    if heads % groups:
        raise OverlayError(f"{heads} heads do not divide into {groups} groups: the model's shape is not one that can be padded")
    padded = up(groups, ranks)
    if groups <= padded // ranks * (ranks - 1):
        raise OverlayError(
            f"{groups} groups over {ranks} ranks are {padded}, and the last rank has none of the real ones: use another number of ranks"
        )
    return padded * (heads // groups), padded


def vocabulary_step(ranks: int, granule: int) -> int:
    """A vocabulary padded to multiples of this has equal parts, each of whole granules where the granule is vLLM's and divides."""
    return math.lcm(granule, ranks)


def share(width: int, ranks: int, granule: int = BLOCK) -> int:
    """A rank's part of a width that may be padded: whole granules, the same for all ranks."""
    return up(width, ranks * granule) // ranks
