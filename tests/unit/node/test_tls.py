# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint by https: what the plan, the member's files, the node services and the probes have to do with it."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _endpoint, _openai, _start, _tls, _units
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from gb10_node import canary, health

from tests.certificates import pair

METRICS = b'vllm:num_requests_running{engine="0"} 1.0\n'


class Engine(http.server.BaseHTTPRequestHandler):
    """As much of an engine as is asked here."""

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Health and figures."""
        self._answer(METRICS if self.path == "/metrics" else b"")

    def do_POST(self) -> None:
        """One token."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b'{"usage": {"completion_tokens": 1}}')


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server with a certificate that ran out yesterday."""
    certificate, key = pair(-1)
    (tmp_path / "both.pem").write_text(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_certificate_that_ran_out_ends_no_group(port: int) -> None:
    api = health.Api(port, tls=True)
    assert health.healthy(api)
    assert health.one_token(api, "m", "key") is None
    assert canary.read_figures(api) == (("vllm:num_requests_running", "1.0"),)
    assert not health.healthy(health.Api(port)), "an engine that speaks https is not healthy by http"


def test_the_probes_ask_by_https(port: int) -> None:
    request = _openai.Request("/health")
    assert _endpoint.Endpoint("127.0.0.1", port, "key", 5, tls=True).ask(request).status == 200
    assert _endpoint.Endpoint("127.0.0.1", port, "key", 5).ask(request).status != 200


def test_the_head_alone_has_it_and_ranks_stay_alike() -> None:
    members = [{"name": f"t{rank + 1}", "address": f"198.51.100.{rank + 1}"} for rank in range(3)]
    settings = {"cluster_name": "x", "cluster_profile": "dsv41-exl3-3.5bpw-tp3", "cluster_topology": "ring", "cluster_tls": True}
    plan = _inputs.plan(members, settings)
    assert plan["service"]["url"] == "https://198.51.100.1:8000"
    containers = [member["rank_config"]["container"] for member in plan["members"].values()]
    mounts = [[volume["target"] for volume in container["volumes"] if volume["source"] == "/etc/gb10/x/tls"] for container in containers]
    assert mounts == [["/run/gb10-tls"], [], []]
    given = ["--ssl-certfile", "/run/gb10-tls/certificate.pem", "--ssl-keyfile", "/run/gb10-tls/key.pem"]
    assert [set(given) <= set(container["command"]) for container in containers] == [True, False, False]
    assert len({tuple(_start.shared_arguments(container["command"])) for container in containers}) == 1


def test_a_certificate_and_a_key_of_each_other_become_files_without_the_key_in_a_diff() -> None:
    _tls.check(*pair(9))
    certificate, key = _units.tls_files("x", *pair(9))
    assert (certificate.path, certificate.secret) == ("/etc/gb10/x/tls/certificate.pem", False)
    assert (key.path, key.mode, key.secret) == ("/etc/gb10/x/tls/key.pem", 0o600, True)


@pytest.mark.parametrize("wrong", ["another key", "no certificate", "no key"])
def test_what_would_not_serve_is_refused_before_a_file_is_written(wrong: str) -> None:
    (certificate, key), (_other, another) = pair(9), pair(9)
    given = {"another key": (certificate, another), "no certificate": ("words", key), "no key": (certificate, "words")}[wrong]
    with pytest.raises(
        ValueError, match=r"^service_tls_certificate and service_tls_key do not serve \(.*\): give a certificate and its own key"
    ):
        _tls.check(*given)


def test_only_a_head_that_is_planned_with_tls_needs_a_certificate_and_keeps_the_one_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    head: dict[str, Any] = {"group": "x", "rank": 0, "api": {"tls": True}}
    monkeypatch.setattr(_units, "kept_tls", lambda group: ("", ""))
    assert _units.tls_for(head | {"rank": 1}, "", "") == _units.tls_for(head | {"api": {"tls": False}}, "", "") == ("", "")
    with pytest.raises(ValueError, match=r"^group x is planned with TLS and its head has no certificate: set service_tls_certificate and "):
        _units.tls_for(head, "", "")
    with pytest.raises(ValueError, match=r"^group x: service_tls_certificate and service_tls_key do not serve"):
        _units.tls_for(head, pair(9)[0], pair(9)[0])
    given, kept = pair(9), pair(9)
    assert _units.tls_for(head, *given) == given
    monkeypatch.setattr(_units, "kept_tls", lambda group: kept)
    assert _units.tls_for(head, "", "") == kept and _units.tls_for(head, *given) == given
