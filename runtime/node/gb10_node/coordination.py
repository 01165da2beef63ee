# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group start and end together: one TCP connection from each worker to the head.

The engine cannot do it: its head does not notice a dead remote rank, and a rank that lost its head lingers. So each
rank's unit holds a link over the management network, and losing it means losing the group:

    worker  -> head    hello {rank, digest}      head refuses another plan or an unknown sender
    head    -> worker  check                     when all workers are there
    worker  -> head    checked {fingerprint}     its member can start the rank; the head compares what all must have the same
    head    -> worker  start                     workers first ...
    worker  -> head    running                   ... the head after them
    worker  -> head    heard                     its engine has logged something
    worker  -> head    unsaid {names}            what of the plan's log lines has not come yet
    head    -> worker  serving                   a token was generated
    any     -> all     end {reason, culprit, log, event}  (a worker tells the head, the head tells the others)
    both ways          beat                      silence for `heartbeat_s` is a lost member

One JSON object a line. Senders are told apart by their address, which must be the plan's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

BEATS_PER_TIMEOUT = 5
"""Beats sent within the time after which a silent member counts as lost: one late beat is not a lost member."""
LINE_LIMIT = 1 << 20
"""Bytes of one message at most: a failure carries the log lines of the rank that ended."""

EVENT = re.compile(r"\d{8}T\d{6}Z-[a-z-]+")
"""An event's name, which becomes that of a folder."""

Message = dict[str, Any]


class GroupEnd(Exception):
    """The group ends: why, because of which member, and that rank's last log lines.

    `event` names what every member keeps evidence of, when, and of which kind; empty for an end that is no failure. `stopped`: somebody asked for it.
    """

    def __init__(self, reason: str, culprit: str, log: Sequence[str] = (), *, event: str = "", stopped: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.culprit, self.log, self.event, self.stopped = reason, culprit, list(log), event, stopped

    @property
    def counts(self) -> bool:
        """Whether it is one of the failures that recovery counts."""
        return bool(self.event)

    def message(self) -> Message:
        """As sent to the other ranks."""
        return {
            "kind": "end",
            "reason": self.reason,
            "culprit": self.culprit,
            "log": self.log,
            "event": self.event,
            "stopped": self.stopped,
        }

    @classmethod
    def received(cls, message: Message) -> GroupEnd:
        """The same, as heard from another rank."""
        event = message["event"] if EVENT.fullmatch(str(message["event"])) else ""
        log = [str(line) for line in message["log"]]
        return cls(str(message["reason"]), str(message["culprit"]), log, event=event, stopped=bool(message.get("stopped")))


class LinkLost(Exception):
    """The other side closed the link or fell silent."""


class Link:
    """One connection between the head and a worker, with its heartbeat in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._beats = asyncio.create_task(self._beat())

    @property
    def address(self) -> str:
        """The other side's address."""
        return str(self._writer.get_extra_info("peername")[0])

    async def _beat(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await self.send({"kind": "beat"})
                await asyncio.sleep(self._timeout_s / BEATS_PER_TIMEOUT)

    async def send(self, message: Message) -> None:
        """Send one message."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def receive(self) -> Message:
        """The next message that is not a beat; LinkLost when the other side is gone or silent."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), self._timeout_s)
                if not line:
                    raise LinkLost("closed its link")
                message = json.loads(line)
                if message["kind"] != "beat":
                    return message  # type: ignore[no-any-return]
            except TimeoutError:
                raise LinkLost(f"was silent for {self._timeout_s:.0f} s") from None
            except ConnectionError as error:
                raise LinkLost(f"lost its link ({error.strerror or error})") from error
            except (ValueError, KeyError, TypeError) as error:
                raise LinkLost("sent what is not a message") from error

    async def close(self, last: Message | None = None) -> None:
        """Send a last message if the other side still listens, then close."""
        self._beats.cancel()
        with contextlib.suppress(ConnectionError, TimeoutError):
            if last is not None:
                await asyncio.wait_for(self.send(last), 1)
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 1)
