# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The distribution's Prometheus for tests: its package is fetched once and unpacked into the build cache, so that nothing is installed or started here.

And what the collection asks of a Prometheus, taken from the files that it ships.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.lab import cache

ROOT = Path(__file__).resolve().parents[1]
KEYWORDS = {"and", "or", "unless", "bool", "offset"}


def prometheus() -> Path:
    """A folder with the package's `.deb` and its files below `root`; 19 MB are fetched the first time."""
    return cache.build("prometheus", {"package": "prometheus"}, _fetch)


def promtool() -> Path:
    """The checker of configurations and rules: an installed one, else the package's."""
    installed = shutil.which("promtool")
    return Path(installed) if installed else prometheus() / "root/usr/bin/promtool"


def _fetch(destination: Path) -> None:
    # apt's own user may not write into a folder of ours.
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
    if subprocess.run(download, cwd=destination, capture_output=True, check=False, timeout=300).returncode:
        subprocess.run(["apt-get", "-q", "update"], check=True, capture_output=True, timeout=300)  # a machine that has no lists yet
        subprocess.run(download, cwd=destination, check=True, timeout=300)
    package = next(destination.glob("*.deb"))
    subprocess.run(["dpkg-deb", "--extract", package, destination / "root"], check=True, timeout=120)


def queries(cluster: str) -> dict[str, str]:
    """Every expression that the monitoring role ships, by where it stands: `rule ALERT` and `panel TITLE REF`."""
    files = ROOT / "roles/monitoring/files"
    groups = yaml.safe_load((files / "rules.yml").read_text())["groups"]
    found = {f"rule {rule['alert']}": str(rule["expr"]) for group in groups for rule in group["rules"]}
    for panel in json.loads((files / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"].replace("$cluster", cluster)
    return found


def selectors(expression: str) -> dict[str, set[str]]:
    """The metrics of an expression, and the labels that it names of each in braces."""
    plain = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", expression)
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"([a-zA-Z_][\w:]*)(?:\{([^}]*)\})?(?!\w|\s*\()", re.sub(r"\[\w+\]", "", plain)):
        if name not in KEYWORDS and not re.fullmatch(r"e\d+", name):
            found.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", labels))
    return found
