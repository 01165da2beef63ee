# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which image is the same, where one comes from, and what a registry's refusal means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _image, _obtain
from ansible_collections.gb10.cluster.plugins.module_utils._host import Result
from ansible_collections.gb10.cluster.plugins.module_utils._image import Image
from ansible_collections.gb10.cluster.plugins.modules import image_build
from hypothesis import given
from hypothesis import strategies as st

ONE, TWO = "1" * 64, "2" * 64
BUILT = Image("b" * 64, {_image.STAMP_LABEL: ONE})
ARCHIVE, REGISTRY, RECIPE = {"kind": "archive"}, {"kind": "registry"}, {"kind": "build", "recipe": "gb10.cluster"}
PUBLISHED = RECIPE | {"published": "registry.example.com/engine:1"}


@pytest.mark.parametrize(
    ("source", "way", "image", "wanted", "stamp", "tried", "step"),
    [
        # What is there and right is used again.
        (ARCHIVE, "auto", Image(ONE), ONE, "", False, "reuse"),
        (REGISTRY, "auto", Image(ONE), "", "", False, "reuse"),
        (RECIPE, "auto", BUILT, "", ONE, False, "reuse"),
        (PUBLISHED, "auto", BUILT, "", ONE, False, "reuse"),
        # What is not is got, each kind its own way.
        (ARCHIVE, "auto", None, ONE, "", False, "load"),
        (ARCHIVE, "auto", Image(TWO), ONE, "", False, "load"),
        (REGISTRY, "auto", None, "", "", False, "pull"),
        (REGISTRY, "auto", Image(TWO), ONE, "", False, "pull"),
        (RECIPE, "auto", None, "", ONE, False, "build"),
        (RECIPE, "auto", BUILT, "", TWO, False, "build"),
        (RECIPE, "auto", Image(ONE), "", ONE, False, "build"),
        # A published image is asked for first, once.
        (PUBLISHED, "auto", None, "", ONE, False, "pull"),
        (PUBLISHED, "auto", None, "", ONE, True, "build"),
        (PUBLISHED, "auto", BUILT, "", TWO, True, "build"),
        (PUBLISHED, "auto", BUILT, "", ONE, True, "reuse"),
        # Asked to, what is right is got again.
        (REGISTRY, "pull", Image(ONE), "", "", False, "pull"),
        (REGISTRY, "pull", Image(ONE), "", "", True, "reuse"),
        (PUBLISHED, "pull", BUILT, "", ONE, False, "pull"),
        (RECIPE, "build", BUILT, "", ONE, False, "build"),
        (PUBLISHED, "build", BUILT, "", ONE, False, "build"),
        # And nothing else than was asked for is done.
        (PUBLISHED, "pull", BUILT, "", TWO, True, "refuse"),
        (REGISTRY, "auto", Image(TWO), ONE, "", True, "refuse"),
        (RECIPE, "pull", BUILT, "", ONE, False, "refuse"),
        (ARCHIVE, "pull", Image(ONE), ONE, "", False, "refuse"),
        (ARCHIVE, "build", Image(ONE), ONE, "", False, "refuse"),
        (REGISTRY, "build", None, "", "", False, "refuse"),
        # Never.
        (REGISTRY, "never", Image(ONE), "", "", False, "reuse"),
        (RECIPE, "never", BUILT, "", ONE, False, "reuse"),
        (REGISTRY, "never", None, "", "", False, "refuse"),
        (RECIPE, "never", BUILT, "", TWO, False, "refuse"),
        (ARCHIVE, "never", Image(TWO), ONE, "", False, "refuse"),
    ],
)
def test_the_step_follows_from_stamp_and_settings(
    source: dict[str, str], way: str, image: Image | None, wanted: str, stamp: str, tried: bool, step: str
) -> None:
    decision = _obtain.decide(source, way, image, wanted, stamp, tried)
    assert decision.step == step, decision.reason
    assert decision.reason and "\n" not in decision.reason


@given(
    st.sampled_from([ARCHIVE, REGISTRY, RECIPE, PUBLISHED]),
    st.sampled_from(_obtain.WAYS),
    st.sampled_from([None, BUILT, Image(ONE), Image(TWO)]),
    st.sampled_from(["", ONE]),
    st.sampled_from([ONE, TWO]),
    st.booleans(),
)
def test_nothing_wrong_is_used_again_and_never_gets_nothing(
    source: dict[str, str], way: str, image: Image | None, wanted: str, stamp: str, tried: bool
) -> None:
    step = _obtain.decide(source, way, image, wanted, stamp, tried).step
    if step == "reuse":
        assert image and _image.is_wanted(image, wanted) and (source["kind"] != "build" or image.stamp == stamp)
    if way == "never":
        assert step in ("reuse", "refuse")
    if step == "build":
        assert source["kind"] == "build" and way in ("auto", "build")
    if step == "pull":
        assert (source in (REGISTRY, PUBLISHED) and not tried) or way == "pull"


