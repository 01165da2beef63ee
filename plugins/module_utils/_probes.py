# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a served model is asked and how its answers are judged: each probe a generator that yields requests, takes their replies, and does no I/O.

A probe yields a list of requests, which are sent at the same time, and is given their replies. It returns what it found, in a few words, or
raises `Faulty` with a name for each fault. docs/verification.md explains every name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _answers, _openai, _stripes
from ._openai import Answer, Fault, Faulty, Reply, Request

Probe = Generator[list[Request], list[Reply], str]
Asked = Generator[list[Request], list[Reply], list[Answer]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
FILLER = "The harbour was quiet that morning and nothing worth telling happened. "
ROOM = 80
"""Tokens that a needle, its question and the chat's template take, about."""
PROMPTS = ("The capital of France is", "Once upon a time there was a small village")


@dataclass(frozen=True)
class Target:
    """What is probed. `context` is the planned limit in tokens (0: unknown); `salt` makes a prompt that no cache knows; `reference` as in `parity`."""

    model: str
    context: int
    salt: str
    reference: Mapping[str, Any]


def _ask(*requests: Request) -> Asked:
    """Send at the same time, take only answers of good form."""
    replies = yield list(requests)
    return [_openai.read(request, reply) for request, reply in zip(requests, replies, strict=True)]


def _filler(target: Target, tokens: int) -> Generator[list[Request], list[Reply], list[str]]:
    """About so many tokens of sentences, by the server's own tokenizer."""
    answers = yield from _ask(*(_openai.completion(target.model, FILLER * count, 1) for count in (1, 4)))
    per_sentence = (answers[1].count("prompt_tokens") - answers[0].count("prompt_tokens")) / 3
    return [FILLER] * max(int(tokens / max(per_sentence, 1)), 1)


def health(_target: Target, _settings: Mapping[str, Any]) -> Probe:
    """The API says that its engine lives. It also says so when a remote rank is dead: the other probes are there for that."""
    [reply] = yield [Request(_openai.HEALTH, with_key=False)]
    if reply.status != 200:
        raise Faulty(Fault("unhealthy", f"{_openai.HEALTH} ends with {reply.status or reply.error}, expected 200"))
    return "answers"


def key(target: Target, _settings: Mapping[str, Any]) -> Probe:
    """A request without the key is refused."""
    body = {"model": target.model, "prompt": "1", "max_tokens": 1}
    [reply] = yield [Request(_openai.COMPLETIONS, body, with_key=False)]
    if reply.status == 200:
        raise Faulty(Fault("open-endpoint", "the endpoint answers without an API key: restart the group (playbook gb10.cluster.restart)"))
    if reply.status not in (401, 403):
        raise Faulty(Fault("no-refusal", f"a request without the key ends with {reply.status or reply.error}, expected 401"))
    return f"refused without it ({reply.status})"


def models(target: Target, _settings: Mapping[str, Any]) -> Probe:
    """The endpoint serves the model under its name, with the planned context."""
    [reply] = yield [Request(_openai.MODELS)]
    served = _served(reply)
    if target.model not in served:
        raise Faulty(Fault("wrong-model", f"the endpoint serves {', '.join(served) or 'nothing'}, expected {target.model}"))
    context = served[target.model]
    if target.context and context and context != target.context:
        raise Faulty(Fault("wrong-context", f"the endpoint's context is {context} tokens, planned are {target.context}"))
    return f"{target.model}, {context or 'unknown'} tokens"


def _served(reply: Reply) -> dict[str, int]:
    """Names of the served models with their context (0: not said)."""
    said = _openai.document(reply)
    entries = said.get("data") if isinstance(said, Mapping) else None
    return {str(entry.get("id")): int(entry.get("max_model_len") or 0) for entry in entries or []}


def chat(target: Target, settings: Mapping[str, Any]) -> Probe:
    """A question with a known answer, greedy. `expect` is a regular expression, in any case of letters."""
    template = settings.get("chat_template_kwargs")
    [answer] = yield from _ask(_openai.chat(target.model, settings["prompt"], settings["max_tokens"], template))
    _answers.judge_text(answer, settings["prompt"], settings["expect"], thinking=_answers.thinks(template))
    return answer.text


def parity(target: Target, _settings: Mapping[str, Any]) -> Probe:
    """Greedy tokens are those of the same model run as one rank."""
    expected = [int(token) for token in target.reference["token_ids"]]
    [answer] = yield from _ask(_openai.completion(target.model, target.reference["prompt"], len(expected)))
    got = list(answer.token_ids)
    if got != expected:
        place = _answers.first_difference(expected, got)
        sentence = f"greedy token {place + 1} of {len(expected)} differs from the single rank's: {got} against {expected}"
        raise Faulty(Fault("other-tokens", sentence))
    return f"{len(got)} tokens equal those of one rank"


def logprobs(target: Target, settings: Mapping[str, Any]) -> Probe:
    """Each token has a finite log probability: a TP2 build on GB10 gave NaN, with graphs on, at its first request (LLMKube)."""
    tokens = settings.get("tokens", 16)
    request = _openai.completion(target.model, PROMPTS[0], tokens, logprobs=1)
    replies = yield [request]
    # vLLM cannot write NaN as JSON, and says so with status 500.
    if replies[0].status >= 500 and "JSON compliant" in replies[0].text:
        raise Faulty(Fault("nan-logprobs", "the server could not write its log probabilities as JSON, which it says of NaN"))
    answer = _openai.read(request, replies[0])
    _answers.judge_logprobs(answer)
    return f"{len(answer.logprobs or ())} finite values"


def determinism(target: Target, settings: Mapping[str, Any]) -> Probe:
    """The same greedy request, one after the other, has the same answer each time."""
    tokens, repeats = settings.get("tokens", 32), settings.get("repeats", 3)
    answers = []
    for _repeat in range(repeats):
        answers += yield from _ask(_openai.completion(target.model, PROMPTS[0], tokens))
    _answers.judge_same(answers, "not-deterministic", "a repeated greedy request")
    return f"{repeats} times the same {tokens} tokens"


def prefix_cache(target: Target, settings: Mapping[str, Any]) -> Probe:
    """A long prompt asked twice: the second time its prefix comes from the cache, as the server's counter proves, and the answer is the same."""
    tokens = settings.get("tokens", 16)
    sentences = yield from _filler(target, settings.get("prompt_tokens", 256))
    request = _openai.completion(target.model, f"{target.salt} {''.join(sentences)}", tokens)
    [before] = yield [Request(_openai.METRICS)]
    answers = [*(yield from _ask(request)), *(yield from _ask(request))]
    [after] = yield [Request(_openai.METRICS)]
    _answers.judge_same(answers, "cache-changes-answer", "a greedy request whose prefix was in the cache")
    hits = [_answers.counter(reply.text, "vllm:prefix_cache_hits_total") for reply in (before, after)]
    size = answers[0].count("prompt_tokens")
    if None in hits:
        return f"same answer for {size} tokens twice; the server has no counter of its cache"
    if not hits[1] > hits[0]:
        raise Faulty(Fault("cache-cold", f"a prompt of {size} tokens asked twice found nothing in the prefix cache: is it switched off?"))
    return f"{hits[1] - hits[0]:.0f} of {size} tokens came from the cache, same answer"


def stop(target: Target, settings: Mapping[str, Any]) -> Probe:
    """A stop string ends the answer right before itself, streamed or not."""
    tokens = settings.get("tokens", 32)
    [free] = yield from _ask(_openai.completion(target.model, PROMPTS[1], tokens))
    word = _answers.stop_string(free.text)
    requests = [_openai.completion(target.model, PROMPTS[1], tokens, stop=[word], stream=stream) for stream in (False, True)]
    for request in requests:
        [answer] = yield from _ask(request)
        _answers.judge_stop(free.text, word, answer, streamed=request.is_stream)
    return f"ends before {word!r}"


def limit(target: Target, _settings: Mapping[str, Any]) -> Probe:
    """A prompt that fills the context but for one token is computed; one token more is refused, and the engine lives on."""
    [reply] = yield [Request(_openai.MODELS)]
    context = _served(reply).get(target.model) or target.context
    [sample] = yield from _ask(_openai.completion(target.model, FILLER, 1))
    if not context or not sample.prompt_token_ids:
        raise Faulty(
            Fault("unknown-limit", "the server does not say its context or a prompt's tokens: set probes.limit of the profile to null")
        )
    ids = [*sample.prompt_token_ids] * (1 + context // len(sample.prompt_token_ids))
    under, over = (_openai.completion(target.model, ids[:size], 1) for size in (context - 1, context))
    replies = yield [under]
    if replies[0].status == 400:
        raise Faulty(
            Fault("limit-too-low", f"a prompt of {context - 1} tokens and one to generate are refused, although the context is {context}")
        )
    _openai.read(under, replies[0])
    replies = yield [over]
    if replies[0].status == 200:
        raise Faulty(
            Fault("limit-exceeded", f"a prompt of {context} tokens and one to generate are accepted, although the context is {context}")
        )
    if replies[0].status not in (400, 413, 422):
        status = replies[0].status or replies[0].error
        raise Faulty(Fault("limit-kills", f"a prompt of one token too many ends with {status}, expected a refusal with 400"))
    replies = yield [Request(_openai.HEALTH, with_key=False)]
    if replies[0].status != 200:
        raise Faulty(Fault("limit-kills", "a prompt of one token too many is refused, and the engine is dead after it"))
    return f"{context - 1} tokens and one more computed, {context} and one more refused"


def streams(target: Target, settings: Mapping[str, Any]) -> Probe:
    """Two streams at the same time each carry their own answer; with `exact` it also equals the one that the prompt has alone."""
    requests = [_openai.completion(target.model, prompt, settings.get("tokens", 32), stream=True) for prompt in PROMPTS]
    alone = [*(yield from _ask(requests[0])), *(yield from _ask(requests[1]))]
    together = yield from _ask(*requests)
    _answers.judge_streams(alone, together, exact=settings.get("exact", False))
    same = sum(one.symbols == other.symbols for one, other in zip(alone, together, strict=True))
    return f"two streams kept apart, {same} of 2 exactly as alone"


def tools(target: Target, settings: Mapping[str, Any]) -> Probe:
    """A question that needs a function is answered by its call in the fields of the API, streamed or not."""
    prompt = "What is the weather in Paris now, in celsius? Use the function."
    for stream in (False, True):
        template = settings.get("chat_template_kwargs")
        request = _openai.chat(target.model, prompt, settings.get("max_tokens", 512), template, tools=[WEATHER], stream=stream)
        [answer] = yield from _ask(request)
        _answers.judge_tool_call(answer, "get_weather", {"city": "paris", "unit": "celsius"})
    return f"get_weather called, streamed or not: {answer.tool_calls[0].arguments}"


def reasoning(target: Target, settings: Mapping[str, Any]) -> Probe:
    """With thinking on, thoughts are in the field that is theirs and the answer is in its own, streamed or not."""
    prompt, template = "What is 17*19? Reply with the integer only.", settings["chat_template_kwargs"]
    for stream in (False, True):
        [answer] = yield from _ask(_openai.chat(target.model, prompt, settings.get("max_tokens", 2048), template, stream=stream))
        _answers.judge_text(answer, prompt, r"^\W*323\W*$", thinking=True)
    return f"{len(answer.reasoning)} characters of reasoning, answer {answer.text.strip()!r}"


def vision(target: Target, settings: Mapping[str, Any]) -> Probe:
    """The colours of three stripes from left to right; after it the text still works, since a first image was seen to end an engine."""
    words = "The image has three vertical stripes. Name their colours from left to right, three words only."
    content = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": _stripes.data_url()}}]
    request = _openai.chat(target.model, content, settings.get("max_tokens", 24), settings.get("chat_template_kwargs"))
    replies = yield [request]
    if replies[0].status != 200:
        [alive] = yield [Request(_openai.HEALTH, with_key=False)]
        if alive.status != 200:
            raise Faulty(Fault("image-kills", "the engine is dead after an image"))
        if replies[0].status:
            raise Faulty(Fault("image-refused", f"the image is refused with {replies[0].status}: is the chat template one without images?"))
    answer = _openai.read(request, replies[0])
    if not re.search(r"red\W+(\w+\W+)?green\W+(\w+\W+)?blue", answer.text, re.IGNORECASE):
        raise Faulty(Fault("wrong-colours", f"the stripes red, green, blue are said to be {answer.text!r}"))
    return answer.text


def needle(target: Target, settings: Mapping[str, Any]) -> Probe:
    """A sentence in the midst of a long text is found, at each length (tokens) and depth (share of the text before it)."""
    found = []
    for length in settings["lengths"]:
        for depth in settings.get("depths", [0.3, 0.8]):
            number = _answers.number(f"{target.salt} {length} {depth}")
            sentences = yield from _filler(target, length - ROOM)
            sentences.insert(int(len(sentences) * depth), f"The number of the blue lighthouse is {number}. ")
            # First, so that no cache of another length has the prompt's beginning.
            prompt = f"{target.salt}\n{''.join(sentences)}\nWhat is the number of the blue lighthouse? Reply with the number only."
            request = _openai.chat(target.model, prompt, settings.get("max_tokens", 32), settings.get("chat_template_kwargs"))
            [answer] = yield from _ask(request)
            if number not in answer.text:
                at = f"at {depth:.0%} of {answer.count('prompt_tokens')} tokens"
                raise Faulty(Fault("needle-lost", f"the number {number} {at} was not found, but {answer.text!r}"))
        found.append(str(answer.count("prompt_tokens")))
    return f"found in {', '.join(found)} tokens"


PROBES: dict[str, Callable[[Target, Mapping[str, Any]], Probe]] = {
    probe.__name__: probe
    for probe in (
        health,
        key,
        models,
        chat,
        parity,
        logprobs,
        determinism,
        prefix_cache,
        stop,
        streams,
        tools,
        reasoning,
        vision,
        limit,
        needle,
    )
}
"""In the order in which they run: what is cheap and says most comes first, long prompts last."""
ALWAYS = ("health", "key", "models")
"""They need nothing of the profile."""


def selection(
    profile: Mapping[str, Any], reference: Mapping[str, Any], only: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any] | None, str]]:
    """Every probe by name: its settings, or None and why it is left out."""
    for name in PROBES:
        settings = {} if name in ALWAYS else profile.get(name)
        if only and name not in only:
            yield name, None, "not asked for"
        elif name == "parity" and not reference.get("token_ids"):
            yield name, None, "no reference tokens were given"
        elif settings is None and name != "parity":
            yield name, None, "null in the profile" if name in profile else "not in the profile"
        else:
            yield name, settings or {}, ""


