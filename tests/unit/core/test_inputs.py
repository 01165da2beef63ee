# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a user may get wrong, each in one sentence with the exact key; and the files that come with the collection."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _schema
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
PROFILES = sorted((ROOT / "profiles").glob("*.yml"))
REMOVE = object()


def change(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split("/")
    target = document
    for parent in parents:
        target = target[parent]
    if value is REMOVE:
        del target[last]
    else:
        target[last] = value
    return document


def test_schemas_are_schemas() -> None:
    for name in ("MEMBERS", "SETTINGS", "FABRIC_SETTINGS", "PROFILE", "PLAN"):
        Draft202012Validator.check_schema(getattr(_schema, name))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallelism/tensor_parallel_size", "three", "parallelism.tensor_parallel_size is 'three', expected an integer: correct"),
        ("parallelism/tensor_parallel_size", True, "parallelism.tensor_parallel_size is True, expected an integer"),
        ("parallelism/tensor_parallel_size", 3.0, "parallelism.tensor_parallel_size is 3.0, expected an integer"),
        ("parallelism/tensor_parallel_size", 0, "parallelism.tensor_parallel_size is 0, expected at least 1"),
        ("parallelism/tensor_paralel_size", 3, "parallelism.tensor_paralel_size is not a known key (did you mean tensor_parallel_size?)"),
        ("servings", {}, "servings is not a known key (did you mean serving?): correct or remove it"),
        ("serving", REMOVE, "serving is missing: add it"),
        ("serving/max_model_len", REMOVE, "serving.max_model_len is missing: add it"),
        ("serving", ["x"], "serving is ['x'], expected a mapping"),
        ("checkpoint/directory", "../etc", "checkpoint.directory is '../etc', expected a name of letters, digits"),
        ("checkpoint/source", {"kind": "ftp"}, "checkpoint.source.kind is 'ftp', expected one of directory, hub, http"),
        ("checkpoint/source", {}, "checkpoint.source.kind is missing"),
        ("checkpoint/source", {"kind": "hub", "repository": "a/b"}, "checkpoint.source.revision is missing"),
        ("checkpoint/source/url", "x", "checkpoint.source.url is not a known key"),
        ("checkpoint/size_gib", 0, "checkpoint.size_gib is 0, expected more than 0"),
        ("engine/command", [], "engine.command is [], expected at least 1"),
        ("engine/environment/lower", "x", "engine.environment.lower is no possible key, expected the name of an environment variable"),
        ("engine/environment/EMPTY", "", "engine.environment.EMPTY is '', expected text that is not empty"),
        ("engine/environment/FLAG", True, "engine.environment.FLAG is True, expected text or an integer or a number"),
        ("engine/arguments/--x", 1, "engine.arguments.--x is no possible key, expected the name of an option without its dashes"),
        ("engine/arguments/x", False, "engine.arguments.x is False, expected a value, true for a bare flag, a list, a mapping, or null"),
        ("engine/master_port", 80, "engine.master_port is 80, expected at least 1024"),
        ("memory/gpu_memory_utilization", 1.5, "memory.gpu_memory_utilization is 1.5, expected at most 1"),
        ("probes/chat/expect", "(", "probes.chat.expect is '(', expected a valid regex"),
        ("nccl/overrides/NCCL_IB_TC", "", "nccl.overrides.NCCL_IB_TC is '', expected text that is not empty"),
        ("nccl/overrides/NCCL_IB_TC", None, "nccl.overrides.NCCL_IB_TC is None, expected text or an integer or a number"),
    ],
)
def test_profile_refused(profile: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        _inputs.check_profile(change(profile, path, value), "profiles/x.yml")
    assert str(error.value).startswith(f"profile dsv41-exl3-3.5bpw-tp3: {message}")
    assert str(error.value).endswith(" in profiles/x.yml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster_topology", "rng", "cluster_topology is 'rng', expected one of pair, ring, switched"),
        ("cluster_name", "My Ring", "cluster_name is 'My Ring', expected lower-case letters, digits and hyphens"),
        ("cluster_profile", REMOVE, "cluster_profile is missing: add it"),
        ("cluster_leg_pol", "10.0.0.0/8", "cluster_leg_pol is not a known key (did you mean cluster_leg_pool?)"),
        ("cluster_leg_pool", "10.10.0.0", "cluster_leg_pool is '10.10.0.0', expected an IPv4 network like 10.10.0.0/16"),
        ("cluster_leg_prefix", 31, "cluster_leg_prefix is 31, expected at most 30"),
        ("cluster_leg_numbering", "rank", "cluster_leg_numbering is 'rank', expected one of ends, ranks"),
        ("cluster_leg_first_host", 0, "cluster_leg_first_host is 0, expected at least 1"),
        ("cluster_mtu", "9000", "cluster_mtu is '9000', expected an integer"),
        ("cluster_gpu", "yes", "cluster_gpu is 'yes', expected true or false"),
        ("cluster_cables", ["a.0 - b.1", 7], "cluster_cables[1] is 7, expected text"),
        ("cluster_switch_cages", [0, 0], "cluster_switch_cages is [0, 0], expected no item twice"),
        ("cluster_switch_cages", [2], "cluster_switch_cages[0] is 2, expected one of 0, 1"),
        ("cluster_devices", ["dev"], "cluster_devices[0] is 'dev', expected an absolute path"),
        ("cluster_engine", "containerd", "cluster_engine is 'containerd', expected one of docker, podman"),
    ],
)
def test_settings_refused(settings: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        _inputs.check_settings(change(settings, path, value))
    assert str(error.value).startswith(f"inventory: {message}")
    assert str(error.value).endswith(" in the group variables of sparks")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([{"name": "a"}], "inventory: members[0].address is missing: add it in the inventory"),
        ([{"name": "a", "address": 7}], "inventory: members[0].address is 7, expected text"),
        ({"a": 1}, "inventory: members is {'a': 1}, expected a list"),
        ([{"name": "a", "address": object()}], "members[0].address is a object, expected text"),
    ],
)
def test_members_refused(members: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        _inputs.check_members(members)
    assert str(error.value).startswith(message)


def test_a_long_value_is_cut(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as error:
        _inputs.check_settings({**settings, "cluster_cables": "x" * 1000})
    assert len(str(error.value)) < 250


def test_wrong_input_is_refused_again_and_right_input_is_remembered(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _attempt in range(2):
        with pytest.raises(PlanError):
            _inputs.check_settings({**settings, "cluster_mtu": 1})
    assert list(tmp_path.rglob("*")) == []
    first = _inputs.check_settings(settings)
    # The second time the schema library is not asked.
    monkeypatch.setattr(_inputs, "_validator", None)
    assert _inputs.check_settings(settings) == first


def test_a_cache_folder_that_cannot_be_written_does_not_matter(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert _inputs.check_settings(settings)["cluster_mtu"] == 9000


# Profile files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "profile mine: no valid YAML in line "),
        ("name: mine\nname: mine\n", "profile mine: no valid YAML in line 2, name is written twice: correct mine.yml"),
        ("- 1", "profile: its content is [1], expected a mapping: correct it in mine.yml"),
        ("", "profile: its content is None, expected a mapping: correct it in mine.yml"),
    ],
)
def test_profile_file_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yml").write_text(text)
    with pytest.raises(PlanError) as error:
        _inputs.load_profile("mine.yml", tmp_path)
    assert str(error.value).startswith(message)


def test_a_profile_of_ones_own_is_found_beside_the_inventory(tmp_path: Path) -> None:
    text = (ROOT / "profiles" / "lab-tiny.yml").read_text()
    # The short forms of YAML are welcome.
    anchored = text.replace("serving:\n", "serving:\n  <<: {max_model_len: 1024}\n").replace("  max_model_len: 512\n", "")
    (tmp_path / "mine.yml").write_text(anchored.replace("name: lab-tiny", "name: mine"))
    assert _inputs.load_profile("mine.yml", tmp_path)["serving"]["max_model_len"] == 1024
    (tmp_path / "other.yml").write_text(text)
    with pytest.raises(PlanError, match=r"^profile other: name is 'lab-tiny', expected 'other': correct it in other.yml$"):
        _inputs.load_profile("other.yml", tmp_path)


def test_an_unknown_profile_names_those_that_there_are() -> None:
    with pytest.raises(PlanError) as error:
        _inputs.load_profile("dsv41")
    assert "cluster_profile is 'dsv41'" in str(error.value)
    assert "lab-smollm2" in str(error.value)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_bundled_profiles_are_valid_plain_yaml(path: Path) -> None:
    profile = _inputs.load_profile(path.stem)
    assert profile == yaml.safe_load(path.read_text())
    assert json.loads(json.dumps(profile)) == profile


@pytest.mark.parametrize("path", [path for path in PROFILES if not path.stem.startswith("lab-")], ids=lambda path: path.stem)
def test_every_value_of_a_serving_profile_has_a_source(path: Path) -> None:
    """A tag stands on the value's own line, or in the comment above it or above its parent."""
    text = path.read_text()
    tags = set(re.findall(r"^#   \[(\w+)\] ", text, re.MULTILINE))
    sourceless = {"name", "description", "level", "evidence", "directory", "kind", "command"}
    used: set[str] = set()
    covered, previous = False, ""
    for line in text.split("---\n", 1)[1].splitlines():
        found = {tag for group in re.findall(r"\[([A-Z]+(?:, [A-Z]+)*)\]", line.partition("#")[2]) for tag in group.split(", ")}
        used |= found
        comment = line.lstrip().startswith("#")
        if not line.strip() or (comment and not previous.lstrip().startswith("#")):
            covered = False
        if comment:
            covered = covered or bool(found)
        elif key := re.match(r"\s*([\w-]+): *[^ #]", line):
            assert covered or found or key[1] in sourceless, f"{path.name}: {line.strip()} has no source"
        previous = line
    assert used == tags


# Documentation ---------------------------------------------------------------------------------------------------------------


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(cluster_\w+)` \| (.+?) \| ", (ROOT / "docs" / "variables.md").read_text(), re.MULTILINE))
    schemas = _schema.SETTINGS["properties"]
    assert set(rows) == set(schemas) | {"cluster_address"}
    for name, schema in schemas.items():
        expected = "required" if "default" not in schema else f"`{_literal(schema['default'])}`"
        assert rows[name] == expected, name


def _literal(default: Any) -> str:
    return default if isinstance(default, str) else json.dumps(default)
