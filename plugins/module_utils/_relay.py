# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint that goes around the ring while it still arrives.

Every member offers the files that it has verified, takes from any neighbour the files that it lacks, and so passes on the
first file while the second arrives: N members are done in about the time of one. A file is offered only after its SHA-256
was read back from this member's own disk, so that nothing wrong travels further than one hop. A member that fails, or is
too full, is a source less for its neighbours and nothing else.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import _host, _progress, _replica
from ._checkpoint import ORIGINAL, File
from ._job import JobError, Report
from ._survey import Stamps, read_file

OFFER_FILE = "offer.json"

POLL_S = 0.5
"""Between two looks at a neighbour's offer."""
PATIENCE_S = 120.0
"""For a neighbour that does not answer: a reboot, or a cable that is plugged in again."""
GRACE_S = 10.0
"""Before a neighbour's word that it gets no more is believed: it may be that of its run before, and this run begins there a moment later."""
TRIES = 3
"""Copies of one file that turn out wrong before it is given up."""
MAX_DEPTH = 64
"""More members than any cluster has. Members that wait for each other count each other's depth up to it, and then know."""
VERIFIERS = 2
"""Files that are hashed at a time; a third would only take the disk from the copies."""


@dataclass(frozen=True)
class Source:
    """A neighbour at one of its addresses."""

    member: str
    address: str


@dataclass(frozen=True)
class Offer:
    """What a member has: verified files, those of them with holes and those prepared since, and how far it is from where more comes from.

    A prepared file is an edited one with its original beside it (ORIGINAL): the original is what is passed on.

    `depth` is 0 where files arrive from outside of the cluster, one more than that of its nearest source on the others, and
    None where nothing more will come.
    """

    files: frozenset[str] = frozenset()
    sparse: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    depth: int | None = None

    def to_json(self) -> bytes:
        """The offer as it is served."""
        paths = {name: sorted(getattr(self, name)) for name in ("files", "sparse", "prepared")}
        return json.dumps({**paths, "depth": self.depth}).encode()

    @staticmethod
    def from_json(text: str) -> Offer:
        """The offer of a neighbour."""
        content = json.loads(text)
        return Offer(*(frozenset(content[name]) for name in ("files", "sparse", "prepared")), content["depth"])


def depth_behind(sources: Iterable[Offer | None]) -> int | None:
    """The depth of a member from its sources' offers; None for a source that may still answer."""
    depths = [0 if offer is None else offer.depth for offer in sources]
    nearest = min((depth for depth in depths if depth is not None), default=MAX_DEPTH)
    return nearest + 1 if nearest + 1 < MAX_DEPTH else None


def choose(lacking: Iterable[str], offer: Offer, elsewhere: Sequence[Offer], order: Mapping[str, float]) -> str | None:
    """The file to take from a neighbour: the one that fewest others offer, and of these the first; None if it has none."""
    candidates = [path for path in lacking if path in offer.files]
    return min(candidates, key=lambda path: (sum(path in other.files for other in elsewhere), order[path]), default=None)


class Publisher:
    """This member's offer, kept where the daemon of `weights_source` serves it."""

    def __init__(self, folder: Path, directory: Path, files: Iterable[str], depth: int | None) -> None:
        self._file = folder / OFFER_FILE
        self._directory = directory
        self._lock = threading.Lock()
        self._offer = Offer(depth=depth)
        self.add(*files)

    def add(self, *paths: str) -> None:
        """Offer verified files."""
        sparse = {path for path in paths if has_holes(self._directory / path)}
        prepared = {path for path in paths if (self._directory / (path + ORIGINAL)).is_file()}
        with self._lock:
            offer = self._offer
            self._write(Offer(offer.files | set(paths), offer.sparse | sparse, offer.prepared | prepared, offer.depth))

    def depth(self, depth: int | None) -> None:
        """Say how far this member is from where more comes from."""
        with self._lock:
            if depth != self._offer.depth:
                self._write(replace(self._offer, depth=depth))

    def _write(self, offer: Offer) -> None:
        self._offer = offer
        _host.write(self._file, offer.to_json())


