# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to an OpenAI endpoint and the verdicts on what came back. A verdict is None for good, else one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def chat_request(model: str, probe: Mapping[str, Any]) -> dict[str, Any]:
    """Body of /v1/chat/completions: the probe's prompt, greedy, with its own template arguments where it has them."""
    body = {"model": model, "messages": [{"role": "user", "content": probe["prompt"]}], "max_tokens": probe["max_tokens"], "temperature": 0}
    return body | {key: probe[key] for key in ("chat_template_kwargs",) if key in probe}


def chat_answer(body: Mapping[str, Any]) -> str:
    """Text of the first choice; empty when there is none."""
    choices = body.get("choices") or [{}]
    return str((choices[0].get("message") or {}).get("content") or "")


def chat_verdict(probe: Mapping[str, Any], answer: str) -> str | None:
    """The answer must match the probe's regular expression `expect`, in any case of letters."""
    if not re.search(probe["expect"], answer, re.IGNORECASE):
        return f"the answer to {probe['prompt']!r} is {answer!r}, which does not match {probe['expect']!r}"
    return None


def parity_request(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Body of /v1/completions: `tokens` greedy tokens with their ids."""
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def parity_tokens(body: Mapping[str, Any]) -> list[int]:
    """Token ids of the first choice."""
    choices = body.get("choices") or [{}]
    return [int(token) for token in choices[0].get("token_ids") or []]


def parity_verdict(reference: Sequence[int], got: Sequence[int]) -> str | None:
    """Greedy tokens of the group must be those of the reference."""
    if list(got) == list(reference):
        return None
    place = next((i for i, pair in enumerate(zip(reference, got, strict=False)) if pair[0] != pair[1]), min(len(reference), len(got)))
    return f"greedy token {place + 1} of {len(reference)} differs from the single rank's: {list(got)} against {list(reference)}"
