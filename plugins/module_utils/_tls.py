# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint's https: whether a certificate serves, and how the head itself asks."""

from __future__ import annotations

import ssl
import tempfile


def unchecked() -> ssl.SSLContext:
    """For the head's own questions over the loopback: a certificate proves the head to clients, and one that ran out must not end a group."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def check(certificate: str, key: str) -> None:
    """Both PEM, the first with its chain. Raises ValueError, one sentence, where they are none or not of each other."""
    with tempfile.NamedTemporaryFile() as first, tempfile.NamedTemporaryFile() as second:
        for file, text in ((first, certificate), (second, key)):
            file.write(text.encode())
            file.flush()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(first.name, second.name, password=lambda: "")
        except OSError as error:
            raise ValueError(
                f"service_tls_certificate and service_tls_key do not serve ({error}): give a certificate and its own key, both in PEM, the key "
                "without a passphrase"
            ) from None
