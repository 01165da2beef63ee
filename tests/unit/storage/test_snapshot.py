# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads by the real huggingface_hub from a hub on the loopback, with the faults that networks have."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _fetch, _snapshot
from ansible_collections.gb10.cluster.plugins.module_utils._checkpoint import File
from ansible_collections.gb10.cluster.plugins.module_utils._job import JobError
from ansible_collections.gb10.cluster.plugins.module_utils._snapshot import Remote
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from .hub_server import COMMIT, REPOSITORY, Fault, Hub

CONTENT = {
    "config.json": b'{"hidden_size": 8}',
    "model-00001-of-00002.safetensors": random.Random(1).randbytes(600_000),
    "model-00002-of-00002.safetensors": random.Random(2).randbytes(300_000),
    "sub folder/tokenizer #1.json": random.Random(3).randbytes(5_000),
}
BIG = "model-00001-of-00002.safetensors"
TOKEN = "hf_a-token-that-nobody-may-see"

CHUNK = 16_000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the module is for root")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    for path, content in CONTENT.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    running = Hub(folder)
    running.start()
    yield running
    running.stop()


class Download:
    """A directory and downloads into it."""

    def __init__(self, root: Path, hub: Hub) -> None:
        self.directory, self.stamps, self.hub = root / "models", root / "stamps", hub
        self.offered: list[str] = []
        self.reports: list[dict[str, Any]] = []

    def files(self) -> list[Remote]:
        return _snapshot.parse_listing(self.hub.listing(), "here")[1]

    def run(self, token: str = "", files: list[Remote] | None = None) -> list[File]:
        origin = _snapshot.hub(self.hub.url, REPOSITORY, COMMIT)
        fetch = _fetch.Fetch(origin, token, self.directory, self.stamps, _fetch.library(""), self.offered.append, lambda attempt: 0.02)
        return fetch.run(files or self.files(), 2, self.reports.append)

    def content(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}


@pytest.fixture
def download(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Download:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)  # as small to these files as 10 MiB are to real ones
    return Download(tmp_path, hub)


def test_all_files_arrive_with_their_hashes(download: Download) -> None:
    found = download.run()
    assert download.content() == CONTENT
    assert {(file.path, file.size, file.sha256) for file in found} == {
        (path, len(content), sha256(content).hexdigest()) for path, content in CONTENT.items()
    }
    assert sorted(download.offered) == sorted(CONTENT)
    last = download.reports[-1]
    assert (last["files_done"], last["bytes_done"]) == (4, sum(map(len, CONTENT.values())))


@pytest.mark.parametrize(
    "faults",
    [
        [("cut", 100_000)],
        [("cut", 0)],
        [("status", 503)],
        [("status", 429)],
        [("wrong", 1000)],
        [("status", 503), ("cut", 70_000), ("cut", 65_536), ("status", 500)],
    ],
    ids=["cut", "cut before the first byte", "503", "429", "a wrong byte", "several"],
)
def test_what_passes_is_overcome(download: Download, faults: list[Fault]) -> None:
    download.hub.faults[BIG] = list(faults)
    download.run()
    assert download.content() == CONTENT
    assert not download.hub.faults[BIG]


def test_a_cut_download_goes_on_inside_the_file(download: Download) -> None:
    download.hub.faults[BIG] = [("cut", 400_000)] + [("status", 503)] * 20
    with pytest.raises(JobError, match=r"model-00001-of-00002.safetensors from .* does not arrive \(HTTP 503\).*goes on where it ended"):
        download.run()
    assert BIG not in download.content()
    download.hub.faults.clear()
    download.hub.sent.clear()
    download.run()
    assert download.content() == CONTENT
    assert 0 <= download.hub.sent[BIG] - (len(CONTENT[BIG]) - 400_000) < CHUNK


