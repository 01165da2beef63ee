# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An acceptance as one HTML file: no script, nothing fetched, readable in light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from ..module_utils._acceptance import FAILED, MEASURED, NOT_RUN
from ._report import begin

MORE = """
.measured { color: #1a7f37 } .failed { color: #c0392b } .not-run { color: #888 }
td.verdict { white-space: nowrap; font-weight: 600 } td.result { overflow-wrap: anywhere } table.claims { table-layout: fixed; width: 100%; display: table }
table.claims th:first-child { width: 7.5rem } table.claims td.verdict, table.claims th.verdict { width: 5.5rem }
@media (max-width: 40rem) { table.claims, table.claims tr, table.claims td, table.claims th { display: block; width: auto !important; border: 0; padding: 0 }
  table.claims tr { border-bottom: 1px solid #8886; padding: .5rem 0 } table.claims tr:first-child { display: none } }
"""


def html(document: Mapping[str, Any], evidence: Mapping[str, Any]) -> str:
    """The whole page."""
    facts = {
        "profile": document["profile"],
        "fabric": f"{document['topology']} of {', '.join(document['members'])}",
        "allowed": ", ".join(document["allowed"]) or "nothing that disturbs the group",
        **document["versions"],
    }
    claims = document["claims"]
    counts = ", ".join(f"{sum(claim['verdict'] == verdict for claim in claims)} {verdict}" for verdict in (MEASURED, FAILED, NOT_RUN))
    parts = [
        begin(f"Acceptance of {document['group']}, {document['utc']}", MORE),
        f"<p>{escape(counts)}.</p>",
        f"<table>{''.join(f'<tr><th>{escape(name)}<td>{escape(str(value))}' for name, value in facts.items())}</table>",
        "<h2>Claims</h2>",
        _claims([claim for claim in claims if claim["result"] != "by hand"]),
        "<h2>By hand</h2>",
        _claims([claim for claim in claims if claim["result"] == "by hand"]),
        "<h2>Steps</h2>",
        _steps(document),
        "<h2>Members</h2>",
        *(f"<h3>{escape(member)}</h3><pre>{escape(json.dumps(said, indent=1))}</pre>" for member, said in document["platform"].items()),
        *(
            f"<details><summary>What the modules said: {escape(step)}</summary><pre>{escape(json.dumps(said, indent=1))}</pre></details>"
            for step, said in evidence.items()
        ),
        "</html>\n",
    ]
    return "\n".join(parts)


def _claims(claims: list[Mapping[str, Any]]) -> str:
    rows = [
        f'<tr><th>{escape(claim["id"])}<td class="verdict {claim["verdict"].replace(" ", "-")}">{escape(claim["verdict"])}'
        f'<td>{escape(claim["statement"])}<br><code>{escape(claim["command"])}</code><td class="result">{escape(_result(claim))}'
        for claim in claims
    ]
    return f'<table class="claims"><tr><th>claim<th class="verdict">verdict<th>what is claimed, and what proves it alone<th>result{"".join(rows)}</table>'


def _result(claim: Mapping[str, Any]) -> str:
    """Of what is done by hand, what is to be seen."""
    return f"to be seen: {claim['see']}" if claim["result"] == "by hand" else str(claim["result"])


def _steps(document: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><th>{escape(step['name'])}<td class=number>{step['seconds']:.1f} s"
        f"<td>{escape(step['reason'] or '; '.join(f'{member}: {why}' for member, why in step['failed'].items()) or 'done')}"
        for step in document["steps"]
    ]
    return f"<table><tr><th>step<th>time<th>end{''.join(rows)}</table>"