def test_a_recipe_that_differs_is_told_with_both_stamps() -> None:
    assert f"of recipe {ONE}, expected {TWO}" in _obtain.decide(RECIPE, "never", BUILT, "", TWO).reason


# Names --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "registry", "name"),
    [
        ("ghcr.io/a/b@sha256:0123456789abcdef", "ghcr.io", "localhost/gb10/b:0123456789ab"),
        ("ghcr.io/a/b:1@sha256:0123456789abcdef", "ghcr.io", "localhost/gb10/b:0123456789ab"),
        ("127.0.0.1:5000/a:1", "127.0.0.1:5000", "127.0.0.1:5000/a:1"),
        ("localhost/a:1", "localhost", "localhost/a:1"),
        ("vllm/vllm-openai:v0.33.0", "docker.io", "vllm/vllm-openai:v0.33.0"),
        ("a", "docker.io", "a"),
    ],
)
def test_a_reference_has_a_registry_and_a_name_that_engines_keep(reference: str, registry: str, name: str) -> None:
    assert _obtain.registry_of(reference) == registry
    assert _image.local_name(reference) == name


def test_others_pull_by_the_digest_that_the_first_got() -> None:
    digests = (f"localhost/a@sha256:{TWO}", f"r.example.com:5000/x/a@sha256:{ONE}")
    assert _obtain.by_digest("r.example.com:5000/x/a:1", Image(ONE, digests=digests)) == f"r.example.com:5000/x/a@sha256:{ONE}"
    assert _obtain.by_digest("r.example.com:5000/x/a", Image(ONE, digests=digests)) == f"r.example.com:5000/x/a@sha256:{ONE}"
    assert _obtain.by_digest("r.example.com:5000/x/b:1", Image(ONE, digests=digests)) == ""
    assert _obtain.by_digest("localhost/a:1", Image(ONE, digests=digests)) == ""
    pinned = f"r.example.com/a@sha256:{TWO}"
    assert _obtain.by_digest(pinned, Image(ONE, digests=(f"r.example.com/a@sha256:{ONE}",))) == pinned


def test_a_login_is_the_file_that_both_engines_read() -> None:
    assert json.loads(_obtain.login("r.example.com", "u", "t")) == {"auths": {"r.example.com": {"auth": "dTp0"}}}
    assert set(json.loads(_obtain.login("docker.io", "u", "t"))["auths"]) == {"docker.io", "https://index.docker.io/v1/"}


# Identity -----------------------------------------------------------------------------------------------------------------------------

CONFIG = {"Env": ["A=1"], "Cmd": ["x"], "Labels": None, "Entrypoint": None, "User": ""}
DOCKER = {
    "Id": f"sha256:{ONE}",
    "Os": "linux",
    "Architecture": "arm64",
    "Config": CONFIG,
    "RootFS": {"Layers": [f"sha256:{ONE}", f"sha256:{TWO}"]},
}


def test_two_stores_have_one_image_under_two_ids() -> None:
    """C34: the id of the containerd store is a manifest's, that of overlay2 the configuration's; podman leaves out what is not set."""
    podman = DOCKER | {"Id": TWO, "Config": {"Env": ["A=1"], "Cmd": ["x"]}}
    one, other = _image.described(DOCKER), _image.described(podman)
    assert one.id != other.id and one.content == other.content
    assert _image.is_wanted(other, one.content) and not _image.is_wanted(other, one.id)


@pytest.mark.parametrize(
    "change",
    [
        {"RootFS": {"Layers": [f"sha256:{TWO}", f"sha256:{ONE}"]}},
        {"RootFS": {"Layers": [f"sha256:{ONE}"]}},
        {"Architecture": "amd64"},
        {"Config": CONFIG | {"Env": ["A=2"]}},
        {"Config": CONFIG | {"Entrypoint": ["sh"]}},
        {"Config": CONFIG | {"Labels": {"a": "b"}}},
    ],
)
def test_another_content_is_another_image(change: dict[str, Any]) -> None:
    assert _image.described(DOCKER | change).content != _image.described(DOCKER).content


def test_an_archive_and_an_engine_tell_one_content() -> None:
    body = {"architecture": "arm64", "os": "linux", "config": CONFIG, "rootfs": {"diff_ids": DOCKER["RootFS"]["Layers"]}}  # type: ignore[index]
    assert _image.configured(json.dumps(body).encode()).content == _image.described(DOCKER).content


def test_an_image_for_another_machine_is_refused() -> None:
    assert "is an image for linux/arm64, and this member runs linux/amd64" in _image.verdict(
        "x:1", _image.described(DOCKER), None, "linux/amd64"
    )
    assert _image.verdict("x:1", _image.described(DOCKER), None, "linux/arm64") == ""


