# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What holds for every file of a kind, and no linter says."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
FILES = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.splitlines()


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_specification_is_its_defaults(role: str) -> None:
    """The specification is what users read; the defaults are what runs. Shared cluster_* variables have their own page."""
    defaults = yaml.safe_load((ROOT / "roles" / role / "defaults/main.yml").read_text())
    specification = yaml.safe_load((ROOT / "roles" / role / "meta/argument_specs.yml").read_text())
    options = specification["argument_specs"]["main"]["options"]
    own = {name: option for name, option in options.items() if not name.startswith("cluster_") and not option.get("required")}
    assert set(own) == set(defaults)
    # A default that is an expression is not repeated in the specification: the validation would take it for the value.
    constant = {name for name, value in defaults.items() if "{{" not in str(value)}
    assert {name: own[name].get("default") for name in constant} == {name: defaults[name] for name in constant}


@pytest.mark.parametrize(
    ("folders", "licence"),
    [(("examples", "plugins", "roles", "playbooks", "tests", "tools"), "GPL-3.0-or-later"), (("runtime", "kernels"), "Apache-2.0")],
)
def test_a_source_names_the_licence_of_its_folder(folders: tuple[str, ...], licence: str) -> None:
    """An empty file (a package's __init__.py) has nothing to license."""
    suffixes = {".py", ".yml", ".j2", ".cu", ".cuh", ".cpp", ".h"}
    sources = [ROOT / name for name in FILES if name.split("/")[0] in folders and Path(name).suffix in suffixes]
    texts = {path: path.read_text() for path in sources if path.is_file()}
    wrong = [str(path.relative_to(ROOT)) for path, text in texts.items() if text and f"SPDX-License-Identifier: {licence}\n" not in text]
    assert not wrong


def test_the_collection_ships_what_runs_and_nothing_else(tmp_path: Path) -> None:
    """Every file of the shipped folders is in the archive, but for hidden ones; nothing from elsewhere in the checkout is."""
    command = [ROOT / ".venv/bin/ansible-galaxy", "collection", "build", "--output-path", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        shipped = {member.name for member in archive if member.isfile()} - {"MANIFEST.json", "FILES.json"}
    folders = {
        "LICENSES",
        "changelogs",
        "docs",
        "examples",
        "inventories",
        "kernels",
        "meta",
        "playbooks",
        "plugins",
        "profiles",
        "roles",
        "runtime",
    }
    top = {"CHANGELOG.rst", "LICENSE", "README.md", "requirements.txt"}
    existing = {name for name in FILES if (ROOT / name).is_file() and not Path(name).name.startswith(".")}
    assert shipped == {name for name in existing if name in top or name.split("/")[0] in folders}
