# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A snapshot of a repository on a hub, or of a prefix on a web server: which files it has, where they are, and what an answer means."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote, urlsplit

from ._checkpoint import File, ManifestError, manifest_of, parse_manifest
from ._job import JobError

ENDPOINT = "https://huggingface.co"
"""The Hub, where neither the task nor HF_ENDPOINT names another."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Remote:
    """A file as its origin lists it: size in bytes, and the SHA-256 of its content or the id of its git blob, whichever is known."""

    path: str
    size: int
    sha256: str = ""
    blob: str = ""

    def matches(self, sha256: str, blob: str) -> bool:
        """Whether content with these two hashes is this file's."""
        return self.sha256 == sha256 if self.sha256 else self.blob == blob


@dataclass(frozen=True)
class Origin:
    """Where files come from. `where` is for sentences; `base` is followed by a file's quoted path."""

    where: str
    base: str

    def url(self, path: str) -> str:
        """Address of a file."""
        return f"{self.base}/{quote(path)}"


def is_repository(name: str) -> bool:
    """Whether this is OWNER/NAME."""
    return bool(_REPOSITORY.fullmatch(name))


def hub(endpoint: str, repository: str, revision: str) -> Origin:
    """Files of a repository. A commit's hash as revision makes them the same for ever."""
    return Origin(f"{repository} at {revision} on {endpoint}", f"{endpoint}/{repository}/resolve/{quote(revision, safe='')}")


def prefix(url: str) -> Origin:
    """Files below an address, as a bucket or a plain web server gives them."""
    return Origin(url, url.rstrip("/"))


def listing_url(endpoint: str, repository: str, revision: str) -> str:
    """Where a hub lists a revision with sizes and hashes."""
    return f"{endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"


def parse_listing(content: Mapping[str, Any], where: str) -> tuple[str, list[Remote]]:
    """Commit and files of a hub's listing: `{"sha", "siblings": [{"rfilename", "size", "blobId", "lfs": {"sha256"}}]}`."""
    try:
        files = [
            Remote(entry["rfilename"], entry["size"], (entry.get("lfs") or {}).get("sha256", ""), entry["blobId"])
            for entry in content["siblings"]
        ]
        return str(content["sha"]), files
    except (KeyError, TypeError) as error:
        raise JobError(f"the list of files of {where} is not a hub's ({error} is missing): check the endpoint") from None


def select(files: Iterable[Remote], include: Sequence[str], exclude: Sequence[str], where: str) -> list[Remote]:
    """The files that one of `include` matches, all if there is none, and none of `exclude`; a pattern that ends in / means all below it.

    A pattern that matches nothing is a mistake that must not end in an empty success.
    """
    files = list(files)

    def matches(path: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)

    for pattern in include:
        if not any(matches(file.path, [pattern]) for file in files):
            raise JobError(f"no file of {where} matches {pattern!r}: correct the patterns to include")
    chosen = [file for file in files if (not include or matches(file.path, include)) and not matches(file.path, exclude)]
    if not chosen:
        raise JobError(f"{where} has no files that are wanted: correct the patterns to exclude")
    try:
        parse_manifest(manifest_of([File(file.path, file.size, file.sha256 or "0" * 64) for file in chosen]))
    except ManifestError as error:
        raise JobError(f"{where} has files that no checkpoint can have ({error})") from None
    return sorted(chosen, key=lambda file: file.path)


def git_blob(size: int) -> Any:
    """A hash to be fed with a file's content that ends as git's id of it."""
    # Git's name of a blob, no protection: what is compared comes over TLS from the hub itself.
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


def refusal(status: int, where: str, has_token: bool) -> str:
    """The sentence for an answer that no repeat cures; empty for one that may be cured by trying again."""
    if status in (401, 403):
        if has_token:
            return f"{where} refuses the token (HTTP {status}): accept the model's terms with its account, or give another token"
        return f"{where} is not public (HTTP {status}): give a token that may read it"
    if status in (404, 410):
        return f"{where} does not exist (HTTP {status}): correct repository, revision and endpoint, or give a token if it is private"
    if 400 <= status < 500 and status not in (408, 425, 429):
        return f"{where} does not answer the request (HTTP {status}): check the address"
    return ""


def plain(url: str) -> str:
    """An address without its query, which may be signed."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def learned(files: Sequence[Remote], hashed: Mapping[str, str]) -> list[File] | None:
    """The files with their SHA-256, listed or learned; None while one is not known."""
    found = [File(file.path, file.size, file.sha256 or hashed.get(file.path, "")) for file in files]
    return found if all(file.sha256 for file in found) else None
