# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/sbom.cdx.json (CycloneDX 1.6) and the tables of docs/licences.md, from runtime/image/lock.json, requirements.txt and constraints.txt.

A licence is the package's own word: of what is installed here it is read from its metadata once and kept in licences.json, since not every
environment has every package. What the image's wheels say was read from the wheels.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SPDX = re.compile(r"(?!BSD$)[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")
"""An expression of SPDX, as far as its form tells; older packages have words of their own."""
UNKNOWN = "unknown: run tools/pages where it is installed"
LICENCES = Path(__file__).with_name("licences.json")


def controller() -> list[dict[str, str]]:
    """Python packages of the controller and the tests: direct pins with what they are for, then what these bring."""
    direct, section = [], ""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.startswith("# ") and not line.endswith("."):
            section = line[2:]
        if found := re.match(r"([A-Za-z0-9_.-]+)==([^ ;]+)(?: ; [^#]+)?(?: *# (.*))?", line):
            direct.append({"name": found[1], "version": found[2], "for": section, "why": found[3] or ""})
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = {canonical(each["name"]) for each in direct}
    return direct + [{"name": name, "version": version, "for": "", "why": ""} for name, version in pinned if canonical(name) not in known]


def canonical(name: str) -> str:
    return re.sub(r"[-_./]+", "-", name).lower()


def licences() -> dict[str, str]:
    kept: dict[str, str] = json.loads(LICENCES.read_text())
    return kept


def licence(each: dict[str, str]) -> str:
    return licences().get(canonical(each["name"]), UNKNOWN)


def image() -> list[dict[str, str]]:
    """What an image's build takes in, by runtime/image/lock.json, and the collection's own parts."""
    lock = json.loads((ROOT / "runtime/image/lock.json").read_text())
    base = lock["base"]
    name, _colon, tag = base["reference"].partition(":")
    parts = [
        {
            "name": name.partition("/")[2],
            "version": tag,
            "kind": "container",
            "sha256": (base["digest"] or "").removeprefix("sha256:"),
            "group": "base",
        }
    ]
    parts += [
        {"name": wheel["name"], "version": wheel["version"], "kind": "library", "sha256": wheel["sha256"], "group": group}
        for group, wheels in lock["wheels"].items()
        for wheel in wheels
    ]
    for folder in ("kernels/exl3", "runtime/overlay"):
        text = (ROOT / folder / "pyproject.toml").read_text()
        own = dict(re.findall(r'^(name|version) = "(.+)"$', text, re.MULTILINE))
        parts.append({**own, "kind": "library", "sha256": "", "group": "own"})
    return parts


def document() -> dict[str, Any]:
    """The bill of materials. The same inputs give the same bytes: no time, no random number."""
    version = dict(re.findall(r"^(version): (.+)$", (ROOT / "galaxy.yml").read_text(), re.MULTILINE))["version"]

    def component(each: dict[str, str], part: str) -> dict[str, Any]:
        kind = each.get("kind", "library")
        scheme = "docker" if kind == "container" else "generic" if each.get("group") == "own" else "pypi"
        name = each["name"] if scheme != "pypi" else canonical(each["name"])
        word = licence(each)
        said = {"expression": word} if SPDX.fullmatch(word) else {"license": {"name": word}}
        return {
            "type": kind,
            "bom-ref": f"{part}:{name}@{each['version']}",
            "name": each["name"],
            "version": each["version"],
            **({"hashes": [{"alg": "SHA-256", "content": each["sha256"]}]} if each.get("sha256") else {}),
            "licenses": [said],
            "purl": f"pkg:{scheme}/{name}@{each['version']}",
            "properties": [{"name": "gb10:part", "value": part}],
        }

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "gb10.cluster",
                "name": "gb10.cluster",
                "version": version,
                "licenses": [{"expression": "GPL-3.0-or-later AND Apache-2.0"}],
            }
        },
        "components": [*(component(each, "image") for each in image()), *(component(each, "controller") for each in controller())],
    }


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


def image_table() -> str:
    rows = [f"| {each['group']} | {each['name']} | {each['version']} | {licence(each)} |" for each in image()]
    return "\n".join(["| part | what | version | licence |", "|---|---|---|---|", *rows]) + "\n"


def controller_table() -> str:
    rows = [
        f"| {each['for'].lower()} | {each['name']} | {each['version']} | {licence(each)} | {each['why']} |"
        for each in controller()
        if each["for"]
    ]
    return "\n".join(["| part | package | version | licence | what for |", "|---|---|---|---|---|", *rows]) + "\n"


def read_licences() -> dict[str, str]:
    """What the installed packages say of themselves, over what is kept for the others."""
    found = licences() if LICENCES.exists() else {}
    for each in controller():
        try:
            said = metadata.metadata(each["name"])
        except metadata.PackageNotFoundError:
            continue
        classifiers = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or [] if line.startswith("License ::")]
        short = said.get("License") or ""
        found[canonical(each["name"])] = (
            said.get("License-Expression") or (short if 0 < len(short) < 40 else " AND ".join(classifiers)) or UNKNOWN
        )
    return dict(sorted(found.items()))


if __name__ == "__main__":
    LICENCES.write_text(json.dumps(read_licences(), indent=1) + "\n")
