# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Members that pass a checkpoint on while they receive it: real rsync daemons on loopback addresses, real copies, real faults."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _checkpoint, _engine, _relay, _replica
from ansible_collections.gb10.cluster.plugins.module_utils._checkpoint import File
from ansible_collections.gb10.cluster.plugins.module_utils._job import JobError
from ansible_collections.gb10.cluster.plugins.module_utils._relay import MAX_DEPTH, Offer, Publisher, Relay, Source
from ansible_collections.gb10.cluster.plugins.module_utils._survey import read_file, survey
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.runtime import test_engine as image

NAME = "tiny"
CONTENT = {f"model-{index}.safetensors": random.Random(index).randbytes(2**18) for index in range(6)} | {"sub/config.json": b"{}"}
FILES = [File(path, len(content), sha256(content).hexdigest()) for path, content in sorted(CONTENT.items())]
SETTLE_S = 1.0


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


class Member:
    """A directory, the daemon that serves it on an address of its own, and the relay that fills it."""

    port = 8731

    def __init__(self, root: Path, number: int) -> None:
        self.name = f"t{number}"
        self.address = f"127.0.0.{10 + number}"
        self.root = root / self.name
        self.directory, self.offers = self.root / "models", self.root / "offers"
        for folder in (self.directory, self.offers):
            folder.mkdir(parents=True)
        user = f"uid = {os.getuid()}\n" if os.getuid() == 0 else ""
        config = _replica.config(NAME, str(self.directory), self.port, ["127.0.0.0/8"], self.offers)
        (self.root / "conf").write_text(user + config)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.result: dict[str, Any] = {}
        self.thread: threading.Thread | None = None
        self.reports: list[dict[str, Any]] = []

    def serve(self, *options: str) -> None:
        command = ["rsync", "--daemon", "--no-detach", f"--config={self.root}/conf", f"--address={self.address}"]
        self.daemon = subprocess.Popen([*command, "--log-file=/dev/null", *options], start_new_session=True)

    def off(self) -> None:
        """The daemon, and what it sends just now."""
        if self.daemon:
            os.killpg(self.daemon.pid, signal.SIGTERM)
            self.daemon.wait(10)
            self.daemon = None

    def put(self, *paths: str) -> None:
        """Files arrive from outside."""
        for path in paths or CONTENT:
            target = self.directory / path
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(CONTENT[path])

    def take(self, *sources: Member, patience: float = 60, files: Sequence[File] = FILES, held: Sequence[str] = ()) -> None:
        """Start to fill the directory with the files that it lacks."""

        def work() -> None:
            addresses = [Source(source.name, source.address) for source in sources]
            publisher = Publisher(self.offers, self.directory, held, 1 if sources else 0)
            relay = Relay(NAME, self.directory, files, publisher, addresses, self.port, self.root / "stamps", patience)
            try:
                self.result = relay.run(self.reports.append)
            except JobError as error:
                self.result = {"msg": str(error)}

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def offer_all(self) -> None:
        self.put()
        Publisher(self.offers, self.directory, CONTENT, None)

    def end(self) -> dict[str, Any]:
        assert self.thread
        self.thread.join(90)
        assert not self.thread.is_alive(), "the relay does not end"
        return self.result

    def is_whole(self) -> bool:
        return self.end().get("copied") == sorted(CONTENT) and self.content() == CONTENT

    def content(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    monkeypatch.setattr(_relay, "POLL_S", 0.05)
    monkeypatch.setattr(_relay, "GRACE_S", 1.0)
    monkeypatch.setattr(_relay, "MAX_DEPTH", 8)
    made = [Member(tmp_path, number) for number in range(1, 5)]
    for member in made:
        member.serve()
    yield made
    for member in made:
        member.off()
        if member.thread:
            member.thread.join(90)


def test_files_go_on_while_they_arrive(members: list[Member]) -> None:
    """A chain of three: the last one has the first file before the first one has its last."""
    first, second, third, _fourth = members
    first.take()
    second.take(first)
    third.take(second)
    early = sorted(CONTENT)[:3]
    first.put(*early)
    wait_for(lambda: set(third.content()) >= set(early))
    assert set(first.content()) == set(early)
    first.put()
    assert first.is_whole() and second.is_whole() and third.is_whole()
    last = third.reports[-1]
    assert (last["files_done"], last["bytes_done"]) == (len(FILES), sum(file.size for file in FILES))


def test_a_wrong_file_is_not_passed_on(members: list[Member]) -> None:
    """What arrives at the second with a byte turned stays there: it is offered when its content is right, and not before."""
    first, second, third, _fourth = members
    path = FILES[0].path
    first.offer_all()
    turned = bytearray(CONTENT[path])
    turned[1000] ^= 1
    (first.directory / path).write_bytes(turned)
    second.take(first, patience=2)
    third.take(second)
    assert f"{path} is corrupt after each of 3 copies, the last from t1 (SHA-256 " in second.end()["msg"]
    assert path not in third.end().get("copied", [])
    assert f"t2 has no {path}" in third.end()["msg"]
    assert not (third.directory / path).exists()
    # The next run finishes, and sends little of what is there.
    first.put(path)
    second.take(first)
    third.take(second)
    assert second.is_whole() and third.is_whole()


def test_what_one_source_has_wrong_comes_from_another(members: list[Member]) -> None:
    first, second, third, _fourth = members
    first.offer_all()
    second.offer_all()
    (first.directory / FILES[0].path).write_bytes(bytes(FILES[0].size))
    third.take(first, second)
    # Random who is asked first: it is whole, or says which source was wrong.
    result = third.end()
    assert third.content() == CONTENT or "the last from t1" in result["msg"]


def test_a_member_that_fails_stops_no_other(members: list[Member]) -> None:
    """The second of a ring of four is gone: the third gets everything from the other side."""
    first, second, third, fourth = members
    second.off()
    first.take()
    fourth.take(first)
    third.take(second, fourth, patience=5)
    first.put()
    assert first.is_whole() and fourth.is_whole() and third.is_whole()


def test_a_source_that_freezes_within_a_file_is_left(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still takes connections and acknowledges what rsync writes, so that rsync itself would wait for ever."""
    monkeypatch.setattr(_replica, "GREETING_EVERY_S", 0.2)
    monkeypatch.setattr(_replica, "DEATH_S", 1.0)
    first, second, third, _fourth = members
    content = random.Random(9).randbytes(2**20)
    file = File("model.safetensors", len(content), sha256(content).hexdigest())
    (first.directory / file.path).write_bytes(content)
    Publisher(first.offers, first.directory, [file.path], None)
    first.off()
    first.serve("--bwlimit=256")  # KiB a second, so that the file takes four
    third.take(first, second, files=[file])
    wait_for(lambda: 0 < _relay.present_bytes(third.directory / file.path) < file.size)
    assert first.daemon
    os.killpg(first.daemon.pid, signal.SIGSTOP)
    (second.directory / file.path).write_bytes(content)
    Publisher(second.offers, second.directory, [file.path], None)
    try:
        assert third.end()["copied"] == [file.path]
    finally:
        os.killpg(first.daemon.pid, signal.SIGCONT)
    assert third.content() == {file.path: content}


def test_a_source_that_is_gone_for_good_is_named(members: list[Member]) -> None:
    first, second, third, _fourth = members
    first.off()
    second.take(first, patience=1)
    third.take(second, patience=1)
    assert "copying from rsync://127.0.0.11:8731/tiny+offer/ stopped" in second.end()["msg"]
    assert "check the cable" in second.end()["msg"]
    assert "t2 has no " in third.end()["msg"]


def test_members_that_wait_for_each_other_find_out(members: list[Member]) -> None:
    first, second, third, _fourth = members
    first.put(*sorted(CONTENT)[:3])
    Publisher(first.offers, first.directory, sorted(CONTENT)[:3], None)
    second.take(first, third)
    third.take(first, second)
    for member in (second, third):
        assert " and will get no more" in member.end()["msg"]
        assert set(member.content()) == set(sorted(CONTENT)[:3])
    first.offer_all()
    second.take(first, third)
    third.take(first, second)
    assert second.is_whole() and third.is_whole()


def test_a_source_that_comes_back_is_used(members: list[Member]) -> None:
    first, second, _third, _fourth = members
    first.offer_all()
    first.off()
    second.take(first)
    time.sleep(SETTLE_S)
    first.serve()
    assert second.is_whole()


def test_a_file_with_another_name_elsewhere_gets_content_of_its_own(members: list[Member]) -> None:
    """In place would write into what the other name holds, such as a shard that a slim directory links to."""
    first, second, _third, _fourth = members
    first.offer_all()
    other = second.root / "shard"
    other.write_bytes(b"of another revision")
    (second.directory / FILES[0].path).hardlink_to(other)
    second.take(first)
    assert second.is_whole()
    assert other.read_bytes() == b"of another revision"


def test_holes_stay_holes(members: list[Member]) -> None:
    first, second, _third, _fourth = members
    first.offer_all()
    size, path = 2**24, "holes.bin"
    for number, at in ((1, 2**20), (2, 2**23)):
        with (first.directory / path).open("r+b" if number == 2 else "wb") as file:
            file.truncate(size)
            file.seek(at)
            file.write(b"x" * 4096)
    content = (first.directory / path).read_bytes()
    publisher = Publisher(first.offers, first.directory, [*CONTENT, path], None)
    assert publisher
    wanted = [File(path, size, sha256(content).hexdigest())]
    relay = Relay(
        NAME,
        second.directory,
        wanted,
        Publisher(second.offers, second.directory, [], 1),
        [Source("t1", first.address)],
        8731,
        second.root / "stamps",
    )
    relay.run(lambda progress: None)
    assert (second.directory / path).read_bytes() == content
    assert (second.directory / path).stat().st_blocks * 512 < size // 4
    assert Offer.from_json((second.offers / "offer.json").read_text()).sparse == {path}


def test_of_a_prepared_file_the_original_goes_around(members: list[Member]) -> None:
    """The head's config.json is edited for its ranks, and its original lies beside it; the others are to get what the manifest says."""
    first, second, third, _fourth = members
    first.offer_all()
    edited, original = first.directory / "sub/config.json", first.directory / "sub/config.json.orig-hf"
    original.write_bytes(edited.read_bytes())
    edited.write_bytes(b'{"padded": true}')
    Publisher(first.offers, first.directory, CONTENT, None)
    second.take(first)
    third.take(second)
    assert second.is_whole() and third.is_whole()
    assert edited.read_bytes() == b'{"padded": true}'


def test_the_stamps_spare_reading_it_again(members: list[Member]) -> None:
    first, second, _third, _fourth = members
    first.offer_all()
    second.take(first)
    assert second.is_whole()
    seen = survey(second.directory, {file.path: file.size for file in FILES}, False, 2, second.root / "stamps")
    assert seen.hashed == 0 and {path: found.sha256 for path, found in seen.found.items()} == {file.path: file.sha256 for file in FILES}


class ImageHead:
    """The head of a run that brings an image: what it lays out each time, and which files of that a member lacks."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def lay_out(self) -> None:
        """As the export does, from what the engine saves."""
        folder = self.member.directory
        for path in folder.iterdir():
            path.unlink()
        _engine.unpack(image.saved(*image.FORMS["podman"]), folder, set())
        found = {path.name: read_file(path)[0] for path in folder.iterdir()}
        self.files = [File(name, each.size, each.sha256) for name, each in sorted(found.items())]
        Publisher(self.member.offers, folder, found, None)

    def lacking(self, member: Member) -> list[File]:
        """As the copy's module asks, also of a file that is there in part."""
        seen = survey(member.directory, {file.path: file.size for file in self.files}, False, None, member.root / "stamps")
        return _checkpoint.to_copy(self.files, _checkpoint.compare(self.files, seen.found))


def test_a_layer_that_was_cut_on_its_way_goes_on_in_the_next_run(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """The head goes off within a layer; the next run lays the image out anew, sends the rest, and the others still pass it on."""
    first, second, third, _fourth = members
    head = ImageHead(first)
    head.lay_out()
    first.off()
    first.serve("--bwlimit=128")  # KiB a second, so that the layer takes twelve
    second.take(first, patience=1, files=head.lacking(second))
    layer = second.directory / f"{image.IDS[0]}.tar"
    wait_for(lambda: _relay.present_bytes(layer) >= 2**17)
    first.off()
    assert "it goes on where it ended" in second.end()["msg"]
    there, whole = layer.stat().st_size, len(image.LAYERS[0])
    assert 0 < there < whole

    log, argv = first.root / "log", _replica.pull_argv

    def told(source: str, *rest: Any, **options: Any) -> list[str]:
        """The same copy; those from the head say how much of it was sent."""
        program, *words = argv(source, *rest, **options)
        return [program, *(["--stats", f"--log-file={log}"] if first.address in source else []), *words]

    monkeypatch.setattr(_replica, "pull_argv", told)
    head.lay_out()
    first.serve()
    lacking = head.lacking(second)
    second.take(first, files=lacking, held=[file.path for file in head.files if file not in lacking])
    third.take(second, files=head.files)
    for member in (second, third):
        assert layer.name in member.end()["copied"]
        held = _engine.held_by(member.directory)
        assert (held.id, held.layers) == (image.ID, tuple(image.IDS))
        assert member.content() == first.content()
    sent = [int(size.replace(",", "")) for size in re.findall(r"Literal data: ([\d,]+)", log.read_text())]
    assert 0 < sum(sent) < whole - there // 2


PATHS = st.frozensets(st.sampled_from("abcd"))
OFFERS = st.builds(Offer, PATHS, PATHS, PATHS, st.one_of(st.none(), st.integers(0, 70)))


@given(OFFERS)
def test_an_offer_survives_its_way(offer: Offer) -> None:
    assert Offer.from_json(offer.to_json().decode()) == offer


@given(st.lists(st.one_of(st.none(), OFFERS)))
def test_depth_counts_from_where_files_arrive(sources: list[Offer | None]) -> None:
    depth = _relay.depth_behind(sources)
    known = [0 if source is None else source.depth for source in sources]
    if depth is None:
        assert all(other is None or other + 1 >= MAX_DEPTH for other in known)
    else:
        assert depth - 1 == min(other for other in known if other is not None)


@given(st.sets(st.sampled_from("abcd")), OFFERS, st.lists(OFFERS))
def test_the_scarcest_file_is_taken_first(lacking: set[str], offer: Offer, elsewhere: list[Offer]) -> None:
    order = {path: index for index, path in enumerate("abcd")}
    path = _relay.choose(lacking, offer, elsewhere, order)
    if path is None:
        assert not lacking & offer.files
    else:
        copies = {other: sum(other in offers.files for offers in elsewhere) for other in lacking & offer.files}
        assert copies[path] == min(copies.values())
