# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a member's image comes from: reuse, load, pull or build; and what a registry's refusal means."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._host import Result
from ._image import Image, is_wanted

REUSE, LOAD, PULL, BUILD, REFUSE = "reuse", "load", "pull", "build", "refuse"
AUTO, NEVER = "auto", "never"
WAYS = (AUTO, PULL, BUILD, NEVER)
"""`auto` takes what is right and gets what is not; `pull` and `build` do so in any case, and nothing else; `never` gets nothing."""

DOCKER_HUB = "docker.io"
LOCAL = "localhost"
"""The registry of names that lead to none. Podman gives a digest to what was built under such a name, too."""
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
"""Docker's own name for it where it keeps a login."""


@dataclass(frozen=True)
class Decision:
    """A step, and why, as the beginning of a sentence."""

    step: str
    reason: str


def decide(source: Mapping[str, Any], way: str, image: Image | None, wanted: str = "", stamp: str = "", tried: bool = False) -> Decision:
    """The next step of the member that gets the image first.

    `source` is the plan's; `wanted` is an id or content that the image must have, `stamp` the recipe's for a source that is built. `tried`
    says that a published image was pulled in this run already: what it is is `image` now.
    """
    kind = source["kind"]
    right, why = _is_right(kind, image, wanted, stamp)
    if way == NEVER:
        return (
            Decision(REUSE, why)
            if right
            else Decision(REFUSE, f"{why}, and runtime_obtain is never: put it there, or set runtime_obtain=auto")
        )
    if way == BUILD and kind != BUILD:
        return Decision(
            REFUSE, f"the image comes from {kind} and has no recipe to build it from: set runtime_obtain=auto, or choose another profile"
        )
    if way == PULL and not _published(source):
        return Decision(REFUSE, f"the image comes from {kind} and is in no registry that it could be pulled from: set runtime_obtain=auto")
    if right and (way == AUTO or tried):
        return Decision(REUSE, why)
    if way == BUILD:
        return Decision(BUILD, "runtime_obtain is build")
    if kind == "archive":
        return Decision(LOAD, why)
    if _published(source) and not tried:
        return Decision(PULL, "runtime_obtain is pull" if right else why)
    if kind == "build" and way == AUTO:
        return Decision(BUILD, why)
    return Decision(REFUSE, f"{why} after it was pulled: correct the profile's image, or set runtime_obtain=auto")


def _is_right(kind: str, image: Image | None, wanted: str, stamp: str) -> tuple[bool, str]:
    """Whether an image may serve, and why not, or why, as the beginning of a sentence."""
    if image is None:
        return False, "there is no such image here"
    if not is_wanted(image, wanted):
        return False, f"the image here is {image.id}, expected {wanted}"
    if kind == "build" and image.stamp != stamp:
        return False, f"the image here is of recipe {image.stamp or 'none'}, expected {stamp}"
    return True, f"image {image.id} is here"


def _published(source: Mapping[str, Any]) -> bool:
    return source["kind"] == "registry" or bool(source.get("published"))


def registry_of(reference: str) -> str:
    """The registry of a reference, with its port.

    >>> [registry_of(name) for name in ("ghcr.io/a/b@sha256:0", "127.0.0.1:5000/a:1", "localhost/a", "vllm/vllm-openai:v0.33.0", "a")]
    ['ghcr.io', '127.0.0.1:5000', 'localhost', 'docker.io', 'docker.io']
    """
    first, separator, _rest = reference.partition("/")
    return first if separator and (re.search(r"[.:]", first) or first == LOCAL) else DOCKER_HUB


def by_digest(reference: str, image: Image) -> str:
    """The name by which other members pull just this image from the reference's repository; empty where no registry has it.

    A tag may have moved since the first member pulled it. An image that was loaded as well has a digest that no registry knows: pulling by it
    fails, and leads to the copy over the fabric.
    """
    if registry_of(reference) == LOCAL:
        return ""
    if "@" in reference:
        return reference
    repository = _repository(reference)
    return next((name for name in image.digests if name.partition("@")[0] == repository), "")


def _repository(reference: str) -> str:
    name = reference.partition("@")[0]
    folder, separator, last = name.rpartition("/")
    return f"{folder}{separator}{last.partition(':')[0]}"


def login(registry: str, user: str, token: str) -> bytes:
    """A login as docker and podman read it from a file: neither a command line nor an environment holds the token."""
    entry = {"auth": base64.b64encode(f"{user}:{token}".encode()).decode()}
    keys = [registry, _DOCKER_HUB_KEY] if registry == DOCKER_HUB else [registry]
    return json.dumps({"auths": dict.fromkeys(keys, entry)}).encode()


_FAILURES = (
    # Words of docker 20.10 and podman 5.4 (containers/image), lower case; the first that fits decides.
    (r"no space left|not enough space|disk quota", "this member's disk is full: free some of it"),
    (
        r"does not match (?:the )?(?:expected|target|provided)|digest mismatch|failed digest|digest did not match|unexpected digest"
        r"|manifest verification failed",
        "{registry} serves another image for it: correct the digest in the profile, or ask who keeps the registry",
    ),
    (
        r"unauthorized|authentication required|no basic auth|denied|forbidden|invalid username/password|incorrect username",
        "{registry} wants a login, or another one: set runtime_registry_user and runtime_registry_token",
    ),
    (
        r"toomanyrequests|too many requests|rate limit",
        "{registry} allows no more pulls for now: set runtime_registry_user and runtime_registry_token, or wait",
    ),
    (
        r"manifest unknown|manifest invalid|not found|name unknown|repository does not exist",
        "{registry} does not have it: correct the reference in the profile",
    ),
    (
        r"no matching manifest|no image found in (?:manifest|image index)|choosing an image from manifest list",
        "{registry} has it for other machines only: name an image for {platform} in the profile",
    ),
    (r"http response to https|x509|certificate", "{registry} is not trusted: give this member the registry's certificate"),
    (
        r"connection refused|no such host|no route to host|network is unreachable|timeout|timed out|i/o error|temporary failure|connection reset|eof",
        "{registry} cannot be reached from this member: see that it is up, and this member's network and DNS",
    ),
)


def pull_failure(reference: str, result: Result, machine: str) -> str:
    """One sentence about a pull that failed."""
    said = f"{result.err}\n{result.out}".lower()
    cure = next(
        (sentence for pattern, sentence in _FAILURES if re.search(pattern, said)), "see what the engine says on this member: {command}"
    )
    words = cure.format(registry=registry_of(reference), platform=machine, command=f"pull {reference}")
    return f"{reference} was not pulled ({_last_reason(result)}), {words}"


def _last_reason(result: Result) -> str:
    """The innermost of the engine's nested reasons, short enough for a sentence."""
    return result.message.removeprefix("Error: ")[-240:].strip()
