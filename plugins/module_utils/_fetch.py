# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files from an origin on the network to a directory: several at a time, resumed inside a file, verified before they get their name.

The transport is huggingface_hub's, called file by file: its own snapshot function keeps no part of a file when it is killed
and compares no hash (2.4.0). What has not arrived whole lies beside its place as `.NAME.part`; the library writes it by 10 MiB,
so that a cut loses less than that.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import _progress
from ._checkpoint import File
from ._job import JobError, Report
from ._snapshot import Origin, Remote, git_blob, plain, refusal
from ._survey import BLOCK, Stamps

RETRIES = 6
"""Attempts in a row that bring no byte before a file is given up; with the delays, about two minutes."""
LONGEST_DELAY_S = 60.0
WRONG_TRIES = 3
"""Downloads of one file that turn out wrong before it is given up."""
REPORT_S = 1.0

Delay = Callable[[int], float]


def delay(attempt: int) -> float:
    """Seconds before the next attempt, the first being number 1."""
    return min(LONGEST_DELAY_S, 2.0**attempt)


@dataclass(frozen=True)
class Library:
    """What is used of huggingface_hub."""

    http_get: Callable[..., None]
    xet_get: Callable[..., None]
    file_metadata: Callable[..., Any]
    headers: Callable[..., dict[str, str]]
    http_limit: int


