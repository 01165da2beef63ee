# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stamp names what goes into an image and nothing else; the lock pins what a build fetches; the Containerfile keeps to both."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible_collections.gb10.cluster.plugins.lookup import image_recipe
from ansible_collections.gb10.cluster.plugins.module_utils import _recipe
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.module_utils._recipe import File
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
DIGEST = "sha256:" + "a" * 64

paths = st.text("abcdef/._", min_size=1, max_size=12)
trees = st.dictionaries(paths, st.builds(File, st.binary(max_size=20), st.booleans()), min_size=1, max_size=6)


def own_lock() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / _recipe.LOCK).read_text())
    return content


def with_lock(**changes: Any) -> dict[str, File]:
    """A recipe of two files whose lock is the collection's own with changes."""
    lock = json.dumps(own_lock() | changes).encode()
    return {_recipe.CONTAINERFILE: File(b"FROM scratch\n"), _recipe.LOCK: File(lock)}


@given(trees, st.randoms())
def test_the_order_of_files_does_not_change_the_stamp(files: dict[str, File], random: Any) -> None:
    shuffled = list(files.items())
    random.shuffle(shuffled)
    assert _recipe.stamp(dict(shuffled)) == _recipe.stamp(files)
    assert _recipe.archive(dict(shuffled)) == _recipe.archive(files)


@given(trees, trees)
def test_two_sets_of_files_have_one_stamp_only_if_they_are_equal(one: dict[str, File], other: dict[str, File]) -> None:
    assert (_recipe.stamp(one) == _recipe.stamp(other)) == (one == other)


@given(trees, st.data())
def test_name_mode_content_and_number_each_change_the_stamp(files: dict[str, File], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(files)))
    file, rest = files[path], {name: each for name, each in files.items() if name != path}
    changed = [
        rest | {f"{path}x": file},
        rest | {path: File(file.content, not file.executable)},
        rest | {path: File(file.content + b"x", file.executable)},
        rest,
    ]
    assert _recipe.stamp(files) not in {_recipe.stamp(each) for each in changed}


@given(trees)
def test_the_archive_holds_the_files_and_nothing_of_where_it_was_made(files: dict[str, File]) -> None:
    packed = {path.strip("/") or "x": file for path, file in files.items()}
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(_recipe.archive(packed)))) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert packed[member.name] == File(content.read(), member.mode == 0o755)
            assert (member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "")


@pytest.mark.parametrize(
    ("path", "belongs"),
    [
        ("runtime/image/Containerfile", True),
        ("runtime/overlay/gb10_vllm/__init__.py", True),
        ("kernels/exl3/gb10_exl3/csrc/moe.cu", True),
        ("kernels/exl3/gb10_exl3/__pycache__/x.cpython-312.pyc", False),
        ("kernels/exl3/gb10_exl3/libgb10_exl3.so", False),
        ("kernels/exl3/.gitignore", False),
        ("kernels/exl3/gb10_exl3.egg-info/PKG-INFO", False),
        ("kernels/exl3/build/lib/gb10_exl3/ops.py", False),
        ("kernels/results/h200.json", False),
        ("kernels/README.md", False),
        ("runtime/image/README.md", False),
        ("runtime/node/gb10_node/rank.py", False),
        ("plugins/module_utils/_recipe.py", False),
        ("runtime/imagery/x.py", False),
    ],
)
def test_what_goes_into_a_build(path: str, belongs: bool) -> None:
    assert _recipe.belongs(path) is belongs


def test_the_recipes_own_files_are_all_that_the_containerfile_copies() -> None:
    """Nothing is stamped that the image does not get, but for the Containerfile and the lock, from which it is made."""
    text = (ROOT / _recipe.CONTAINERFILE).read_text()
    copied = [source for source, _target in re.findall(r"^COPY (?!--from)(\S+) (\S+)$", text, re.MULTILINE)]
    context = _recipe.context(image_recipe.files(ROOT))
    covered = {path for path in context for source in copied if path == source or path.startswith(f"{source}/")}
    assert set(context) - covered == {_recipe.CONTAINERFILE, _recipe.LOCK}
    assert all(any(path == source or path.startswith(f"{source}/") for path in context) for source in copied)


def test_the_checkouts_place_modes_and_caches_change_no_stamp(tmp_path: Path) -> None:
    for name in ("one", "two"):
        for folder in _recipe.FOLDERS:
            shutil.copytree(ROOT / folder, tmp_path / name / folder)
        content = own_lock()
        content["base"]["digest"] = DIGEST
        (tmp_path / name / _recipe.LOCK).write_text(json.dumps(content))
    (tmp_path / "two/kernels/exl3/gb10_exl3/__pycache__").mkdir(exist_ok=True)
    (tmp_path / "two/kernels/exl3/gb10_exl3/__pycache__/x.pyc").write_bytes(b"x")
    (tmp_path / "two" / _recipe.CONTAINERFILE).chmod(0o600)
    one, two = image_recipe.recipe(tmp_path / "one"), image_recipe.recipe(tmp_path / "two")
    assert one == two
    assert one["arguments"]["STAMP"] == one["stamp"]
    assert one["arguments"]["BASE"] == f"docker.io/vllm/vllm-openai@{DIGEST}"


def test_an_executable_file_is_another_file(tmp_path: Path) -> None:
    files = with_lock()
    assert _recipe.stamp(files) != _recipe.stamp({path: File(file.content, True) for path, file in files.items()})