@given(st.lists(st.integers(0, 3).map(str), max_size=6), st.lists(st.lists(st.integers(0, 3).map(str), max_size=6), max_size=4))
def test_what_a_member_lacks_and_has_make_the_image(layers: list[str], present: list[list[str]]) -> None:
    lacking = _image.lacking(layers, present)
    shared = len(layers) - len(lacking)
    assert layers[shared:] == lacking
    assert shared == 0 or any(other[:shared] == layers[:shared] for other in present)
    assert not any(len(other) > shared and shared < len(layers) and other[: shared + 1] == layers[: shared + 1] for other in present)


# What engines say ---------------------------------------------------------------------------------------------------------------------

HOST = "127.0.0.1:5000"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        # Of podman 5.4.2 and docker 20.10.24 against docker-registry 2.8.2, and against one that answers with another manifest.
        (f"Error: initializing source docker://{HOST}/lab/a:2: reading manifest 2 in {HOST}/lab/a: manifest unknown", "does not have it"),
        (f"Error response from daemon: manifest for {HOST}/lab/a:2 not found: manifest unknown: manifest unknown", "does not have it"),
        (
            f"Error: initializing source docker://{HOST}/lab/a:1: reading manifest 1 in {HOST}/lab/a: authentication required",
            "wants a login",
        ),
        (f'Error response from daemon: Head "http://{HOST}/v2/lab/a/manifests/1": no basic auth credentials', "wants a login"),
        (
            f'Error: initializing source docker://{HOST}/x:1: pinging container registry {HOST}: Get "https://{HOST}/v2/": dial tcp {HOST}: connect: '
            "connection refused",
            "cannot be reached",
        ),
        (f'Error response from daemon: Get "http://{HOST}/v2/": dial tcp {HOST}: connect: connection refused', "cannot be reached"),
        (
            'Error response from daemon: Get "https://nowhere.invalid/v2/": dial tcp: lookup nowhere.invalid on [::1]:53: read udp [::1]:52077->[::1]:53: '
            "read: connection refused",
            "cannot be reached",
        ),
        (
            f"Error: determining manifest MIME type for docker://{HOST}/lab/a@sha256:0: Manifest does not match provided manifest digest sha256:0",
            "serves another image",
        ),
        ("manifest verification failed for digest sha256:0", "serves another image"),
        (
            f'Error: initializing source docker://{HOST}/lab/a:1: pinging container registry {HOST}: Get "https://{HOST}/v2/": http: server gave HTTP '
            "response to HTTPS client",
            "is not trusted",
        ),
        # Synthetic, after the words in the engines' sources.
        ("toomanyrequests: You have reached your pull rate limit", "allows no more pulls"),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", "for other machines only"),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", "disk is full"),
        ("something new", "see what the engine says"),
    ],
)
def test_a_refusal_is_one_sentence_with_its_cure(said: str, words: str) -> None:
    sentence = _obtain.pull_failure(f"{HOST}/lab/a:1", Result(1, "", said + "\n"), "linux/arm64")
    assert words in sentence and "\n" not in sentence and sentence.startswith(f"{HOST}/lab/a:1 was not pulled (")


# Of docker 26.1.5: the end of a build by BuildKit that fails in a program, and in a step without one; by its old builder; and of podman 5.4.2.
AROUND = """Containerfile:3
--------------------
   2 |     COPY note /note
   3 | >>> RUN python3 /note
   4 |     LABEL a=1
--------------------
"""
PROCESS = 'process "/bin/sh -c python3 /note" did not complete successfully: exit code: 1'
BUILDKIT = f"""#7 [3/3] RUN python3 /note
#7 0.476 Traceback:
#7 0.476 the note is wrong
#7 ERROR: {PROCESS}
------
 > [3/3] RUN python3 /note:
0.476 Traceback:
0.476 the note is wrong
------
{AROUND}ERROR: failed to solve: {PROCESS}
"""
ABSENT = f"""#6 [2/3] COPY missing /note
#6 ERROR: failed to calculate checksum of ref f0::5j: "/missing": not found
------
 > [2/3] COPY missing /note:
------
{AROUND}ERROR: failed to solve: failed to compute cache key: "/missing": not found
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (BUILDKIT, "the note is wrong"),
        (ABSENT, 'failed to solve: failed to compute cache key: "/missing": not found'),
        ("the note is wrong\nThe command '/bin/sh -c python3 /note' returned a non-zero code: 1\n", "the note is wrong"),
        ('STEP 3/4\nthe note is wrong\nError: building at STEP "RUN python3 /note": exit status 1\n', "the note is wrong"),
        ("", "no output"),
    ],
    ids=["BuildKit", "BuildKit, no program", "docker's old builder", "podman", "nothing"],
)
def test_a_failed_build_is_told_by_the_programs_own_line(output: str, line: str) -> None:
    assert image_build.failing_line([each.strip() for each in output.splitlines() if each.strip()]) == line
