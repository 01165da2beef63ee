# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What docs/troubleshooting.md quotes is what the collection says, and what it tells to run exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _schema

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "docs" / f"{name}.md" for name in ("troubleshooting", "tutorial-two-sparks", "tutorial-ring3", "tutorial-ci", "new-profile")
]
SILENT = "Not noticed yet"
"""The section whose symptoms are not this collection's words."""


def spoken() -> set[str]:
    """Every constant text of the code that speaks to users, the fixed parts of f-strings one by one; and what YAML says."""
    said: set[str] = set()
    for path in [*ROOT.glob("plugins/*/*.py"), *ROOT.glob("runtime/**/*.py")]:
        tree = ast.parse(path.read_text())
        # Docstrings and the documentation of modules are read by people who look for them, not told to users.
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) or (isinstance(node, ast.Assign) and _is_documentation(node))
        }
        said |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        }
    for path in [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/**/*.yml")]:
        said |= set(strings(yaml.safe_load(path.read_text())))
    return said


def _is_documentation(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("DOCUMENTATION", "EXAMPLES", "RETURN")


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield " ".join(value.split())
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def quotations(page: str) -> list[str]:
    """The texts in code style of the first column of each table."""
    rows = [line for line in page.partition(f"## {SILENT}")[0].splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def anchors(page: str) -> set[str]:
    """Headings as a browser on the repository addresses them."""
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}


def unsaid(texts: list[str], said: set[str]) -> list[str]:
    """Quotations that nobody says: a lone word is a verdict and must be one, anything else is a part of a sentence."""
    whole = "\0".join(said)
    return [text for text in texts if text not in (said if re.fullmatch(r"[a-z]+(-[a-z]+)+", text) else whole)]


PAGE = PAGES[0].read_text()
QUOTED = [text for text in quotations(PAGE) if not text.startswith("gb10.cluster.")]


def test_every_quotation_is_said_somewhere() -> None:
    assert len(QUOTED) > 150
    assert unsaid(QUOTED, spoken()) == []


def test_what_nobody_says_is_found() -> None:
    assert unsaid(["so RDMA cannot register memories", "gid-emptied", "gid-empty"], spoken()) == [
        "so RDMA cannot register memories",
        "gid-emptied",
    ]


def test_a_quotation_points_at_one_thing() -> None:
    """Of a sentence so much that it is found by it, and each in one row."""
    assert len(QUOTED) == len(set(QUOTED))
    said = spoken()
    sentences = [text for text in QUOTED if " " in text]
    assert not [text for text in sentences if len(text) < 7 or sum(text in each for each in said) > 10]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_to_be_run_exists(page: Path) -> None:
    text = page.read_text()
    for name, tags in re.findall(r"gb10\.cluster\.(\w+)(?: --tags ([\w,]+))?", text):
        playbook = ROOT / f"playbooks/{name}.yml"
        others = [ROOT / f"plugins/{kind}/{name}.py" for kind in ("modules", "filter", "lookup")]
        assert any(path.exists() for path in (playbook, *others, ROOT / "roles" / name)), name
        known = set(re.findall(r"\w+", " ".join(re.findall(r"tags: \[([^\]]*)\]", playbook.read_text())))) if tags else set()
        assert set(tags.split(",")) - {""} <= known, f"{name} --tags {tags}"
    for name in re.findall(r"playbooks/(\w+)\.yml", text):
        assert (ROOT / f"playbooks/{name}.yml").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_variables_and_links_exist(page: Path) -> None:
    text = page.read_text()
    roles = {path.name: yaml.safe_load((path / "defaults/main.yml").read_text()) for path in (ROOT / "roles").iterdir()}
    for role, name in re.findall(rf"`(?:-e )?(({'|'.join(roles)})_\w+)", text):
        name, role = role, name
        assert name in roles[role], name
    assert set(re.findall(r"`(?:-e )?(cluster_\w+)", text)) <= set(_schema.SETTINGS["properties"]) | {"cluster_address"}
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):
        assert (page.parent / target).exists(), target
        assert not anchor or anchor in anchors((page.parent / target).read_text()), f"{target}#{anchor}"
