# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Manifests, and what a directory lacks to be what its manifest says."""

from __future__ import annotations

import hashlib
import json
import os.path
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _checkpoint
from ansible_collections.gb10.cluster.plugins.module_utils._checkpoint import File, Found
from hypothesis import assume, given
from hypothesis import strategies as st

SHA = "0" * 64
names = st.text(st.sampled_from("ab.-"), min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(paths, st.binary(max_size=3), max_size=6)


def wanted(tree: dict[str, bytes]) -> tuple[File, ...]:
    return tuple(File(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in sorted(tree.items()))


def found(tree: dict[str, bytes]) -> dict[str, Found]:
    return {path: Found(len(content), hashlib.sha256(content).hexdigest()) for path, content in tree.items()}


def manifest(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "files": [{"path": "config.json", "size": 2, "sha256": SHA, **changes}]}


@given(trees.filter(bool))
def test_a_manifest_holds_what_it_was_made_from(tree: dict[str, bytes]) -> None:
    assert _checkpoint.parse_manifest(_checkpoint.manifest_of(wanted(tree))) == wanted(tree)


@given(st.text(st.sampled_from("a./\\*\n~"), max_size=8))
def test_no_accepted_path_leaves_the_directory(path: str) -> None:
    try:
        (file,) = _checkpoint.parse_manifest(manifest(path=path))
    except _checkpoint.ManifestError as error:
        assert repr(path) in str(error)
    else:
        assert os.path.normpath(f"/root/checkpoint/{file.path}") == f"/root/checkpoint/{file.path}"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "", ".", "..", "a\0b", "a\nb", "*.json", 7])
def test_an_unsafe_path_is_refused(path: Any) -> None:
    with pytest.raises(_checkpoint.ManifestError, match="plain path"):
        _checkpoint.parse_manifest(manifest(path=path))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "no manifest"),
        ({"version": 2, "files": []}, "is not"),
        ({"version": 1, "files": {}}, "is not"),
        ({"version": 1, "files": [], "name": "x"}, "is not"),
        ({"version": 1, "files": []}, "no files"),
        ({"version": 1, "files": ["config.json"]}, r"files\[0\]"),
        (manifest(size=-1), "size -1"),
        (manifest(size=True), "size True"),
        (manifest(size="2"), "size '2'"),
        (manifest(sha256=SHA.upper().replace("0", "A")), "sha256"),
        (manifest(sha256=None), "sha256"),
        (manifest(mode="0644"), r"files\[0\]"),
        ({"version": 1, "files": manifest()["files"] * 2}, "config.json twice"),
    ],
)
def test_a_bad_manifest_is_refused_in_one_sentence(data: dict[str, Any], words: str) -> None:
    with pytest.raises(_checkpoint.ManifestError, match=words) as caught:
        _checkpoint.parse_manifest(data)
    assert "\n" not in str(caught.value)


@given(trees, trees)
def test_every_file_is_told_once_and_by_its_kind(want: dict[str, bytes], have: dict[str, bytes]) -> None:
    report = _checkpoint.report(_checkpoint.compare(wanted(want), found(have)))
    assert report["missing"] == sorted(set(want) - set(have))
    assert report["short"] == sorted(path for path in want if path in have and len(have[path]) < len(want[path]))
    others = [path for path in want if path in have and path not in report["short"]]
    assert report["corrupt"] == sorted(path for path in others if have[path] != want[path])
    assert report["extra"] == sorted(path for path in set(have) - set(want) if not path.startswith(".") and "/." not in path)
    assert len(report["problems"]) == sum(len(report[kind]) for kind in _checkpoint.KINDS)
    assert report["ok"] == (not report["problems"])


@given(trees, trees)
def test_copying_what_is_named_and_removing_what_is_extra_cures(want: dict[str, bytes], have: dict[str, bytes]) -> None:
    files = wanted(want)
    problems = _checkpoint.compare(files, found(have))
    copies = _checkpoint.to_copy(files, problems)
    growth = _checkpoint.growth(copies, found(have))
    for problem in problems:
        if problem.kind == "extra":
            del have[problem.path]
    before = sum(max(len(have.get(file.path, b"")), file.size) for file in copies) - growth
    assert before == sum(len(have.get(file.path, b"")) for file in copies)
    have |= {file.path: want[file.path] for file in copies}
    assert not _checkpoint.compare(files, found(have))


def test_extra_files_can_be_let_be() -> None:
    assert not _checkpoint.compare(wanted({"a": b"1"}), found({"a": b"1", "b": b"2"}), allow_extra=True)


def test_the_verdict_names_the_first_file_both_hashes_and_the_cure() -> None:
    problems = _checkpoint.compare(wanted({"b.safetensors": b"12", "c": b""}), found({"b.safetensors": b"21"}))
    verdict = _checkpoint.verdict("/models/x", problems)
    assert verdict.startswith("/models/x/b.safetensors is corrupt")
    assert hashlib.sha256(b"12").hexdigest() in verdict
    assert hashlib.sha256(b"21").hexdigest() in verdict
    assert "(1 more problem)" in verdict
    assert verdict.endswith(_checkpoint.CURES["corrupt"])
    assert _checkpoint.verdict("/models/x", []) == ""


