# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""Things that go on side by side and end together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


async def first_of(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all until one returns or raises; cancel the others; raise what the first raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Something that goes on beside the block and ends with it at the latest."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
