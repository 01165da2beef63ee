# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sizes that do not divide by the number of ranks, made so that they do; and a config.json that says so.

The convention of the TP3 images (tonyd2wild's virtual_heads.py, LLMKube's staging job): config.json reports more heads and output groups than
the checkpoint has and keeps the real numbers in `virtual_heads_from`, at the top level, which takes effect, and in text_config; the engine then
repeats the last real group and gives it zero weight on the way out. No weight file changes.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import PlanError

HEADS, GROUPS = "num_attention_heads", "o_groups"
FROM = "virtual_heads_from"
TEXT = "text_config"
VOCABULARY_GRANULE = 64
"""vLLM pads a vocabulary to multiples of this (DEFAULT_VOCAB_PADDING_SIZE)."""
EXL3_GRANULE = 128
"""EXL3's Hadamard blocks: a rank's part of a quantized matrix is whole blocks."""


class PaddingError(PlanError):
    """Sizes that cannot be padded, or a config.json that is not the expected one; one sentence."""


def marker_of(ranks: int) -> str:
    """The key by which LLMKube's tools know a file that is padded for so many ranks."""
    return f"kai_tp{ranks}_virtual_heads"


def up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is no less than `value`."""
    return -(-value // step) * step


def padded_heads(heads: int, ranks: int, alignment: int = 1, what: str = "heads") -> int:
    """The fewest heads that divide by the ranks, each rank's share a multiple of `alignment`.

    Raises PaddingError where a rank would hold invented heads only: such a plan loads and answers nonsense.
    """
    padded = up(heads, ranks * alignment)
    share = padded // ranks
    if heads <= share * (ranks - 1):
        cost = f"+{100 * (padded - heads) // heads} %"
        raise PaddingError(
            f"{heads} {what} in multiples of {alignment} over {ranks} ranks are {padded} ({cost}), and the last rank has none of the real ones: "
            "use another number of ranks, or a kernel without that alignment"
        )
    return padded


def padded_groups(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """Heads and output groups, padded by whole groups: a group's heads stay together. Raises PaddingError."""
    if heads % groups:
        raise PaddingError(f"{heads} heads do not divide into {groups} groups: the model's shape is not one that can be padded")
    padded = padded_heads(groups, ranks, what="groups")
    return padded * (heads // groups), padded


def padded_vocabulary(size: int, ranks: int, granule: int = VOCABULARY_GRANULE) -> int:
    """Rows of an embedding or output head: the least multiple of the granule that also divides by the ranks."""
    return up(size, math.lcm(granule, ranks))


def padded_width(width: int, ranks: int, granule: int = EXL3_GRANULE) -> int:
    """An intermediate width: every rank's share is a multiple of the granule."""
    return up(width, ranks * granule)


@dataclass(frozen=True)
class Shape:
    """What a profile says: the padded numbers, and the real ones that the file must have."""

    real: Mapping[str, int]
    padded: Mapping[str, int]
    ranks: int


def shape_of(numbers: Mapping[str, Any], ranks: int) -> Shape:
    """The shape of a profile's `preparation.virtual_heads`. Raises PaddingError where its padded numbers are not those that follow."""
    try:
        real, said = ({key: int(level[key]) for key in (HEADS, GROUPS)} for level in (numbers["from"], numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise PaddingError(f"virtual_heads has no usable {error}: pass the profile's preparation.virtual_heads") from None
    heads, groups = padded_groups(real[HEADS], real[GROUPS], ranks)
    padded = {HEADS: heads, GROUPS: groups}
    if said != padded:
        raise PaddingError(
            f"virtual_heads says {_pair(said)}, but {_pair(real)} over {ranks} ranks are {_pair(padded)}: correct the profile's preparation"
        )
    if real == padded:
        raise PaddingError(f"{_pair(real)} divide by {ranks} ranks as they are: remove virtual_heads from the profile's preparation")
    return Shape(real, padded, ranks)


def is_original(config: Mapping[str, Any], shape: Shape) -> bool:
    """Whether the file has exactly the real numbers and nothing of a padding."""
    text = config.get(TEXT)
    return (
        isinstance(text, Mapping)
        and all(text.get(key) == value for key, value in shape.real.items())
        and not any(FROM in level or any(map(_is_marker, level)) for level in (config, text))
        and all(config.get(key, value) == value for key, value in shape.real.items())
    )


def is_padded(config: Mapping[str, Any], shape: Shape) -> bool:
    """Whether an engine would take the file as padded by this shape; by whom, and whether with a marker, does not matter."""
    text = config.get(TEXT)
    return (
        isinstance(text, Mapping)
        and all(text.get(key) == value for key, value in shape.padded.items())
        and config.get(FROM) == dict(shape.real)
        and text.get(FROM) == dict(shape.real)
    )


def pad(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The padded config.json of an original."""
    padded = copy.deepcopy(dict(config))
    padded[TEXT].update(shape.padded)
    for key in shape.padded:
        if key in padded:
            padded[key] = shape.padded[key]
    padded[TEXT][FROM] = dict(shape.real)
    padded[FROM] = dict(shape.real)
    padded[marker_of(shape.ranks)] = f"gb10.cluster: {_pair(shape.real)} reported as {_pair(shape.padded)} for {shape.ranks} ranks"
    return padded


def text_of(config: Mapping[str, Any]) -> str:
    """A config.json as LLMKube writes it: one space of indent, keys as they came."""
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Files:
    """The texts of config.json and of its kept original; None for a file that is not there."""

    config: str | None
    original: str | None


def padded_files(now: Files, shape: Shape, directory: str) -> Files:
    """What the files must hold, from what they hold now. Raises PaddingError, and then nothing may be written.

    A config.json with the real numbers is an original, also where another one is kept from before: the checkpoint was staged anew. A padded
    one without an original counts as done: another tool made it. Every other file is refused, for its numbers mean something else.
    """
    if now.config is None:
        raise PaddingError(f"{directory} has no config.json: fetch the checkpoint first")
    config = _parse(now.config, f"{directory}/config.json")
    if is_original(config, shape):
        return Files(text_of(pad(config, shape)), now.config)
    if now.original is not None and FROM in config:
        kept = _parse(now.original, f"{directory}/config.json.orig-hf")
        if is_original(kept, shape):
            done = is_padded(config, shape) and _unpadded(config) == _unpadded(kept)
            return now if done else Files(text_of(pad(kept, shape)), now.original)
    elif is_padded(config, shape):
        return now
    text = config.get(TEXT)
    have = ", ".join(f"{key} {text.get(key)}" for key in shape.real) if isinstance(text, Mapping) else "no text_config"
    raise PaddingError(f"{directory}/config.json has {have}, expected {_pair(shape.real)}: fetch its original again or correct the profile")


def restored_files(now: Files, directory: str) -> Files:
    """The files without a padding, byte for byte as they were staged. Raises PaddingError."""
    if now.config is None or not _is_marked(now.config):
        return Files(now.config, None)
    if now.original is None:
        raise PaddingError(f"{directory}/config.json is padded and its original is not kept beside it: fetch config.json again")
    return Files(now.original, None)


def differences(before: str | None, after: str | None) -> list[str]:
    """Each changed key of a config.json with its old and new value, for a report."""
    return changes(*(_mapping(text) for text in (before, after)))


def changes(before: Any, after: Any, path: Sequence[str] = ()) -> list[str]:
    """Each changed key with its old and new value, for a report."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [line for key in [*before, *(set(after) - set(before))] for line in changes(before.get(key), after.get(key), [*path, key])]
    return [] if before == after else [f"{'.'.join(path)}: {json.dumps(before)} -> {json.dumps(after)}"]


def _unpadded(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of the model, but for the padding."""

    def rest(level: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in level.items() if key not in (HEADS, GROUPS, FROM, TEXT) and not _is_marker(key)}

    return {**rest(config), TEXT: rest(config[TEXT])}


def _is_marker(key: str) -> bool:
    return key.endswith("_virtual_heads")


def _is_marked(text: str) -> bool:
    """Whether a config.json is padded by any convention. A damaged one is not."""
    config = _mapping(text)
    return FROM in config or any(map(_is_marker, config))


def _mapping(text: str | None) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none."""
    try:
        config = json.loads(text or "")
    except ValueError:
        config = None
    return config if isinstance(config, dict) else {}


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise PaddingError(f"{where} is no JSON ({error}): fetch it again") from None
    if not isinstance(config, dict):
        raise PaddingError(f"{where} is no mapping: fetch it again")
    return config


def _pair(numbers: Mapping[str, int]) -> str:
    return f"{numbers[HEADS]} heads in {numbers[GROUPS]} groups"
