# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two ends of a ZFS stream between members: jobs that run `zfs send` and `zfs receive` on a TCP connection over a leg."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from . import _host, _zfs
from ._job import JobError, Report

CONNECT_TIMEOUT_S = 10
SILENCE_S = 300
"""For a sender that reads nothing: a busy pool, but not a cut cable."""
PATIENCE_S = 120.0
"""For a source that does not answer."""
RETRY_S = 2.0
COMMAND_TIMEOUT_S = 600


def command(argv: Sequence[str]) -> str:
    """Output of a command that must succeed."""
    done = _host.run(argv, timeout=COMMAND_TIMEOUT_S)
    if done.status:
        raise JobError(f"{' '.join(argv)} failed ({done.message}): run it on this member to see more")
    return done.out


def value(dataset: str, key: str) -> str:
    """A property of a dataset; empty where there is no such dataset or no value."""
    done = _host.run(["zfs", "get", "-H", "-p", "-o", "value", key, dataset], timeout=COMMAND_TIMEOUT_S)
    text = done.out.strip()
    return "" if done.status or text == "-" else text


def snapshots(dataset: str) -> list[_zfs.Snapshot]:
    """Snapshots of a dataset, oldest first; none where it does not exist."""
    done = _host.run(_zfs.list_argv(dataset), timeout=COMMAND_TIMEOUT_S)
    return [] if done.status else _zfs.parse_snapshots(done.out)


def prune(dataset: str) -> None:
    """Remove our snapshots that are too many."""
    for name in _zfs.surplus(snapshots(dataset)):
        command(["zfs", "destroy", f"{dataset}@{name}"])


class Sender:
    """Gives one snapshot to the members that may have it."""

    def __init__(self, dataset: str, snapshot: str, addresses: Sequence[str], peers: Sequence[str], port: int) -> None:
        self._dataset, self._snapshot, self._peers = dataset, snapshot, set(peers)
        self._sockets = [self._listen(address, port) for address in addresses]

    @staticmethod
    def _listen(address: str, port: int) -> socket.socket:
        try:
            return socket.create_server((address, port))
        except OSError as error:
            raise JobError(
                f"nothing can listen on {address} port {port} ({error.strerror}): run site.yml --tags fabric, or set storage_zfs_port"
            ) from None

    def run(self, report: Report) -> dict[str, Any]:
        """Serve until somebody ends the job."""
        for listener in self._sockets:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        while True:
            time.sleep(PATIENCE_S)

    def close(self) -> None:
        """Let go of the sockets, which the job has."""
        for listener in self._sockets:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with suppress(OSError):
                connection, (address, _port) = listener.accept()
                if address in self._peers:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            notice_death(connection)
            connection.settimeout(SILENCE_S)
            have, token = _zfs.parse_request(read_line(connection))
            ours = snapshots(self._dataset)
            if any(snapshot.name == self._snapshot and snapshot.guid in have for snapshot in ours):
                connection.sendall(_zfs.reply("nothing"))
                return
            base = _zfs.common(ours, have)
            connection.sendall(_zfs.reply("rest" if token else "increment" if base else "full"))
            connection.settimeout(None)
            argv = _zfs.send_argv(self._dataset, self._snapshot, base, token)
            # The stream goes from a process to a socket, past this one.
            subprocess.run(  # pylint: disable=ansible-bad-function
                argv, stdout=connection.fileno(), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=False
            )


class Receiver:
    """Brings a snapshot to this member's dataset."""

    def __init__(self, dataset: str, path: str, name: str, addresses: Sequence[str], port: int, patience: float = PATIENCE_S) -> None:
        self._dataset, self._path, self._name = dataset, path, name
        self._addresses, self._port, self._patience = addresses, port, patience

    def run(self, report: Report) -> dict[str, Any]:
        """Receive, going on with what has arrived of a stream that was cut; fails when no source answers for a while."""
        begin = heard = time.monotonic()
        kinds: list[str] = []
        why = ""
        while True:
            for address in self._addresses:
                before = value(self._dataset, "used")
                try:
                    kind = self._take(address)
                except OSError as error:
                    why = f"copying from {address} port {self._port} stopped ({error.strerror or error}): check the cable and the leg's address"
                    if value(self._dataset, "used") != before:
                        heard = time.monotonic()
                    continue
                if kind == "nothing":
                    self._finish()
                    return {"streams": kinds, "seconds": round(time.monotonic() - begin, 2)}
                kinds.append(kind)
                heard = time.monotonic()
                break
            else:
                if time.monotonic() - heard > self._patience:
                    raise JobError(f"{why}, and run again, it goes on where it ended")
                time.sleep(RETRY_S)

    def _take(self, address: str) -> str:
        """One stream from one address; what kind it was."""
        token = value(self._dataset, "receive_resume_token")
        here = snapshots(self._dataset)
        with socket.create_connection((address, self._port), timeout=CONNECT_TIMEOUT_S) as connection:
            notice_death(connection)
            connection.settimeout(SILENCE_S)
            connection.sendall(_zfs.request(here, token))
            kind = str(json.loads(read_line(connection) or b"{}").get("kind", ""))
            if kind not in ("full", "increment", "rest", "nothing"):
                raise OSError("the source says nothing")
            if kind == "nothing":
                return kind
            if here and not token and value(self._dataset, f"written@{here[-1].name}") not in ("", "0"):
                command(_zfs.rollback_argv(self._dataset, here[-1]))
            connection.settimeout(None)
            argv = _zfs.receive_argv(self._dataset, self._path, self._name)
            done = subprocess.run(  # pylint: disable=ansible-bad-function
                argv, stdin=connection.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False
            )
        if done.returncode:
            self._refuse(done.stderr, kind)
        return kind

    def _refuse(self, words: str, kind: str) -> None:
        """A stream that ended early is tried again; what no stream can cure is not."""
        last = (words.strip().splitlines() or [f"zfs receive of the {kind} stream failed"])[-1]
        if "out of space" in words or "No space" in words or "quota" in words:
            raise JobError(f"the pool of {self._dataset} is full ({last}): make room there and run again, it goes on where it ended")
        if "exists" in words or "most recent snapshot" in words or "permission" in words:
            raise JobError(f"{self._dataset} cannot take the stream ({last}): remove what stands in its way, or copy by rsync")
        if "resume token" in words or ("is corrupt" in words and kind == "rest"):
            command(["zfs", "receive", "-A", self._dataset])
        raise OSError(last)

    def _finish(self) -> None:
        if value(self._dataset, "mounted") != "yes":
            command(["zfs", "mount", self._dataset])
        prune(self._dataset)


def notice_death(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other end is gone: zfs itself would wait for it for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000)  # milliseconds


def read_line(connection: socket.socket) -> bytes:
    """The first line of a connection, byte by byte: what follows belongs to somebody else."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _zfs.REQUEST_BYTES:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line
