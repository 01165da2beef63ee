# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Server-sent events from bytes as they arrive, by the rules of the HTML standard (section 9.2.6), data fields only."""

from __future__ import annotations

import codecs


class Parser:
    """Feed it what arrived, in any pieces; it gives the data of each event that is whole.

    An event that the stream's end cuts off never comes out: the standard discards it, and so a cut is seen by what is missing.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._line = ""
        self._data: list[str] = []
        self._after_return = False

    def feed(self, received: bytes) -> list[str]:
        """Data of the events that these bytes complete; lines within one event are joined by a newline."""
        text = self._decode(received)
        if self._after_return and text:
            # A line feed that belongs to the carriage return at the end of the piece before.
            text, self._after_return = text.removeprefix("\n"), False
        self._after_return = text.endswith("\r")
        *lines, self._line = (self._line + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: str) -> str | None:
        if not line:
            event, self._data = self._data, []
            return "\n".join(event) if event else None
        field, _colon, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        return None