def test_a_killed_download_goes_on_inside_the_file(download: Download, tmp_path: Path) -> None:
    download.hub.rate = 400_000
    program = f"""
import pathlib
from ansible_collections.gb10.cluster.plugins.module_utils import _fetch, _snapshot
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
origin = _snapshot.hub({download.hub.url!r}, {REPOSITORY!r}, {COMMIT!r})
file = _snapshot.Remote({BIG!r}, {len(CONTENT[BIG])}, {sha256(CONTENT[BIG]).hexdigest()!r})
root = pathlib.Path({str(tmp_path)!r})
fetch = _fetch.Fetch(origin, "", root / "models", root / "stamps", _fetch.library(""), print)
fetch.run([file], 1, lambda progress: None)
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    part = _fetch.part_of(download.directory / BIG)
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as killed:
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < 200_000:
            assert time.monotonic() < deadline and killed.poll() is None, "nothing arrives"
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    there = part.stat().st_size
    download.hub.rate = 0
    download.hub.forget()
    download.run()
    assert download.content() == CONTENT
    assert download.hub.sent[BIG] == len(CONTENT[BIG]) - there


def test_a_file_that_is_always_wrong_is_named_and_the_others_arrive(download: Download) -> None:
    download.hub.faults[BIG] = [("wrong", 5)] * 10
    with pytest.raises(JobError, match=r"model-00001-of-00002.safetensors .* was wrong in each of 3 downloads \(SHA-256 .*, expected "):
        download.run()
    assert set(download.content()) == set(CONTENT) - {BIG}


def test_a_small_file_is_held_against_its_git_id(download: Download) -> None:
    download.hub.faults["config.json"] = [("wrong", 3)] * 10
    with pytest.raises(JobError, match=r"config.json .* \(git blob "):
        download.run()


@pytest.mark.parametrize(("token", "words"), [("", "is not public (HTTP 401): give a token"), ("hf_other", "refuses the token (HTTP 403)")])
def test_a_token_without_access_is_refused_at_once(download: Download, token: str, words: str) -> None:
    download.hub.token = TOKEN
    with pytest.raises(JobError) as caught:
        download.run(token)
    assert words in str(caught.value) and "hf_other" not in str(caught.value)
    assert len([path for command, path, headers in download.hub.requests if BIG in path]) <= 1
    assert not download.content()


def test_the_token_goes_to_the_hub_and_to_nobody_else(download: Download) -> None:
    download.hub.token = TOKEN
    download.run(TOKEN)
    asked = [(path, headers.get("authorization")) for command, path, headers in download.hub.requests]
    assert {value for path, value in asked if path.startswith("/files/")} == {None}
    assert {value for path, value in asked if not path.startswith("/files/")} == {f"Bearer {TOKEN}"}


def test_a_signed_address_is_in_no_sentence(download: Download) -> None:
    download.hub.faults[BIG] = [("status", 404)]
    with pytest.raises(JobError) as caught:
        download.run()
    assert "does not exist (HTTP 404)" in str(caught.value) and "signature" not in str(caught.value)


def test_what_lies_behind_a_link_is_refused(download: Download, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    download.directory.mkdir()
    (download.directory / "sub folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="lies behind a link"):
        download.run()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_was_verified_is_not_read_again(download: Download) -> None:
    from ansible_collections.gb10.cluster.plugins.module_utils._survey import survey

    download.run()
    assert survey(download.directory, {path: len(content) for path, content in CONTENT.items()}, False, 2, download.stamps).hashed == 0


def test_a_plain_web_server_will_do(download: Download) -> None:
    """Files below an address, by a manifest."""
    files = [Remote(path, len(content), sha256(content).hexdigest()) for path, content in CONTENT.items()]
    origin = _snapshot.prefix(f"{download.hub.url}/files/")
    fetch = _fetch.Fetch(origin, "", download.directory, download.stamps, _fetch.library(""), print, lambda attempt: 0.02)
    fetch.run(files, 2, download.reports.append)
    assert download.content() == CONTENT


# The module whole, and the job behind it --------------------------------------------------------------------------------------------------


def arguments(tmp_path: Path, hub: Hub, options: dict[str, Any]) -> dict[str, Any]:
    return {"path": str(tmp_path / "models"), "name": f"test-{os.getpid()}", "repository": REPOSITORY, "endpoint": hub.url} | options


def module(tmp_path: Path, hub: Hub, **options: Any) -> dict[str, Any]:
    """What the module answers; it keeps its job below /run and its stamps below /var/lib."""
    given = json.dumps({"ANSIBLE_MODULE_ARGS": arguments(tmp_path, hub, options)})
    command = [sys.executable, "-m", "ansible_collections.gb10.cluster.plugins.modules.hf_snapshot"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    result.pop("invocation", None)  # hidden by Ansible itself
    assert TOKEN not in json.dumps(result) + done.stderr
    return result


@needs_root
def test_the_module_downloads_once_and_then_asks_nobody(tmp_path: Path, hub: Hub) -> None:
    hub.token = TOKEN
    hub.faults["listing"] = [("status", 503)]
    first = module(tmp_path, hub, token=TOKEN, include=["*.json", "*.safetensors"], exclude=["sub folder/"], wait=60)
    wanted = sorted(set(CONTENT) - {"sub folder/tokenizer #1.json"})
    assert (first["changed"], first["ok"], first["finished"], first["commit"]) == (True, True, True, COMMIT)
    assert [file["path"] for file in first["manifest"]["files"]] == first["copied"] == wanted
    assert all(file["sha256"] == sha256(CONTENT[file["path"]]).hexdigest() for file in first["manifest"]["files"])
    hub.requests.clear()
    second = module(tmp_path, hub, token=TOKEN, manifest=first["manifest"])
    assert (second["changed"], second["copied"], hub.requests) == (False, [], [])


@needs_root
def test_check_mode_says_what_would_be_downloaded_and_writes_nothing(tmp_path: Path, hub: Hub) -> None:
    checked = module(tmp_path, hub, _ansible_check_mode=True)
    assert (checked["changed"], checked["copied"]) == (True, sorted(CONTENT))
    assert f"{BIG} (585.9 KiB)" in checked["diff"]["after"]
    assert not (tmp_path / "models").exists()


@needs_root
def test_a_second_run_finds_the_first_ones_job_and_shows_it(tmp_path: Path, hub: Hub) -> None:
    """By Ansible itself, with the side of it that runs on the controller. The token is in no line of its most talkative output."""
    hub.rate, hub.token = 10_000, TOKEN
    started = module(tmp_path, hub, state="started", token=TOKEN)
    assert (started["finished"], len(started["manifest"]["files"])) == (False, len(CONTENT))
    given = json.dumps(arguments(tmp_path, hub, {"token": TOKEN, "wait": 0.3}))
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-c", "local", "-m", "gb10.cluster.hf_snapshot", "-a", given]
    command += ["-e", f"ansible_python_interpreter={sys.executable}"]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    shown = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            shown += line
            hub.rate = 0 if " localhost: " in line else hub.rate
    result = json.loads(shown[shown.index("=> {") + 3 :])
    assert result["finished"] and result["changed"] and result["copied"] == sorted(CONTENT)
    assert re.search(r"^ +\d+ s  localhost: \d of 3 files, [^|]* KiB \(\d+ %\)", shown, re.MULTILINE), shown
    assert TOKEN not in shown
    assert hub.sent[BIG] == len(CONTENT[BIG])


@needs_root
def test_the_token_is_in_no_process_list_and_no_file_of_the_job(tmp_path: Path, hub: Hub) -> None:
    hub.rate, hub.token = 200_000, TOKEN
    module(tmp_path, hub, state="started", token=TOKEN)
    shown = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    kept = "".join(path.read_text(errors="replace") for path in Path("/run/gb10/jobs").iterdir())
    assert TOKEN not in shown + kept
    assert module(tmp_path, hub, state="awaited", wait=60)["finished"]


@needs_root
def test_a_stopped_download_keeps_what_it_has(tmp_path: Path, hub: Hub) -> None:
    hub.rate = 30_000_000
    huge = random.Random(4).randbytes(60_000_000)
    (hub.folder / "huge.bin").write_bytes(huge)
    module(tmp_path, hub, state="started")
    part = _fetch.part_of(tmp_path / "models" / "huge.bin")
    deadline = time.monotonic() + 60
    while not part.exists() or not part.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert module(tmp_path, hub, state="stopped")["changed"]
    assert module(tmp_path, hub, state="awaited")["msg"].startswith("the work was ended from outside")
    there = part.stat().st_size
    assert 0 < there < len(huge)
    hub.rate = 0
    hub.forget()
    assert module(tmp_path, hub, wait=60)["finished"]
    assert hub.sent["huge.bin"] == len(huge) - there


@needs_root
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"include": ["*.gguf"]}, "no file of lab/checkpoint at main"),
        ({"repository": "checkpoint"}, "is no repository: give OWNER/NAME"),
        ({"revision": "v2"}, "does not exist (HTTP 404)"),
        ({"max_used_percent": 0}, "which would fill the disk above 0 %"),
        ({"token": "hf_other"}, "refuses the token (HTTP 403)"),
        ({"manifest": {"version": 2}}, "the manifest is not"),
        ({"endpoint": "http://127.0.0.1:9"}, "gives no list of its files ("),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, hub: Hub, options: dict[str, Any], words: str) -> None:
    hub.token = TOKEN
    refused = module(tmp_path, hub, **({"token": TOKEN} | options))
    assert refused["failed"] and words in refused["msg"] and "\n" not in refused["msg"]
    assert not (tmp_path / "models").exists()


# The pure part ----------------------------------------------------------------------------------------------------------------------------

PATHS = st.sampled_from(["config.json", "a/b.json", "a/c.bin", "m-1.safetensors", "m-2.safetensors"])


@given(st.sets(PATHS, min_size=1), st.lists(st.sampled_from(["*.json", "a/", "*"]), max_size=2))
def test_patterns_choose_from_what_there_is(paths: set[str], exclude: list[str]) -> None:
    files = [Remote(path, 1, "0" * 64) for path in paths]
    try:
        chosen = {file.path for file in _snapshot.select(files, [], exclude, "here")}
    except JobError:
        chosen = set()
    excluded = {
        path for path in paths if "*" in exclude or ("*.json" in exclude and path.endswith(".json")) or ("a/" in exclude and path[0] == "a")
    }
    assert chosen == paths - excluded


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a\nb", "x*"])
def test_a_hub_cannot_write_elsewhere(path: str) -> None:
    with pytest.raises(JobError, match="no checkpoint can have"):
        _snapshot.select([Remote(path, 1, "0" * 64)], [], [], "here")


@pytest.mark.parametrize("content", [{}, {"sha": "a"}, {"sha": "a", "siblings": [{}]}, {"siblings": []}, {"sha": "a", "siblings": None}])
def test_another_servers_answer_is_no_list(content: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="is not a hub's"):
        _snapshot.parse_listing(content, "here")


@given(st.integers(400, 599), st.booleans())
def test_an_answer_is_final_or_may_pass(status: int, has_token: bool) -> None:
    sentence = _snapshot.refusal(status, "here", has_token)
    assert bool(sentence) == (status < 500 and status not in (408, 425, 429))
    assert not sentence or (f"HTTP {status}" in sentence and ": " in sentence)