def test_a_file_that_cannot_be_read_says_why() -> None:
    (problem,) = _checkpoint.compare(wanted({"a": b"1"}), {"a": Found(1, fault="Input/output error")})
    assert (problem.kind, str(problem)) == ("corrupt", "a cannot be read (Input/output error)")


def test_the_disk_needs_room_only_for_what_is_not_there() -> None:
    """A full disk with the whole checkpoint on it is no problem; a half-copied file counts with its second half."""
    files = (File("a", 100, SHA), File("b", 50, SHA))
    assert _checkpoint.growth(files, {"a": Found(60), "b": Found(70)}) == 40
    assert _checkpoint.shortage("/models", 0, 0) == ""
    assert _checkpoint.shortage("/models", 40, 40) == ""
    gib = 2**30
    assert _checkpoint.shortage("/models", 185 * gib, 147 * gib) == (
        "/models has 147.0 GiB of disk space left and needs 185.0 GiB more: free 38.0 GiB there"
    )


@given(trees.filter(bool), st.data())
def test_what_was_not_known_is_learned_and_what_was_known_must_hold(tree: dict[str, bytes], data: st.DataObject) -> None:
    """A manifest with gaps, held against the checkpoint itself, becomes the manifest of the checkpoint."""
    plain = {path: content for path, content in tree.items() if not _checkpoint.is_hidden(path)}
    assume(plain)
    gaps = _checkpoint.manifest_of(wanted(plain))
    for entry in gaps["files"]:
        for key in data.draw(st.sets(st.sampled_from(["size", "sha256"]))):
            entry[key] = None
    listed = data.draw(st.sets(st.sampled_from(sorted(plain)), min_size=1))
    partial = {"version": 1, "complete": False, "files": [entry for entry in gaps["files"] if entry["path"] in listed]}
    for given_manifest in (gaps, partial):
        known = _checkpoint.parse_known(given_manifest)
        assert _checkpoint.learn(known, found(plain)) == (wanted(plain), [])
    path = min(listed)
    changed = {**plain, path: plain[path] + b"x"}
    _files, problems = _checkpoint.learn(_checkpoint.parse_known(partial), found(changed))
    contradicted = next(entry for entry in partial["files"] if entry["path"] == path)
    expected = [path] if contradicted["size"] is not None or contradicted["sha256"] is not None else []
    assert [problem.path for problem in problems] == expected
    del changed[path]
    assert [str(problem) for problem in _checkpoint.learn(known, found(changed))[1]] == [f"{path} is missing"]


@pytest.mark.parametrize("gap", [{"size": None}, {"sha256": None}])
def test_a_manifest_with_gaps_cannot_be_copied_by(gap: dict[str, None]) -> None:
    with pytest.raises(_checkpoint.ManifestError, match=r"config\.json: fetch the checkpoint once"):
        _checkpoint.parse_manifest(manifest(**gap))
    with pytest.raises(_checkpoint.ManifestError, match="not complete: fetch"):
        _checkpoint.parse_manifest({**manifest(), "complete": False})


def test_an_edited_file_is_right_while_its_original_is_kept() -> None:
    """So a verification after the head padding is no alarm, and a copy does not undo the padding."""
    files = wanted({"config.json": b"old"})
    original = f"config.json{_checkpoint.ORIGINAL}"
    assert _checkpoint.compare(files, found({"config.json": b"padded", original: b"old"})) == []
    assert _checkpoint.compare(files, found({"config.json": b"old", original: b"older"})) == []
    for have, kind in ({"config.json": b"padded", original: b"oldest"}, "corrupt"), ({original: b"old"}, "missing"):
        assert [problem.kind for problem in _checkpoint.compare(files, found(have))] == [kind]
    stray = found({"config.json": b"old", f"other{_checkpoint.ORIGINAL}": b""})
    assert [problem.path for problem in _checkpoint.compare(files, stray)] == [f"other{_checkpoint.ORIGINAL}"]
    gaps = _checkpoint.parse_known(manifest(size=3, sha256=None))
    assert _checkpoint.learn(gaps, found({"config.json": b"padded", original: b"old"})) == (files, [])


def test_the_shipped_manifests_say_what_is_published() -> None:
    """54 files of 460 GB (LLMKube), 39 shards (MiaAI-Lab); the tables' shards are the same in both."""
    folder = Path(__file__).resolve().parents[3] / "profiles/manifests"
    known = {path.stem: _checkpoint.parse_known(json.loads(path.read_text())) for path in folder.glob("*.json")}
    three, two, tables = (known[f"deepseek-v4.1-flash-{name}"] for name in ("exl3-3.5bpw", "exl3-2.9bpw", "engram"))
    assert len(three.files) == 54
    assert round(sum(size or 0 for size, _sha256 in three.files.values()) / 1e9) == 460
    assert sum(path.endswith(".safetensors") for path in two.files) == 39
    assert not two.complete
    shards = {path: facts for path, facts in tables.files.items() if None not in facts}
    assert len(shards) == 2
    assert all(three.files[path] == facts for path, facts in shards.items())