def conduct(steps: Probe, send: Callable[[list[Request]], list[Reply]]) -> dict[str, Any]:
    """A probe to its end: {verdict, note, faults, seconds, exchanges}, the last with every request and its reply."""
    exchanges: list[dict[str, Any]] = []
    note, faults, seconds = "", [], 0.0
    try:
        requests = next(steps)
        while True:
            replies = send(requests)
            seconds += max(reply.seconds for reply in replies)
            exchanges += [_openai.evidence(request, reply) for request, reply in zip(requests, replies, strict=True)]
            requests = steps.send(replies)
    except StopIteration as end:
        note = str(end.value)
    except Faulty as bad:
        faults = [{"code": fault.code, "sentence": fault.sentence} for fault in bad.faults]
    verdict = "failed" if faults else "passed"
    return {"verdict": verdict, "note": note, "faults": faults, "seconds": round(seconds, 3), "exchanges": exchanges}


def run(
    target: Target, profile: Mapping[str, Any], only: Sequence[str], send: Callable[[list[Request]], list[Reply]]
) -> list[dict[str, Any]]:
    """Every probe by name, one after the other; what is left out is "not probed", and why."""
    return [
        {"name": name, "verdict": "not probed", "note": why, "faults": [], "seconds": 0.0, "exchanges": []}
        if settings is None
        else {"name": name, **conduct(PROBES[name](target, settings), send)}
        for name, settings, why in selection(profile, target.reference, only)
    ]


def lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a probe, for a person."""
    width = max(len(result["name"]) for result in results)
    said = []
    for result in results:
        what = "; ".join(f"{fault['code']}: {fault['sentence']}" for fault in result["faults"]) or " ".join(result["note"].split())
        said.append(
            f"{result['name']:<{width}}  {result['verdict']:<10}  {what}" + (f" ({result['seconds']:.1f} s)" if result["seconds"] else "")
        )
    return said


def not_yet(state: Mapping[str, Any], since: float) -> str:
    """Why the group is not the one that began to serve after `since` (seconds since 1970); empty where it is, or where nobody asks (0)."""
    if not since:
        return ""
    if state.get("phase") != "serving":
        return f"the group that is to be proven does not serve yet, it is {state.get('phase', 'absent')}"
    if state["since"] < since:
        return f"the group that serves is still the old one: it began {since - state['since']:.0f} s before the change that is to be proven"
    return ""
