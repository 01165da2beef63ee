# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every kind of bad answer is caught by its name, over real connections; a good server passes all probes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _answers, _endpoint, _openai, _probes

from .fake_engine import CONTEXT, KEY, MODEL, Engine

ROOT = Path(__file__).resolve().parents[3]
ARITHMETIC = {"prompt": "What is 17*19? Reply with the integer only.", "expect": "323", "max_tokens": 32}
PROFILE: dict[str, Any] = {
    "chat": {**ARITHMETIC, "chat_template_kwargs": {"thinking": False}},
    "logprobs": {},
    "determinism": {},
    "prefix_cache": {},
    "stop": {},
    "streams": {"exact": True},
    "tools": {},
    "reasoning": {"chat_template_kwargs": {"thinking": True}},
    "vision": {},
    "limit": {},
    "needle": {"lengths": [400, 900]},
}


def probed(fault: str, *only: str, timeout: float = 20) -> dict[str, dict[str, Any]]:
    """Results by probe, of an engine with this fault."""
    with Engine(fault) as engine:
        endpoint = _endpoint.Endpoint("127.0.0.1", engine.port, KEY, timeout)
        target = _probes.Target(MODEL, CONTEXT, "salt", {})
        return {result["name"]: result for result in _probes.run(target, PROFILE, only, endpoint.ask_all)}


def test_a_good_server_passes_every_probe() -> None:
    results = probed("")
    assert {name: result["faults"] for name, result in results.items() if result["faults"]} == {}
    assert [name for name, result in results.items() if result["verdict"] != "passed"] == ["parity"]
    assert "came from the cache, same answer" in results["prefix_cache"]["note"]
    assert results["vision"]["note"] == "red, green, blue"
    assert all(result["exchanges"] for result in results.values() if result["name"] != "parity")


# the server's fault: the probe that must see it, and the name that it gives.
FAULTS = {
    "unhealthy": ("health", "unhealthy"),
    "open-endpoint": ("key", "open-endpoint"),
    "wrong-model": ("models", "wrong-model"),
    "wrong-context": ("models", "wrong-context"),
    "connection-lost": ("chat", "connection-lost"),
    "not-json": ("chat", "not-json"),
    "truncated-answer": ("chat", "truncated-answer"),
    "empty-choices": ("chat", "empty-choices"),
    "wrong-answer-model": ("chat", "wrong-model"),
    "no-usage": ("chat", "wrong-usage"),
    "wrong-usage": ("logprobs", "wrong-usage"),
    "wrong-answer": ("chat", "wrong-answer"),
    "token-soup": ("chat", "token-soup"),
    "one-character": ("chat", "token-soup"),
    "broken-characters": ("chat", "token-soup"),
    "empty-answer": ("chat", "empty-answer"),
    "reasoning-not-off": ("chat", "reasoning-not-off"),
    "nan-logprobs": ("logprobs", "nan-logprobs"),
    "null-logprobs": ("logprobs", "nan-logprobs"),
    "nan-refused": ("logprobs", "nan-logprobs"),
    "empty-logprobs": ("logprobs", "empty-logprobs"),
    "impossible-logprobs": ("logprobs", "impossible-logprobs"),
    "not-deterministic": ("determinism", "not-deterministic"),
    "cache-changes-answer": ("prefix_cache", "cache-changes-answer"),
    "cache-cold": ("prefix_cache", "cache-cold"),
    "stop-ignored": ("stop", "stop-ignored"),
    "stop-included": ("stop", "stop-included"),
    "stop-elsewhere": ("stop", "stop-elsewhere"),
    "wrong-stop-reason": ("stop", "wrong-finish-reason"),
    "mixed-tokens": ("streams", "mixed-streams"),
    "swapped-streams": ("streams", "mixed-streams"),
    "mixed-ids": ("streams", "mixed-streams"),
    "batch-changes-answer": ("streams", "batch-changes-answer"),
    "truncated-stream": ("streams", "truncated-stream"),
    "no-end-mark": ("streams", "truncated-stream"),
    "error-in-stream": ("streams", "server-error"),
    "wrong-object": ("tools", "wrong-object"),
    "tool-call-as-text": ("tools", "tool-call-as-text"),
    "no-tool-call": ("tools", "no-tool-call"),
    "wrong-tool": ("tools", "wrong-tool"),
    "broken-arguments": ("tools", "bad-tool-arguments"),
    "wrong-arguments": ("tools", "bad-tool-arguments"),
    "call-without-id": ("tools", "bad-tool-call"),
    "wrong-call-reason": ("tools", "wrong-finish-reason"),
    "reasoning-in-content": ("reasoning", "reasoning-in-content"),
    "think-marks": ("reasoning", "reasoning-in-content"),
    "answer-in-reasoning": ("reasoning", "answer-in-reasoning"),
    "budget-spent": ("reasoning", "budget-spent"),
    "no-reasoning": ("reasoning", "no-reasoning"),
    "wrong-colours": ("vision", "wrong-colours"),
    "image-refused": ("vision", "image-refused"),
    "image-kills": ("vision", "image-kills"),
    "limit-too-low": ("limit", "limit-too-low"),
    "limit-exceeded": ("limit", "limit-exceeded"),
    "limit-kills": ("limit", "limit-kills"),
    "needle-lost": ("needle", "needle-lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_name(fault: str) -> None:
    probe, name = FAULTS[fault]
    result = probed(fault, probe)[probe]
    assert [found["code"] for found in result["faults"]][:1] == [name], result


@pytest.mark.parametrize(("fault", "name"), [("slow-trickle", "slow-trickle"), ("no-answer", "no-answer")])
@pytest.mark.parametrize("probe", ["chat", "streams"])
def test_what_takes_too_long_is_told_from_what_never_came(probe: str, fault: str, name: str) -> None:
    result = probed(fault, probe, timeout=3)[probe]
    assert [found["code"] for found in result["faults"]] == [name], result


def test_the_key_is_in_no_evidence() -> None:
    assert KEY not in str(probed("wrong-answer"))


def test_every_fault_is_explained() -> None:
    """docs/verification.md has a row for each name that the core can give."""
    modules = [Path(module.__file__ or "").read_text() for module in (_answers, _openai, _probes)]
    known = {code for text in modules for code in re.findall(r'Fault\(\s*"([a-z-]+)"', text)}
    known |= {
        code
        for text in modules
        for pair in re.findall(r'(?:name(?:, what)?) = \(?"([a-z-]+)".*?else \(?"([a-z-]+)"', text)
        for code in pair
    }
    known |= {code for text in modules for code in re.findall(r'judge_same\(\w+, "([a-z-]+)"', text)}
    page = (ROOT / "docs/verification.md").read_text()
    assert len(known) > 45
    assert not {code for code in known if f"| `{code}` |" not in page}
    assert not {code for _probe, code in FAULTS.values()} - known
