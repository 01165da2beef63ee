# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real rsync daemon with the source's configuration on the loopback, and real pulls from it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _host, _replica

FILES = {
    "config.json": b"{}",
    "model.safetensors": random.Random(1).randbytes(3 * 2**20),
    "sub/-tokenizer #1;x": b"name that could be an option or a comment",
    "not wanted": b"",
}
WANTED = sorted(set(FILES) - {"not wanted"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Source:
    """The daemon and a directory to pull into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        for path, content in FILES.items():
            (root / "source" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "source" / path).write_bytes(content)
        # Outside of its unit, the daemon of root would read as nobody.
        user = f"uid = {os.getuid()}\n" if os.getuid() == 0 else ""
        (root / "conf").write_text(user + _replica.config("tiny", str(root / "source"), self.port, ["127.0.0.1"], root / "offers"))
        self.daemon = subprocess.Popen(
            ["rsync", "--daemon", "--no-detach", f"--config={root / 'conf'}", "--address=127.0.0.1", "--log-file=/dev/null"]
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the daemon does not listen"
                time.sleep(0.02)

    def argv(self, paths: Sequence[str] = WANTED) -> list[str]:
        (self.root / "list").write_bytes(_replica.list_content(paths))
        return _replica.pull_argv(_replica.url("tiny", "127.0.0.1", self.port), str(self.root / "list"), str(self.root / "copy"))

    def pull(self, *options: str, paths: Sequence[str] = WANTED) -> _host.Result:
        argv = self.argv(paths)
        return _host.run([argv[0], *options, *argv[1:]])

    def copy(self) -> dict[str, bytes]:
        folder = self.root / "copy"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    running = Source(tmp_path)
    yield running
    running.daemon.terminate()
    running.daemon.wait(10)


def test_just_the_named_files_are_copied(source: Source) -> None:
    assert source.pull().status == 0
    assert source.copy() == {path: FILES[path] for path in WANTED}


def test_a_wrong_byte_is_healed_though_size_and_times_are_right_and_little_is_sent(source: Source) -> None:
    source.pull()
    path = source.root / "copy/model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2**20)
        file.write(bytes([FILES["model.safetensors"][2**20] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = source.pull("--stats", paths=["model.safetensors"])
    assert source.copy()["model.safetensors"] == FILES["model.safetensors"]
    literal = next(line for line in done.out.splitlines() if line.startswith("Literal data"))
    assert int(literal.split()[2].replace(",", "")) < 2**16


def test_a_killed_copy_goes_on_where_it_ended(source: Source) -> None:
    argv = source.argv(["model.safetensors"])
    cut = subprocess.Popen([argv[0], "--bwlimit=1024", *argv[1:]], start_new_session=True)
    path = source.root / "copy/model.safetensors"
    deadline = time.monotonic() + 60
    try:
        while not path.exists() or path.stat().st_size < 2**18:
            assert time.monotonic() < deadline, "nothing arrives"
            time.sleep(0.02)
    finally:
        os.killpg(cut.pid, signal.SIGKILL)
        cut.wait(10)
    there = path.stat().st_size
    assert there < len(FILES["model.safetensors"])
    done = source.pull("--stats", paths=["model.safetensors"])
    assert source.copy()["model.safetensors"] == FILES["model.safetensors"]
    matched = next(line for line in done.out.splitlines() if line.startswith("Matched data"))
    assert int(matched.split()[2].replace(",", "")) > there // 2


def test_a_stranger_gets_nothing(source: Source) -> None:
    done = source.pull("--address=127.0.0.2")
    assert done.status != 0
    assert not (source.root / "copy").exists()


def test_nobody_can_write(source: Source) -> None:
    done = _host.run(["rsync", "--recursive", f"{source.root}/conf", _replica.url("tiny", "127.0.0.1", source.port)])
    assert done.status != 0
    assert "read only" in done.err
    assert not (source.root / "source/conf").exists()


@pytest.mark.parametrize(
    ("problem", "cure"),
    [("nobody listens", "check the cable"), ("a file is gone", "look at the source's directory"), ("no rsync", "apt-get install rsync")],
)
def test_a_failure_is_one_sentence_with_its_cure(source: Source, problem: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem == "nobody listens":
        source.port = free_port()
    elif problem == "a file is gone":
        (source.root / "source/config.json").unlink()
    else:
        monkeypatch.setenv("PATH", str(source.root))
    sentence = _replica.pull_failure(_replica.url("tiny", "127.0.0.1", source.port), source.pull())
    assert cure in sentence
    assert sentence.startswith(f"copying from rsync://127.0.0.1:{source.port}/tiny/ stopped (")
    assert "\n" not in sentence


def test_the_units_of_one_source_are_not_anothers() -> None:
    assert _replica.unit("image", "10.10.0.1") == "gb10-weights-image@10.10.0.1.service"
    assert _replica.units("image") == "gb10-weights-image@*.service"
    assert not _replica.unit("image-2", "10.10.0.1").startswith(_replica.units("image").removesuffix("*.service"))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "-a", "a]", "a\nb"])
def test_a_name_that_could_be_something_else_is_refused(name: str) -> None:
    assert not _replica.is_name(name)
    assert _replica.is_name("dsv41-exl3-3.5bpw_x")
