# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The build cache: same inputs, same artefact; half an artefact is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import cache
from tests.lab.paths import REPOSITORY
from tests.lab.progress import LabError, run_long


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def counting() -> tuple[Callable[[Path], None], list[Path]]:
    built: list[Path] = []

    def builder(destination: Path) -> None:
        assert list(destination.iterdir()) == []
        (destination / "file").write_text("whole")
        built.append(destination)

    return builder, built


def test_a_second_build_of_the_same_inputs_reuses_the_first() -> None:
    builder, built = counting()
    first = cache.build("thing", {"a": 1, "b": [2]}, builder)
    assert cache.build("thing", {"b": [2], "a": 1}, builder) == first
    assert len(built) == 1
    assert (first / "file").read_text() == "whole"
    assert cache.find("thing", {"a": 1, "b": [2]}, builder) == first
    assert cache.find("thing", {"a": 2, "b": [2]}, builder) is None


def test_the_content_of_a_path_counts_and_its_name_does_not(tmp_path: Path) -> None:
    builder, _built = counting()
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("x")
    other.write_text("x")
    assert cache.key({"p": one}, builder) == cache.key({"p": other}, builder)
    other.write_text("y")
    assert cache.key({"p": one}, builder) != cache.key({"p": other}, builder)


@pytest.mark.parametrize("change", ["content", "name", "executable", "link"])
def test_every_change_of_a_tree_counts(change: str, tmp_path: Path) -> None:
    builder, _built = counting()
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_text("x")
    (tree / "sub/link").symlink_to("file")
    before = cache.key({"p": tree}, builder)
    if change == "content":
        (tree / "sub/file").write_text("y")
    elif change == "name":
        (tree / "sub/file").rename(tree / "sub/elif")
    elif change == "executable":
        (tree / "sub/file").chmod(0o755)
    else:
        (tree / "sub/link").unlink()
        (tree / "sub/link").symlink_to("elif")
    assert cache.key({"p": tree}, builder) != before


def test_an_input_without_a_meaning_is_refused() -> None:
    with pytest.raises(TypeError, match="not object"):
        cache.key({"p": object()}, counting()[0])


def test_a_builder_that_fails_leaves_nothing_and_the_next_one_starts_afresh() -> None:
    def failing(destination: Path) -> None:
        (destination / "half").touch()
        raise LabError("no")

    with pytest.raises(LabError, match="no"):
        cache.build("thing", {}, failing)
    assert [path.name for path in (cache.cache_directory() / "thing").iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_cleared() -> None:
    builder, _built = counting()
    remains = cache.cache_directory() / "thing/.unfinished-0123"
    remains.mkdir(parents=True)
    cache.build("thing", {}, builder)
    assert not remains.exists()


def test_two_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom tests.lab import cache\n"
        "def builder(destination):\n    time.sleep(0.5)\n    Path(sys.argv[1]).open('a').write('built\\n')\n"
        "print(cache.build('thing', {}, builder))\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, str(script), str(log)]
    both = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) for _copy in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert log.read_text() == "built\n"


def test_prune_deletes_all_but_what_is_kept() -> None:
    builder, _built = counting()
    old, used, new = (cache.build("thing", {"version": version}, builder) for version in range(3))
    assert cache.prune("thing", keep={used, new}) == [old.name]
    assert not old.exists()
    assert (used / "file").exists()
    assert (new / "file").exists()


def test_a_failing_command_shows_its_last_lines() -> None:
    if os.geteuid() != 0:
        pytest.skip("process namespaces are root's")
    with pytest.raises(LabError, match=r"(?s)build: `sh` ended with status 3; its last lines:\n.*the reason$"):
        run_long(["sh", "-c", "echo the reason >&2; exit 3"], title="build")


def test_a_long_command_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("process namespaces are root's")
    marker = tmp_path / "marker"
    code = f"from tests.lab.progress import run_long; run_long(['sh', '-c', 'touch {marker}; sleep 3; echo > {marker}.late'], title='x')"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    deadline = time.monotonic() + 30
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marker.exists()
    parent.kill()
    parent.wait(timeout=10)
    time.sleep(4)
    assert not Path(f"{marker}.late").exists()
