# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""ssh's ProxyCommand: joins its standard input and output to one TCP connection. Usage: relay.py HOST PORT"""

from __future__ import annotations

import os
import selectors
import socket
import sys

CHUNK = 1 << 18


def main() -> None:
    host, port = sys.argv[1:]
    try:
        connection = socket.create_connection((host, int(port)), timeout=10)
    except OSError as error:
        sys.exit(f"relay: {host} port {port}: {error.strerror or error}")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    ready.register(connection, selectors.EVENT_READ)
    while True:
        for key, _events in ready.select():
            if key.fd == 0:
                if data := os.read(0, CHUNK):
                    connection.sendall(data)
                else:
                    ready.unregister(0)
                    connection.shutdown(socket.SHUT_WR)
            else:
                data = connection.recv(CHUNK)
                if not data:
                    return
                while data:
                    data = data[os.write(1, data) :]


main()
