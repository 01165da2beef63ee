# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as plots and as one HTML file. The only place that needs matplotlib."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils._bench import DECODE, PREFILL, table

COLOUR, FAINT = "#0072b2", "#999999"
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8886; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0; background: #fff; padding: .5rem } figure svg { width: 100%; height: auto }
pre { overflow-x: auto } .refused { color: #c0392b }
"""


def plots(document: Mapping[str, Any]) -> dict[str, str]:
    """SVG by name: `prefill` by the prompt's length, `decode` by the number of streams; each repetition a dot. The same document, the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        sentence = "a benchmark's plots need matplotlib on the controller: install requirements.txt, or set bench_plots to false"
        raise AnsibleFilterError(f"{sentence} ({error})") from error

    drawn = {}
    kinds = {PREFILL: ("prompt (tokens)", "tokens"), DECODE: ("streams at once", "concurrency")}
    for kind, (label, key) in kinds.items():
        steps = [step for step in document["steps"] if step["kind"] == kind and step["median"] is not None]
        if not steps:
            continue
        with matplotlib.rc_context({"svg.hashsalt": kind, "svg.fonttype": "none", "font.size": 11}):
            figure = Figure(figsize=(7, 3.6), layout="constrained")
            axes = figure.add_subplot()
            _draw(axes, steps, key)
            axes.set(xlabel=label, ylabel="tokens per second", ylim=(0, None), title=f"{kind}, {document['model']}")
            axes.spines[["top", "right"]].set_visible(False)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        drawn[kind] = buffer.getvalue()
    return drawn


def _draw(axes: Any, steps: Sequence[Mapping[str, Any]], key: str) -> None:
    """Medians as a line, what counts as dots, what does not as crosses. A place per step: lengths of a ladder lie far apart."""
    for place, step in enumerate(steps):
        for repetition in (repetition for repetition in step["repetitions"] if repetition["value"] is not None):
            style = {"marker": "o", "color": COLOUR, "alpha": 0.5} if repetition["counts"] else {"marker": "x", "color": FAINT}
            axes.plot([place], [repetition["value"]], linestyle="", **style)
    axes.plot(range(len(steps)), [step["median"] for step in steps], color=COLOUR)
    axes.set_xticks(range(len(steps)), [str(step[key]) for step in steps])


def html(document: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """All of it in one file: no script, nothing fetched, readable in light and dark, the JSON at its end."""
    head = escape(f"{document['model']}, {document['utc']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{head}</title>',
        f"<style>{STYLE}</style><h1>{head}</h1>",
        f"<p>{escape(document['gate'])}; {escape(document['gpu'])}.</p>",
        _results(document),
        # An SVG within HTML has no declaration of its own.
        *(f"<figure>{picture[picture.index('<svg') :]}</figure>" for picture in pictures.values()),
        "<h2>What ran</h2>",
        *(_provenance(member, said) for member, said in document["provenance"].items()),
        f"<h2>As a terminal shows it</h2><pre>{escape(chr(10).join(table(document)))}</pre>",
        f"<details><summary>JSON</summary><pre>{escape(json.dumps(document, indent=1))}</pre></details></html>\n",
    ]
    return "\n".join(parts)


def _results(document: Mapping[str, Any]) -> str:
    rows = []
    for step in document["steps"]:
        name = escape(step["name"])
        if step["median"] is None:
            rows.append(f'<tr><th>{name}<td class="refused" colspan="4">{escape(step["refused"])}')
            continue
        spread = (step["most"] - step["least"]) / step["median"]
        floors = ", ".join(f"{member} {floor['free_mib']}" for member, floor in step["memory_floor"].items())
        figures = (
            f"{step['median']:.4g}",
            f"{spread:.1%}",
            f"{sum(r['counts'] for r in step['repetitions'])} of {len(step['repetitions'])}",
        )
        rows.append(f"<tr><th>{name}{''.join(f'<td class=number>{figure}' for figure in figures)}<td>{escape(floors)}")
    header = "<tr><th>step<th>tokens per second, median<th>spread<th>repetitions that count<th>least free memory (MiB)"
    return f"<table>{header}{''.join(rows)}</table>"


def _provenance(member: str, said: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in said.items() if isinstance(value, str)}
    rows = "".join(f"<tr><th>{escape(name)}<td>{escape(value or 'not known')}" for name, value in plain.items())
    return f"<h3>{escape(member)}</h3><table>{rows}</table><pre>{escape(' '.join(said.get('arguments', [])))}</pre>"
