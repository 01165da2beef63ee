# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Generations of a group: what it served with, and to which of them a rollback leads.

A generation is a plan together with what stood behind its names on this member: the image and the checkpoint's config.json. It is noted once the
group serves, so that one which never came up is none. Two are kept; the plan holds network, image, arguments and checkpoint, so these go
back together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

KEPT = 2
FOLDER = "/var/lib/gb10/generations"


@dataclass(frozen=True)
class Generation:
    """One that served: its number, when it was noted (seconds since 1970), its plan, the image's id on this member and its content, which is the same
    on all, the SHA-256 of config.json."""

    number: int
    at: float
    plan: Mapping[str, Any]
    image: str
    content: str
    config_hash: str

    @property
    def digest(self) -> str:
        """By which generations are told apart, and compared between members."""
        return identity(self.plan["cluster"]["digest"], self.content, self.config_hash)

    def __str__(self) -> str:
        return f"generation {self.number}: profile {self.plan['cluster']['profile']}, image {self.image[:12]}, {self.checkpoint}"

    @property
    def checkpoint(self) -> str:
        """The directory that the ranks load."""
        return str(next(iter(self.plan["members"].values()))["rank_config"]["start"]["checkpoint"])

    @property
    def directories(self) -> list[str]:
        """What the ranks' containers mount."""
        configs = (member["rank_config"] for member in self.plan["members"].values())
        return sorted({volume["source"] for config in configs for volume in config["container"]["volumes"]})

    def pinned(self) -> dict[str, Any]:
        """Its plan with the image's id for its name, which may mean another image by now."""
        members = {
            name: {**member, "rank_config": _with_image(member["rank_config"], self.image)} for name, member in self.plan["members"].items()
        }
        return {**self.plan, "members": members}


def _with_image(config: Mapping[str, Any], image: str) -> dict[str, Any]:
    return {**config, "container": {**config["container"], "image": image}}


def identity(plan_digest: str, content: str, config_hash: str) -> str:
    """One value of what makes a generation; `content`: the image's."""
    return hashlib.sha256(" ".join((plan_digest, content, config_hash)).encode()).hexdigest()


def parse(text: str | None) -> list[Generation]:
    """Those that were kept, the oldest first; none where nothing of that kind was."""
    try:
        return [Generation(**entry) for entry in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []


def text_of(generations: Iterable[Generation]) -> str:
    """As they are kept."""
    return json.dumps([asdict(generation) for generation in generations]) + "\n"


def recorded(known: Sequence[Generation], now: Generation) -> list[Generation]:
    """What is kept once `now` serves (its number is given here). One that came back keeps the plan that it was noted with, and is the newest again."""
    if known and known[-1].digest == now.digest:
        return list(known)
    same = next((generation for generation in known if generation.digest == now.digest), now)
    number = max((generation.number for generation in known), default=0) + 1
    others = [generation for generation in known if generation.digest != now.digest]
    return [*others, replace(now, number=number, plan=same.plan)][-KEPT:]


def previous(known: Sequence[Generation], set_up: str) -> Generation | None:
    """The newest that is not what is set up now (`set_up`: its digest), whether that ever served or not."""
    return next((generation for generation in reversed(known) if generation.digest != set_up), None)


def image_name(group: str, generation: Generation) -> str:
    """A name that keeps a generation's image from being taken for one that nobody wants."""
    return f"localhost/gb10-generation:{group}-{generation.digest[:12]}"


def users(files: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Of each group (its file's text by its name) the directories that a rollback needs."""
    return {group: sorted({path for generation in parse(text) for path in generation.directories}) for group, text in files.items()}
