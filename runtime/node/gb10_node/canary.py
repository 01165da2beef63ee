# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Does the serving group still compute? One token from time to time, and a way to tell a busy group from a dead one.

The engine's `/health` stays 200 while a rank is frozen or gone, and a request then hangs (seen with vLLM 0.32.0). A long prefill makes the token
wait as well, but meanwhile the engine's own figures move: queue, KV cache, counted tokens. So a group is dead when neither the token comes nor a
figure moves. The token also keeps the GPU out of the slow state that it falls into after some minutes of idling (tonyd2wild's gpuflip).
"""

from __future__ import annotations

import http.client
import re
import urllib.error

from gb10_node.health import Api

METRICS_TIMEOUT_S = 5.0
SAMPLE_S = 5.0
"""Time between two looks at the figures while the token is waited for."""

FIGURES = re.compile(
    r"^(vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|prompt_tokens_total"
    r"|generation_tokens_total|iteration_tokens_total_count))(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
"""Series that move while the engine works (vLLM 0.32 and 0.33; the KV cache's had another name before 0.10)."""


def figures(text: str) -> tuple[tuple[str, str], ...]:
    """What moves, from a Prometheus text, in its order; equal texts of two looks mean that nothing moved."""
    return tuple((name, value) for name, value in FIGURES.findall(text))


def read_figures(api: Api) -> tuple[tuple[str, str], ...] | None:
    """The engine's figures now; None when it does not say them."""
    try:
        with api.open("/metrics", METRICS_TIMEOUT_S) as answer:
            return figures(answer.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, http.client.HTTPException, OSError):  # the second: an engine that ends while it answers
        return None


class Silence:
    """How long nothing has moved."""

    def __init__(self, now: float) -> None:
        self._last: tuple[tuple[str, str], ...] | None = None
        self._since = now

    def look(self, now: float, seen: tuple[tuple[str, str], ...] | None) -> float:
        """Seconds since the last movement. An engine that says nothing does not move."""
        if seen is not None and seen != self._last:
            self._last, self._since = seen, now
        return now - self._since

    def __str__(self) -> str:
        return ", ".join(f"{name.removeprefix('vllm:')} {value}" for name, value in self._last or ()) or "no figures"