def has_holes(path: Path) -> bool:
    """Whether a file takes less of the disk than its size. st_blocks counts 512 bytes on every Linux."""
    status = path.lstat()
    return status.st_blocks * 512 < status.st_size


class Relay:
    """One member's part: takes the wanted files and offers them on."""

    def __init__(
        self,
        name: str,
        directory: Path,
        wanted: Sequence[File],
        publisher: Publisher,
        sources: Sequence[Source],
        port: int,
        stamps: Path,
        patience: float = PATIENCE_S,
    ) -> None:
        self._name, self._directory, self._port, self._patience = name, directory, port, patience
        self._files = {file.path: file for file in wanted}
        # Each member in an order of its own: where all get from one, they get different files of it and then each other's.
        self._order = {path: random.random() for path in self._files}
        self._publisher, self._sources = publisher, sources
        self._stamps = Stamps(directory, stamps)
        self._guard = threading.Lock()
        self._lacking = set(self._files)
        self._done: list[str] = []
        self._wrong: dict[str, int] = {}
        self._given_up: dict[str, str] = {}
        self._offers: dict[Source, Offer] = {}
        self._silent: dict[Source, tuple[float, str]] = {}  # since when a source gives nothing, and its last words
        self._hopeless_since = time.monotonic()
        self._failure = ""

    def run(self, report: Report) -> dict[str, Any]:
        """Take all wanted files or raise JobError with the first reason why not."""
        begin, meter = time.monotonic(), _progress.Meter()
        sizes = {file.path: file.size for file in self._files.values()}
        self._directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(VERIFIERS) as pool, tempfile.TemporaryDirectory() as folder:
            threads = [
                threading.Thread(target=self._serve_from, args=(source, Path(folder, str(number)), pool))
                for number, source in enumerate(self._sources)
            ]
            threads += [] if threads else [threading.Thread(target=self._watch)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                there = {path: present_bytes(self._directory / path) for path in sizes}
                rate = meter.rate(time.monotonic(), sum(min(there[path], size) for path, size in sizes.items()))
                report(_progress.report(sizes, there, list(self._done), rate))
                self._judge()
                time.sleep(POLL_S)
        self._publisher.depth(None)
        failure = next(iter(self._given_up.values()), self._failure)
        if failure:
            raise JobError(failure)
        report(_progress.report(sizes, sizes, list(self._done), 0.0))
        return {"copied": sorted(self._done), "copy_bytes": sum(sizes.values()), "seconds": round(time.monotonic() - begin, 2)}

    # What ends the work ---------------------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return bool(self._failure) or len(self._done) + len(self._given_up) == len(self._files)

    def _judge(self) -> None:
        """Say how far away more is, and give up where nothing more can come."""
        if not self._sources or self._ended():
            return
        now = time.monotonic()
        with self._guard:
            lacking = set(self._lacking)
            gone = {source: words for source, (since, words) in self._silent.items() if now - since > self._patience}
            offers = {source: self._offers.get(source) for source in self._sources if source not in gone}
        arriving = self._in_transfer(lacking) or any(offer and offer.files & lacking for offer in offers.values())
        self._publisher.depth(1 if arriving else depth_behind(offers.values()))
        if arriving or any(offer is None or offer.depth is not None for offer in offers.values()):
            self._hopeless_since = now
        if now - self._hopeless_since < GRACE_S:
            return
        if offers:
            members = " and ".join(dict.fromkeys(source.member for source in offers))
            missing = min(lacking, key=self._order.__getitem__)
            self._failure = f"{members} has no {missing} and will get no more: see why the copy to there ended, and run again"
        else:
            self._failure = gone[self._sources[0]]

    def _in_transfer(self, lacking: set[str]) -> bool:
        return len(lacking) + len(self._done) + len(self._given_up) < len(self._files)

    # Taking ---------------------------------------------------------------------------------------------------------------------------

    def _serve_from(self, source: Source, folder: Path, pool: ThreadPoolExecutor) -> None:
        """Take files from one address until there is nothing more to take."""
        folder.mkdir()
        with suppress(RuntimeError):  # the pool of a relay that has ended
            while not self._ended():
                offer = self._fetch_offer(source, folder)
                path = self._claim(source, offer) if offer else None
                if path is None or offer is None:
                    # Not all neighbours at once, and not in step.
                    time.sleep(POLL_S * random.uniform(0.5, 1.0))
                    continue
                if self._pull(source, path, offer, folder):
                    pool.submit(self._verify, path, source)
                else:
                    with self._guard:
                        self._lacking.add(path)
                    time.sleep(POLL_S)

    def _fetch_offer(self, source: Source, folder: Path) -> Offer | None:
        (folder / "list").write_bytes(_replica.list_content([OFFER_FILE]))
        url = _replica.url(f"{self._name}{_replica.OFFER}", source.address, self._port)
        done = _replica.pull(url, str(folder / "list"), str(folder))
        if done.status:
            self._note(source, _replica.pull_failure(url, done))
            return None
        offer = Offer.from_json((folder / OFFER_FILE).read_text())
        with self._guard:
            self._offers[source] = offer
            if source in self._silent and not (offer.files & self._lacking):
                del self._silent[source]
        return offer

    def _claim(self, source: Source, offer: Offer) -> str | None:
        with self._guard:
            elsewhere = [other for key, other in self._offers.items() if key.member != source.member]
            path = choose(self._lacking, offer, elsewhere, self._order)
            if path is not None:
                self._lacking.discard(path)
        return path

    def _pull(self, source: Source, path: str, offer: Offer, folder: Path) -> bool:
        sent = path + ORIGINAL if path in offer.prepared else path
        target = self._directory / sent
        with suppress(OSError):
            if target.is_symlink() or target.lstat().st_nlink > 1:
                target.unlink()  # in place would also write what another name or another folder holds
        (folder / "list").write_bytes(_replica.list_content([sent]))
        url = _replica.url(self._name, source.address, self._port)
        done = _replica.pull(url, str(folder / "list"), str(self._directory), sparse=path in offer.sparse)
        if done.status:
            sentence = _replica.pull_failure(url, done)
            if _replica.is_local(done):
                self._failure = self._failure or sentence
            self._note(source, sentence)
            return False
        if sent != path:
            target.replace(self._directory / path)
        with self._guard:
            self._silent.pop(source, None)
        return True

    def _note(self, source: Source, sentence: str) -> None:
        with self._guard:
            since = self._silent.get(source, (time.monotonic(), ""))[0]
            self._silent[source] = (since, sentence)
            self._offers.pop(source, None)

    # Verifying ------------------------------------------------------------------------------------------------------------------------

    def _verify(self, path: str, source: Source | None) -> None:
        """Offer a file whose content on the disk is right; take another one, or give up, where it is not."""
        found, status = read_file(self._directory / path)
        wanted = self._files[path]
        with self._guard:
            if found.sha256 == wanted.sha256:
                self._stamps.remember(path, status, found.sha256)
                self._stamps.keep(None)
                self._lacking.discard(path)
                self._done.append(path)
            elif source:
                self._wrong[path] = self._wrong.get(path, 0) + 1
                if self._wrong[path] < TRIES:
                    self._lacking.add(path)
                    return
                reason = found.fault or f"SHA-256 {found.sha256}, expected {wanted.sha256}"
                self._given_up[path] = (
                    f"{self._directory}/{path} is corrupt after each of {TRIES} copies, the last from {source.member} ({reason}): verify "
                    f"{source.member} with storage_deep=true, and this member's disk"
                )
        if path in self._done:
            self._publisher.add(path)

    def _watch(self) -> None:
        """On the member where files arrive from outside: offer each as soon as it is whole. Only its hash says when."""
        judged: dict[str, tuple[int, int]] = {}
        while not self._ended():
            for path in sorted(self._lacking, key=self._order.__getitem__):
                with suppress(OSError):
                    status = (self._directory / path).lstat()
                    seen = (status.st_size, status.st_mtime_ns)
                    if status.st_size == self._files[path].size and judged.get(path) != seen:
                        judged[path] = seen
                        self._verify(path, None)
            time.sleep(POLL_S)


def present_bytes(path: Path) -> int:
    """Size of a file that may not be there."""
    with suppress(OSError):
        return path.lstat().st_size
    return 0
