# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The image of the vision probe: three stripes, made here so that nothing has to be shipped or fetched."""

from __future__ import annotations

import base64
import struct
import zlib

WIDTH, HEIGHT = 90, 30
"""Pixels; LLMKube's readiness test asks about an image of this size (defilantech/LLMKube)."""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
"""From left to right."""


def png() -> bytes:
    """The image as a PNG of 8-bit RGB (W3C PNG, section 11)."""
    row = b"\0" + b"".join(bytes(colour) * (WIDTH // len(COLOURS)) for colour in COLOURS.values())
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(row * HEIGHT, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url() -> str:
    """The image as OpenAI's `image_url` takes it."""
    return "data:image/png;base64," + base64.b64encode(png()).decode()