def library(folder: str) -> Library:
    """Import huggingface_hub, from a folder where one is given."""
    # No bars into a log, and nobody is told who downloads what.
    os.environ.update({"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        download = importlib.import_module("huggingface_hub.file_download")
        headers = importlib.import_module("huggingface_hub.utils").build_hf_headers
        limit = importlib.import_module("huggingface_hub.constants").MAX_HTTP_DOWNLOAD_SIZE
    except (ImportError, AttributeError) as error:
        raise JobError(
            f"huggingface_hub cannot be used on this member ({error}): install 2.x, or run the storage role, which brings it"
        ) from None
    return Library(download.http_get, download.xet_get, download.get_hf_file_metadata, headers, limit)


def part_of(path: Path) -> Path:
    """Where a file is until it is whole. The dot keeps it out of every comparison with a manifest."""
    return path.with_name(f".{path.name}.part")


def present(directory: Path, file: Remote) -> int:
    """Bytes that are here of a file that is not whole."""
    with suppress(OSError):
        return min(part_of(directory / file.path).stat().st_size, file.size)
    return 0


def hashes(path: Path) -> tuple[str, str]:
    """SHA-256 and git's blob id of a file, read from the disk."""
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digests = (sha256(), git_blob(os.fstat(file.fileno()).st_size))
        while count := file.readinto(block):
            for digest in digests:
                digest.update(block[:count])
    return digests[0].hexdigest(), digests[1].hexdigest()


class Fetch:
    """The download of some files of an origin."""

    def __init__(
        self, origin: Origin, token: str, directory: Path, stamps: Path, through: Library, offer: Callable[[str], None], wait: Delay = delay
    ) -> None:
        self._origin, self._directory, self._offer, self._delay = origin, directory, offer, wait
        self._through = through
        self._stamps = Stamps(directory, stamps)
        self._headers = through.headers(token=token or False)
        self._has_token = bool(token)
        self._guard = threading.Lock()
        self._finished: list[str] = []
        self._failure = ""

    def run(self, files: Sequence[Remote], jobs: int, report: Report) -> list[File]:
        """Download all, `jobs` at a time, or raise JobError with the first reason. What was begun goes on next time."""
        sizes = {file.path: file.size for file in files}
        meter = _progress.Meter()
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(self._whole, file) for file in files]
            while not all(future.done() for future in waiting):
                there = {file.path: present(self._directory, file) for file in files}
                finished = [path for path in self._finished if path in sizes]
                done = sum(sizes[path] for path in finished) + sum(there.values())
                report(_progress.report(sizes, there, finished, meter.rate(time.monotonic(), done)))
                time.sleep(min(REPORT_S, self._delay(1)))
        failure = next((failure for future in waiting if (failure := future.exception())), None)
        if failure:
            raise JobError(self._failure) if self._failure else failure
        report(_progress.report(sizes, sizes, list(sizes), 0.0))
        return [future.result() for future in waiting]

    def _whole(self, file: Remote) -> File:
        """One file, downloaded until its content is right."""
        target = self._directory / file.path
        if os.path.realpath(target.parent) != os.path.join(os.path.realpath(self._directory), os.path.dirname(file.path)).rstrip("/"):
            raise JobError(f"{target} lies behind a link, which a container could not follow: put the folder in its place")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = part_of(target)
        for _attempt in range(WRONG_TRIES):
            try:
                self._get(file, part)
            except JobError as error:
                self._failure = self._failure or str(error)
                if part.exists() and not part.stat().st_size:
                    part.unlink()
                raise
            found, blob = hashes(part)
            if file.matches(found, blob):
                os.replace(part, target)
                with self._guard:
                    self._stamps.remember(file.path, target.lstat(), found)
                    self._stamps.keep(None)
                    self._finished.append(file.path)
                self._offer(file.path)
                return File(file.path, file.size, found)
            part.unlink()
        kind, wanted, got = ("SHA-256", file.sha256, found) if file.sha256 else ("git blob", file.blob, blob)
        # The others go on: what is wrong with this one says nothing of them.
        raise JobError(
            f"{file.path} from {self._origin.where} was wrong in each of {WRONG_TRIES} downloads ({kind} {got}, expected {wanted}): "
            "check what lies between, such as a proxy, and the manifest"
        )

    def _get(self, file: Remote, part: Path) -> None:
        """Bring a part to its full size. An attempt that brings bytes counts for nothing, one that does not is repeated a few times."""
        attempts = 0
        while True:  # until it is whole, or one of the files meets what also stops the others
            if self._failure:
                raise JobError(self._failure)
            with part.open("ab"):
                pass
            begun = part.stat().st_size
            if begun > file.size:
                os.truncate(part, 0)
                begun = 0
            if begun == file.size:
                return
            reason: Exception | None = None
            try:
                self._transport(file, part, begun)
            except Exception as error:  # its HTTP library's own are no OSError
                self._refuse(error, file)
                reason = error
            if reason is None:
                continue
            attempts = 1 if part.stat().st_size > begun else attempts + 1
            if attempts == RETRIES:
                text = _reason(reason)
                raise JobError(
                    f"{file.path} from {self._origin.where} does not arrive ({text}): see whether the origin answers, and run again, "
                    "it goes on where it ended"
                )
            time.sleep(self._delay(attempts))

    def _transport(self, file: Remote, part: Path, begun: int) -> None:
        url = self._origin.url(file.path)
        if file.size > self._through.http_limit:
            # Beyond what the hub's web servers give out; its chunk store has no such limit, but does not go on inside a file.
            metadata = self._through.file_metadata(url, headers=self._headers, token=False)
            if metadata.xet_file_data is not None:
                self._through.xet_get(
                    incomplete_path=part, xet_file_data=metadata.xet_file_data, headers=self._headers, expected_size=file.size
                )
                return
        with part.open("r+b") as target:
            target.seek(begun)
            self._through.http_get(url, target, resume_size=begun, headers=dict(self._headers), expected_size=file.size)

    def _refuse(self, error: Exception, file: Remote) -> None:
        """Raise JobError for what no repeat cures."""
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise JobError(f"the disk of {self._directory} is full: make room and run again, it goes on where it ended") from None
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", 0)
        sentence = refusal(status, self._origin.where, self._has_token) if status else ""
        if status == 404:
            sentence = f"{plain(self._origin.url(file.path))} does not exist (HTTP 404): correct the manifest or the revision"
        if sentence:
            raise JobError(sentence) from None


def _reason(error: Exception) -> str:
    """An error in a few words. The libraries' own texts go over many lines and may repeat addresses with their signature."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return f"HTTP {status}" if status else type(error).__name__
