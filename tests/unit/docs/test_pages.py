# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is made from data and code is current, and links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from tests.unit.docs import architecture, pages, sbom

ROOT = Path(__file__).resolve().parents[3]
LISTED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
)
PAGES = [ROOT / name for name in LISTED.stdout.splitlines() if (ROOT / name).is_file()]


def test_what_is_made_is_current() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in pages.wanted() if not path.exists() or path.read_text() != text]
    assert not stale, "run tools/pages"


def test_a_change_would_be_noticed() -> None:
    begin, end = pages.marks("x")
    assert pages.with_section(f"a\n{begin}old\n{end}b\n", "x", "new\n") == f"a\n{begin}new\n{end}b\n"
    with pytest.raises(ValueError, match="marks of y"):
        pages.with_section(f"{begin}{end}", "y", "")


@pytest.mark.parametrize("role", sorted(path.name for path in (ROOT / "roles").iterdir()))
def test_a_role_shows_its_variables(role: str) -> None:
    assert pages.marks("variables")[0] in (ROOT / f"roles/{role}/README.md").read_text()


def test_the_bill_of_materials_has_every_input_once_with_a_licence() -> None:
    components = sbom.document()["components"]
    lock = json.loads((ROOT / "runtime/image/lock.json").read_text())
    locked = {(wheel["name"], wheel["version"], wheel["sha256"]) for wheels in lock["wheels"].values() for wheel in wheels}
    listed = {(c["name"], c["version"], c["hashes"][0]["content"]) for c in components if "hashes" in c}
    assert locked <= listed
    pinned = re.findall(
        r"^([A-Za-z0-9_.-]+)==([^ \n]+)",
        "\n".join((ROOT / name).read_text() for name in ("requirements.txt", "constraints.txt")),
        re.MULTILINE,
    )
    assert {(sbom.canonical(name), version) for name, version in pinned} <= {(sbom.canonical(c["name"]), c["version"]) for c in components}
    assert len({c["bom-ref"] for c in components}) == len(components)
    assert sbom.UNKNOWN not in json.dumps([c["licenses"] for c in components])


def test_the_picture_shows_each_role_and_its_modules() -> None:
    drawing = ElementTree.fromstring(architecture.svg())
    texts = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    for role in architecture.order():
        assert {f"role {role}", *architecture.modules(role)} <= texts
    assert "fabric_gate" in architecture.modules("fabric")


def anchors(text: str) -> set[str]:
    """Headings as a browser on the repository addresses them; a repeated one has a number."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE):
        name = re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def broken(page: Path, text: str) -> list[str]:
    """Links within the repository that lead nowhere; code is no link."""
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    wrong = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _sign, anchor = unquote(link).partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs/fabric.md"
    text = "[a](fabric.md#cabling) [b](nothing.md) [c](fabric.md#nowhere) `[d](code)` [e](https://example.org/x) ![f](fabric-ring3.svg)"
    assert broken(page, text) == ["nothing.md", "fabric.md#nowhere"]


def test_every_page_is_on_the_map() -> None:
    """A page of docs/ that nothing leads to is not found."""
    linked = {link.partition("#")[0] for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())}
    names = {Path(link).name for link in linked}
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in names]