# The lock ------------------------------------------------------------------------------------------------------------------------------


def test_the_own_lock_is_whole_or_says_which_command_fills_it() -> None:
    lock = _recipe.lock(_recipe.context(image_recipe.files(ROOT)))
    if lock["base"]["digest"]:
        assert _recipe.base(lock).endswith(lock["base"]["digest"])
        return
    with pytest.raises(
        PlanError, match=r"skopeo --override-os linux --override-arch arm64 inspect .* docker://docker.io/vllm/vllm-openai:v"
    ) as caught:
        _recipe.base(lock)
    assert "\n" not in str(caught.value)


def test_the_lookup_says_it_as_one_sentence() -> None:
    if own_lock()["base"]["digest"]:
        pytest.skip("the lock is whole")
    with pytest.raises(AnsibleError, match=r"base\.digest of .* is not filled in"):
        image_recipe.LookupModule().run([])


@pytest.mark.parametrize("digest", [None, "", "sha256:abc", "v0.33.0", "A" * 64])
def test_a_base_without_a_whole_digest_is_refused(digest: str | None) -> None:
    lock = own_lock()
    lock["base"]["digest"] = digest
    with pytest.raises(PlanError, match="not filled in"):
        _recipe.base(lock)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": {"reference": "a:1", "digest": DIGEST}}, "base does not say where its value comes from"),
        ({"wheels": {"tools": [{"name": "a", "version": "1", "sha256": "b" * 64}]}}, "wheels.tools does not say where"),
        ({"wheels": {"tools": [{"name": "a", "version": "1", "sha256": "short", "source": "x"}]}}, "wheels.tools needs .* correct a"),
        ({"wheels": {"tools": [{"name": "a", "sha256": "b" * 64, "source": "x"}]}}, "needs a name, a version"),
    ],
)
def test_what_is_not_pinned_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        _recipe.context(with_lock(**changes))


def test_a_recipe_that_is_not_whole_is_refused() -> None:
    with pytest.raises(PlanError, match="lacks runtime/image/Containerfile"):
        _recipe.context({})
    with pytest.raises(PlanError, match="is no JSON"):
        _recipe.context({_recipe.CONTAINERFILE: File(b""), _recipe.LOCK: File(b"{")})


def test_pip_gets_each_wheel_with_its_only_hash() -> None:
    context = _recipe.context(with_lock(wheels={"tools": [{"name": "a", "version": "1", "sha256": "b" * 64, "source": "x"}]}))
    assert context["requirements/tools.txt"].content == f"a==1 --hash=sha256:{'b' * 64}\n".encode()


def test_the_lock_and_what_it_is_for_agree() -> None:
    """One version in two places is one fact."""
    lock = own_lock()
    qualified = json.loads((ROOT / "runtime/overlay/gb10_vllm/qualified.json").read_text())
    assert lock["engine"]["version"] in qualified
    assert lock["base"]["reference"].endswith(f":v{lock['engine']['version']}")
    assert json.loads((ROOT / "kernels/results/resources.json").read_text())["nvcc"] == next(
        wheel["version"] for wheel in lock["wheels"]["compiler"] if wheel["name"] == "nvidia-cuda-nvcc"
    )


# The Containerfile: what hadolint would say of it, and what it does not know --------------------------------------------------------------

TEXT = re.sub(r"\\\n", " ", (ROOT / _recipe.CONTAINERFILE).read_text())
LINES = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def instructions(word: str) -> list[str]:
    return [line.removeprefix(word).strip() for line in LINES if line.startswith(f"{word} ")]


def test_every_stage_comes_from_the_pinned_base_or_another_stage() -> None:
    stages: list[str] = []
    for line in instructions("FROM"):
        origin, _word, name = line.split()
        assert origin == "${BASE}" or origin in stages
        stages.append(name)
    assert stages == ["packages", "kernels", "image"]


def test_what_is_fetched_is_fetched_by_hash() -> None:
    for line in instructions("RUN"):
        assert not re.search(r"curl|wget|git clone|apt-get|http", line)
        for command in line.split("&&"):
            if "pip install" in command:
                assert "--no-deps" in command
                assert "--require-hashes" in command or "--no-index" in command


def test_no_secret_is_an_argument_and_every_argument_is_given() -> None:
    lock = own_lock()
    lock["base"]["digest"] = DIGEST
    given_arguments = set(_recipe.arguments(lock, "0" * 64))
    declared = {line.partition("=")[0] for line in instructions("ARG")}
    assert declared == given_arguments


def test_compilers_are_bound_and_their_caches_lie_on_the_volume() -> None:
    environment = " ".join(instructions("ENV"))
    assert "MAX_JOBS=1 " in environment and "FLASHINFER_NVCC_THREADS=1 " in environment
    for profile in (ROOT / "profiles").glob("dsv41-*.yml"):
        for name in re.findall(r"^ +(\w+_(?:CACHE|CACHE_DIR|CACHE_ROOT|CACHE_PATH)|HF_HOME): /cache/", profile.read_text(), re.MULTILINE):
            assert f"{name}=/cache/" in environment, f"{profile.name} keeps {name} on the volume, the image does not"


def test_the_last_layers_are_those_that_change_with_every_stamp() -> None:
    """A stamp that came earlier would throw every later layer away."""
    assert [line.split()[0] for line in LINES[-3:]] == ["ARG", "ARG", "LABEL"]
