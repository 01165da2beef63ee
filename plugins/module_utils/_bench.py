# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark measures, which repetitions count, and what may be said of them. Text, requests and judgements; no I/O, no clock.

The rules, each from a published mistake: tokens are those of `usage`, never events (eugr/llama-benchy#11); a window is forced, at least 256 tokens
and full, since 10 to 25 tokens overstate by 30 to 39 % (colonel-otto); a prompt is new from its first word on, so that no cache has it; what comes
before a speed is steady does not count (z-lab/dflash#135); a difference within the spread is none (0xBakeer/qwen38-flash-next-spark#6).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from . import _openai
from ._openai import Answer, Fault, Faulty, Reply, Request

VERSION = 1
LEAST_WINDOW = 256
"""Tokens of a decode window; colonel-otto's own rule after shorter ones overstated."""
LEAST_REPETITIONS = 3
"""Fewer that count are no median."""
STEADY = 0.05
"""Repetitions at the beginning that are farther than this from the median of all later ones are its warm-up."""
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
DECODE_WORDS = 12
"""Enough for no two prompts to be the same."""
WORDS = (
    *("harbour", "winter", "engine", "letter", "garden", "signal", "copper", "bridge", "morning", "market", "shadow", "river", "paper"),
    *("window", "mountain", "violin", "kitchen", "station", "silver", "forest", "journey", "candle", "thunder", "village", "compass"),
)
TASK = "Write a long and detailed story about what these words bring to mind."


@dataclass(frozen=True)
class Step:
    """One thing to measure. `tokens` is about the prompt's length for a prefill, the forced window for a decode; `beside` a prefill beside a decode."""

    kind: str
    tokens: int
    concurrency: int = 1
    beside: int = 0

    @property
    def name(self) -> str:
        """As it is in tables and comparisons."""
        if self.kind == PREFILL:
            return f"prefill {self.tokens}"
        return f"decode {self.tokens} x{self.concurrency}" if self.kind == DECODE else f"decode {self.tokens} beside prefill {self.beside}"


def step_of(settings: Mapping[str, Any]) -> Step:
    """A step from its mapping; ValueError with one sentence where it cannot be measured."""
    step = Step(**settings)
    if step.kind not in (PREFILL, DECODE, MIXED):
        raise ValueError(f"a step's kind is {step.kind!r}, expected {PREFILL}, {DECODE} or {MIXED}")
    if step.kind != PREFILL and step.tokens < LEAST_WINDOW:
        raise ValueError(
            f"step {step.name!r} has a window of {step.tokens} tokens: shorter ones than {LEAST_WINDOW} overstate, choose {LEAST_WINDOW} or more"
        )
    if (step.kind == MIXED) != bool(step.beside) or min(step.tokens, step.concurrency) < 1:
        raise ValueError(f"step {step.name!r} is none: `beside` goes with {MIXED}, and tokens and concurrency are at least 1")
    return step


def text(salt: str, tokens: int, per_word: float) -> str:
    """About so many tokens of English words, another order for another salt, from the first word on."""
    count, words, block = max(int(tokens / per_word), 1), [], 0
    while len(words) < count:
        digest = hashlib.sha256(f"{salt} {block}".encode()).digest()
        words += [WORDS[byte % len(WORDS)] for byte in digest]
        block += 1
    return " ".join(words[:count])


def requests(step: Step, model: str, salt: str, per_word: float) -> list[Request]:
    """What one repetition sends at the same time."""
    if step.kind == PREFILL:
        return [_prefill(model, text(salt, step.tokens, per_word))]
    decodes = [_decode(model, f"{salt} {place}", step.tokens) for place in range(step.concurrency)]
    return [*decodes, _prefill(model, text(f"{salt} beside", step.beside, per_word))] if step.kind == MIXED else decodes


def _prefill(model: str, prompt: str) -> Request:
    return _openai.completion(model, prompt, 1, stream=True)


def _decode(model: str, salt: str, tokens: int) -> Request:
    return _openai.completion(model, f"{text(salt, DECODE_WORDS, 1)}\n\n{TASK}\n\n", tokens, min_tokens=tokens, stream=True)


def measured(step: Step, asked: Sequence[Request], replies: Sequence[Reply], cached: float | None) -> dict[str, Any]:
    """One repetition: its requests' figures, its value in tokens per second, and `refused`, a sentence where it may not count.

    `cached` is how many prompt tokens the server took from its cache meanwhile (None: it does not say).
    A prefill's speed is its prompt's tokens by the time to the first one generated. A decode's is that of all streams together: the tokens after each
    first one, by the time from the earliest first token to the latest last one.
    """
    refused, rows = "", []
    for request, reply in zip(asked, replies, strict=True):
        try:
            answer = _openai.read(request, reply)
            rows.append(_row(request, reply, answer))
        except Faulty as faulty:
            refused = refused or "; ".join(f"{fault.code}: {fault.sentence}" for fault in faulty.faults)
    block = sum(row["prompt_tokens"] for row in rows) // 20 if rows else 0
    if not refused and cached and cached > block:
        refused = f"{cached:.0f} prompt tokens came from the prefix cache: that is no cold measurement"
    if not refused and step.kind == MIXED and rows[-1]["first_s"] <= rows[0]["first_s"]:
        refused = "the prefill was over before the first token of the decode beside it: choose a longer one"
    repetition = {"requests": rows, "value": None, "refused": refused}
    if refused:
        return repetition
    if step.kind == PREFILL:
        return repetition | {"value": rows[0]["prompt_tokens"] / rows[0]["first_s"]}
    streams = rows[: step.concurrency]
    window = max(row["last_s"] for row in streams) - min(row["first_s"] for row in streams)
    return repetition | {"value": sum(row["completion_tokens"] - 1 for row in streams) / window}


def _row(request: Request, reply: Reply, answer: Answer) -> dict[str, Any]:
    """Figures of one request. Raises Faulty where its window was not filled."""
    asked = (request.body or {})["max_tokens"]
    completion = answer.count("completion_tokens")
    if completion != asked or answer.finish != "length":
        raise Faulty(Fault("window-not-filled", f"{completion} of {asked} tokens came, then {answer.finish!r}"))
    if answer.first_seconds is None or (asked > 1 and answer.last_seconds <= answer.first_seconds):
        raise Faulty(Fault("no-times", f"{completion} tokens came in one piece, so nothing can be timed"))
    row: dict[str, Any] = {
        "prompt_tokens": answer.count("prompt_tokens"),
        "completion_tokens": completion,
        "first_s": answer.first_seconds,
        "last_s": answer.last_seconds,
        "wall_s": reply.seconds,
    }
    if asked > 1:
        row["decode_tok_s"] = (completion - 1) / (answer.last_seconds - answer.first_seconds)
    return row


def steady_from(values: Sequence[float]) -> int | None:
    """Where the warm-up ends: the first place from which on enough values are within STEADY of their median; None where there is none."""
    for place in range(len(values) - LEAST_REPETITIONS + 1):
        rest = values[place:]
        if all(abs(value - median(rest)) <= STEADY * median(rest) for value in rest):
            return place
    return None


def concluded(step: Step, repetitions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A step's result: median, least and most of the repetitions that count, or why there is none.

    Each repetition gets `counts`. Where the values never get steady all of them count and the result says so: the spread is then what it is.
    """
    kept = [dict(repetition) for repetition in repetitions]
    valid = [repetition for repetition in kept if repetition["value"] is not None]
    begin = steady_from([repetition["value"] for repetition in valid])
    counting = [id(repetition) for repetition in valid[begin or 0 :]]
    for repetition in kept:
        repetition["counts"] = id(repetition) in counting
    values = [repetition["value"] for repetition in kept if repetition["counts"]]
    result: dict[str, Any] = {
        "name": step.name, "kind": step.kind, "tokens": step.tokens, "concurrency": step.concurrency, "beside": step.beside,
        "repetitions": kept, "median": None, "least": None, "most": None, "steady": begin is not None, "refused": "",
    }  # fmt: skip
    if len(values) < LEAST_REPETITIONS:
        whys = [repetition["refused"] for repetition in kept if repetition["refused"]]
        result["refused"] = (
            f"{len(values)} of {len(kept)} repetitions count, {LEAST_REPETITIONS} are needed{': ' if whys else ''}{whys[0] if whys else ''}"
        )
        return result
    return result | {"median": median(values), "least": min(values), "most": max(values)}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between two runs, and only then how fast: {differences: [sentence], steps: [{name, before, after, ratio, verdict}]}."""
    differences = _differences("", before["provenance"], after["provenance"])
    differences += _differences("settings", before["settings"], after["settings"])
    own = {step["name"]: step for step in after["steps"]}
    steps = []
    for step in before["steps"]:
        other = own.pop(step["name"], None)
        steps.append(_compared(step, other) if other else {"name": step["name"], "verdict": "only before"})
    return {"differences": differences, "steps": [*steps, *({"name": name, "verdict": "only after"} for name in own)]}


def _compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    both = {"name": before["name"], "before": before["median"], "after": after["median"]}
    for side, step in (("before", before), ("after", after)):
        if step["median"] is None:
            return both | {"verdict": f"no figure {side}: {step['refused']}"}
    ratio = after["median"] / before["median"]
    overlap = before["least"] <= after["most"] and after["least"] <= before["most"]
    verdict = "no difference shown: the ranges overlap" if overlap else "faster" if ratio > 1 else "slower"
    return both | {"ratio": ratio, "verdict": verdict}


def _differences(where: str, before: Any, after: Any) -> list[str]:
    """One sentence per leaf that is not the same on both sides."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [*before, *(name for name in after if name not in before)]
        return [line for name in names for line in _differences(f"{where}.{name}".lstrip("."), before.get(name), after.get(name))]
    if isinstance(before, list) and isinstance(after, list):
        # By count: a value may be that of another option as well.
        counts = [Counter(map(str, one)) for one in (before, after)]
        gone, new = (list((one - other).elements()) for one, other in (counts, counts[::-1]))
        return [f"{where}: {' '.join(gone) or 'nothing'} became {' '.join(new) or 'nothing'}"] if gone or new else []
    return [] if before == after else [f"{where}: {before} became {after}"]


def table(document: Mapping[str, Any]) -> list[str]:
    """The result for a terminal: one line a step, with every repetition."""
    lines = [f"{document['model']} on {len(document['provenance'])} members, {document['utc']}, tokens per second"]
    width = max((len(step["name"]) for step in document["steps"]), default=0)
    for step in document["steps"]:
        each = " ".join(("" if repetition["counts"] else "!") + _figure(repetition["value"]) for repetition in step["repetitions"])
        if step["median"] is None:
            lines.append(f"{step['name']:<{width}}  refused  {step['refused']} [{each}]")
            continue
        spread = (step["most"] - step["least"]) / step["median"]
        floor = min((floor["free_mib"] for floor in step["memory_floor"].values()), default=None)
        lines.append(
            f"{step['name']:<{width}}  {_figure(step['median']):>7}  spread {spread:.1%}{'' if step['steady'] else ', never steady'}  "
            f"{'' if floor is None else f'least free {floor} MiB  '}[{each}]"
        )
    return lines


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
