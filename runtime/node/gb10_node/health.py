# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Does the group compute? Asked over HTTP, with the API key, from the head itself.

`/health` alone says too little: it stays 200 while a remote rank is dead and until a first request kills the engine
(seen with vLLM 0.32.0). One generated token is the proof.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gb10_core import _tls

HEALTH_TIMEOUT_S = 5.0
TOKEN_TIMEOUT_S = 120.0
"""The first token may compile and warm up kernels; it is asked once per start."""


@dataclass(frozen=True)
class Api:
    """The endpoint of this member, asked over the loopback."""

    port: int
    tls: bool = False

    def open(self, path: str, timeout_s: float, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer; raises as urlopen does."""
        request = urllib.request.Request(
            f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{path}", data=body, headers=dict(headers or {})
        )
        return urllib.request.urlopen(request, timeout=timeout_s, context=_tls.unchecked() if self.tls else None)


def healthy(api: Api) -> bool:
    """True when the API process answers `/health` with 200."""
    try:
        with api.open("/health", HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def one_token(api: Api, model: str, api_key: str | None, timeout_s: float = TOKEN_TIMEOUT_S, prompt: str | list[int] = "1") -> str | None:
    """Generate one token after a prompt, text or tokens; None when it worked, otherwise what came back instead, to follow a colon."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    try:
        with api.open("/v1/completions", timeout_s, body, headers) as answer:
            tokens = json.load(answer).get("usage", {}).get("completion_tokens", 0)
    except urllib.error.HTTPError as error:
        return f"a token was refused with HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return f"a token did not arrive ({error})"
    return None if tokens == 1 else f"the answer to one token counts {tokens}"
