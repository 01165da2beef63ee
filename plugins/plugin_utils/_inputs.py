# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what a user wrote to what the core takes: reading profiles, checking against the schemas, one sentence per mistake."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..module_utils import _levers, _schema
from ..module_utils._changes import CHANGES, changed
from ..module_utils._errors import PlanError
from ..module_utils._plan import build_plan

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

COLLECTION = Path(__file__).parents[2]
PROFILES = COLLECTION / "profiles"

# Characters of a wrong value that a message repeats.
LONGEST_VALUE = 80


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is written twice; YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for node_key, _value in node.value:
            if node_key.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(node_key, deep=True)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"{key} is written twice", problem_mark=node_key.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


def plan(members: Any, settings: Any, profile: Any = None, base: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Check all inputs and build the plan. `profile`: a mapping, or else `cluster_profile` names one (paths start at `base`)."""
    members, settings = check_members(members), check_settings(settings)
    profile = check_profile(profile) if profile is not None else load_profile(settings["cluster_profile"], base)
    if settings[CHANGES]:
        profile = check_profile(changed(profile, settings[CHANGES]), CHANGES)
    levers = json.loads((COLLECTION / _levers.LEVERS).read_text(encoding="utf-8"))
    return build_plan(members, settings, _levers.awaited(profile, levers))


def check_members(members: Any) -> list[dict[str, Any]]:
    """Members as plain data of the right form."""
    return _check(plain(members, "members"), "MEMBERS", "inventory:", "the inventory", root="members")


def check_settings(settings: Any, schema: str = "SETTINGS") -> dict[str, Any]:
    """Settings as plain data of the right form, defaults filled in."""
    return _schema.with_defaults(_check(plain(settings, "settings"), schema, "inventory:", "the group variables of sparks"))


def check_profile(profile: Any, place: str = "the profile") -> dict[str, Any]:
    """A profile as plain data of the right form; `place` is where a message sends the user."""
    profile = plain(profile, "profile")
    name = profile.get("name") if isinstance(profile, dict) else None
    return _check(profile, "PROFILE", f"profile {name}:" if isinstance(name, str) else "profile:", place)


def load_profile(name: str, base: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """A profile of the collection by name, or the user's own by path (`.yml`, relative to `base`)."""
    if name.endswith((".yml", ".yaml")):
        path, place = Path(base, Path(name).expanduser()), name
    else:
        path, place = PROFILES / f"{name}.yml", f"profiles/{name}.yml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.yml")))
        raise PlanError(
            f"inventory: cluster_profile is {name!r}, but {path} cannot be read ({error.strerror}): "
            f"name one of {known}, or a path that ends in .yml"
        ) from None
    try:
        # A subclass of the safe loader.
        profile = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" in line {mark.line + 1}" if mark else ""
        raise PlanError(f"profile {path.stem}: no valid YAML{line}, {error.problem}: correct {place}") from None
    profile = check_profile(profile, place)
    if profile["name"] != path.stem:
        raise PlanError(f"profile {path.stem}: name is {profile['name']!r}, expected {path.stem!r}: correct it in {place}")
    return profile


def plain(value: Any, where: str) -> Any:
    """A value without Ansible's tags and lazy containers, as JSON has it."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    raise PlanError(f"{where} is a {type(value).__name__}, expected text, a number, a list or a mapping: correct it")


def _check(value: Any, schema: str, what: str, place: str, root: str = "") -> Any:
    """The value itself when it fits the schema (a name in `_schema`), PlanError otherwise.

    `what` starts the message, `place` is where it sends the user, `root` is what the value itself is called.

    A lookup runs in many short-lived processes, and importing the schema library takes longer (0.1 s) than everything else
    about a plan: what has passed once is remembered by digest in the user's cache folder.
    """
    subject = json.dumps([getattr(_schema, schema), value], sort_keys=True)
    stamp = _cache_folder() / hashlib.sha256(subject.encode()).hexdigest()
    with contextlib.suppress(OSError):
        if stamp.exists():
            return value
    errors = list(_validator(schema).iter_errors(value))
    if errors:
        raise PlanError(_sentence(min(errors, key=_order), what, place, root))
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return value


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gb10-cluster", "valid-inputs")


@functools.cache
def _validator(schema: str) -> Any:
    """A validator whose integers are integers: 3.0 would reach a command line as it is written."""
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.validators import extend

    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool))
    strict = extend(Draft202012Validator, type_checker=checker)
    return strict(getattr(_schema, schema), format_checker=FormatChecker(["regex"]))


_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}


def _order(error: ValidationError) -> tuple[int, list[str], bool, str]:
    """The outermost mistake first, a misspelt key before the one that it leaves missing; the same in every run."""
    return len(error.path), [str(part) for part in error.path], error.validator != "additionalProperties", error.message


def _sentence(error: ValidationError, what: str, place: str, root: str) -> str:
    """`profile x: a.b is 'three', expected an integer: correct it in profiles/x.yml`."""
    key = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    key = key.lstrip(".")
    rule, schema, instance = error.validator_value, error.schema, error.instance
    if error.validator == "required":
        missing = next(name for name in rule if name not in instance)
        return f"{what} {_join(key, missing)} is missing: add it in {place}"
    if error.validator == "additionalProperties":
        known = schema["properties"]
        extra = min(set(instance) - set(known))
        near = difflib.get_close_matches(extra, known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{what} {_join(key, extra)} is not a known key{hint}: correct or remove it in {place}"
    if "propertyNames" in error.schema_path:
        return f"{what} {_join(key, instance)} is no possible key, expected {schema['description']}: correct it in {place}"
    expected = {
        "type": lambda: " or ".join(_TYPES[name] for name in ([rule] if isinstance(rule, str) else rule)),
        "enum": lambda: f"one of {', '.join(map(str, rule))}",
        "minimum": lambda: f"at least {rule}",
        "maximum": lambda: f"at most {rule}",
        "exclusiveMinimum": lambda: f"more than {rule}",
        "minItems": lambda: f"at least {rule}",
        "minLength": lambda: "text that is not empty",
        "uniqueItems": lambda: "no item twice",
        "format": lambda: f"a valid {rule}",
        "pattern": lambda: schema["description"],
        "anyOf": lambda: schema["description"],
    }[error.validator]()
    return f"{what} {key or 'its content'} is {_short(instance)}, expected {expected}: correct it in {place}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
