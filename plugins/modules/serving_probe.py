#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove an endpoint by what it answers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_probe
short_description: Prove a served model by its answers
version_added: 0.1.0
description:
  - Runs on the head, so that the API key never leaves it. Asks the endpoint and judges the answers.
  - The endpoint must refuse a request without the key.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.INFO_MODULE]
options:
  group:
    description: Name of the group, whose API key is read from C(/etc/gb10/GROUP/api-key).
    type: str
    required: true
  port:
    description: Port of the endpoint.
    type: int
    required: true
  model:
    description: Served model name.
    type: str
    required: true
  chat:
    description: A chat request, with C(prompt), C(max_tokens) and C(expect), a regular expression that the answer must match in any case of letters.
    type: dict
  reference:
    description: Greedy tokens of the same model run as one rank, with C(prompt) and C(token_ids). The endpoint must generate the same.
    type: dict
  timeout:
    description: Seconds for one request.
    type: float
    default: 300
"""

EXAMPLES = r"""
- name: Ask for a capital
  gb10.cluster.serving_probe:
    group: lab
    port: 8000
    model: smollm2
    chat: {prompt: "What is the capital of France?", max_tokens: 32, expect: paris}
"""

RETURN = r"""
answer:
  description: Text of the chat answer.
  returned: when O(chat) is given
  type: str
token_ids:
  description: Greedy tokens.
  returned: when O(reference) is given
  type: list
  elements: int
seconds:
  description: Time that each request took, by name.
  returned: always
  type: dict
problems:
  description: What is wrong, one sentence each.
  returned: always
  type: list
  elements: str
"""

import json
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

from ..module_utils import _host, _probes


class Endpoint:
    """The API on this member."""

    def __init__(self, port: int, timeout: float) -> None:
        self.base, self.timeout = f"http://127.0.0.1:{port}", timeout
        self.seconds: dict[str, float] = {}

    def post(self, name: str, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        """Status and decoded answer; status 0 with the reason under `error` where no answer came."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        begin = time.monotonic()
        try:
            answer = open_url(self.base + path, json.dumps(body), headers, "POST", use_proxy=False, timeout=self.timeout)
            return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, {"error": error.read(300).decode("utf-8", "replace")}
        except (urllib.error.URLError, OSError, ValueError) as error:
            return 0, {"error": str(error)}
        finally:
            self.seconds[name] = round(time.monotonic() - begin, 3)


def main() -> None:
    """Ask, judge, report all that is wrong."""
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "model": {"type": "str", "required": True},
            "chat": {"type": "dict"},
            "reference": {"type": "dict"},
            "timeout": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    key_file = f"/etc/gb10/{parameters['group']}/api-key"
    key = _host.read(key_file)
    if not key:
        module.fail_json(msg=f"{key_file} is absent or empty on this member: run the service role, and the probe on the head")
    endpoint = Endpoint(parameters["port"], parameters["timeout"])
    result: dict[str, Any] = {"changed": False, "seconds": endpoint.seconds}
    problems: list[str] = []

    asks = {"without key": ("/v1/completions", {"model": parameters["model"], "prompt": "1", "max_tokens": 1}, "")}
    if parameters["chat"]:
        asks["chat"] = ("/v1/chat/completions", _probes.chat_request(parameters["model"], parameters["chat"]), key)
    reference = [int(token) for token in (parameters["reference"] or {}).get("token_ids", [])]
    if reference:
        body = _probes.parity_request(parameters["model"], parameters["reference"]["prompt"], len(reference))
        asks["parity"] = ("/v1/completions", body, key)
    # All at once: the engine computes them in one batch.
    with ThreadPoolExecutor(max_workers=len(asks)) as pool:
        answers = dict(zip(asks, pool.map(lambda ask: endpoint.post(ask[0], *ask[1]), asks.items()), strict=True))

    if answers["without key"][0] == 200:
        problems.append("the endpoint answers without an API key: restart the group (playbook gb10.cluster.restart)")
    if "chat" in answers:
        status, body = answers["chat"]
        result["answer"] = _probes.chat_answer(body)
        verdict = (
            _probes.chat_verdict(parameters["chat"], result["answer"])
            if status == 200
            else f"the chat request ended with {status}: {body['error']}"
        )
        problems += [verdict] if verdict else []
    if "parity" in answers:
        status, body = answers["parity"]
        result["token_ids"] = _probes.parity_tokens(body)
        verdict = (
            _probes.parity_verdict(reference, result["token_ids"])
            if status == 200
            else f"the greedy request ended with {status}: {body['error']}"
        )
        problems += [verdict] if verdict else []
    result["problems"] = problems
    if problems:
        module.fail_json(msg="; ".join(problems), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
