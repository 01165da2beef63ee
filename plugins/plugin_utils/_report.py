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

from ..module_utils import _ladder
from ..module_utils._bench import DECODE, PREFILL, step_of, table

COLOUR, FAINT = "#0072b2", "#999999"
HEADROOM = 1.08
"""For the uppermost dot to be whole."""
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.25rem }
table { border-collapse: collapse; display: block; overflow-x: auto; overflow-wrap: normal }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8886; vertical-align: top }
.number { text-align: right; font-variant-numeric: tabular-nums } .any { overflow-wrap: anywhere; min-width: 6rem }
figure { margin: 1rem 0; background: #fff; padding: .5rem } figure svg { width: 100%; height: auto }
pre { overflow-x: auto } pre.words { white-space: pre-wrap }
.refused, .failed { color: #c0392b } .better { font-weight: bold }
@media (max-width: 40rem) { body { font-size: 14px } th, td { padding-right: .5rem } }
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
            axes.set(xlabel=label, ylabel="tokens per second", ylim=(0, HEADROOM * axes.dataLim.y1), title=f"{kind}, {document['model']}")
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


def begin(title: str, style: str = "") -> str:
    """How a page begins. `style`: rules beyond those that all pages have."""
    head = escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{head}</title>\n'
        f"<style>{STYLE}{style}</style><h1>{head}</h1>"
    )


def _page(title: str, parts: Sequence[str], document: Mapping[str, Any]) -> str:
    """One file: no script, nothing fetched, readable in light and dark, the JSON at its end."""
    end = f"<details><summary>JSON</summary><pre>{escape(json.dumps(document, indent=1))}</pre></details></html>\n"
    return "\n".join([begin(title), *parts, end])


def html(document: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """All of it in one file."""
    parts = [
        f"<p>{escape(document['gate'])}; {escape(document['gpu'])}.</p>",
        _results(document),
        # An SVG within HTML has no declaration of its own.
        *(f"<figure>{picture[picture.index('<svg') :]}</figure>" for picture in pictures.values()),
        "<h2>What ran</h2>",
        *(_provenance(member, said) for member, said in document["provenance"].items()),
        f"<h2>As a terminal shows it</h2><pre>{escape(chr(10).join(table(document)))}</pre>",
    ]
    return _page(f"{document['model']}, {document['utc']}", parts, document)


def ladder_html(ladder: Mapping[str, Any]) -> str:
    """A ladder in one file: each try with its figures, what differs from the best before it, and where it ends."""
    names = [step_of(step).name for step in ladder["case"]]
    rows = []
    for each in ladder["tries"]:
        medians = {step["name"]: step["median"] for step in each["steps"]}
        figures = "".join(f"<td class=number>{'-' if medians.get(name) is None else format(medians[name], '.4g')}" for name in names)
        below = "" if each["verdict"] == _ladder.FIRST else f"on top of {each['on']}{': ' if each['why'] else ''}{each['why']}"
        what = "<br>".join(escape(line) for line in [below, *_ladder.gathered(each["differences"])])
        rows.append(f"<tr><th>{escape(each['name'])}<td class={each['verdict']}>{each['verdict']}{figures}<td class=any>{what}")
    best = _ladder.base(ladder)
    header = f"<tr><th>rung<th>verdict{''.join(f'<th class=number>{escape(name)}' for name in names)}<th>why, and what differs"
    parts = [
        "<p>Tokens per second, medians. Each rung was tried on top of the best before it.</p>",
        f"<table>{header}{''.join(rows)}</table>",
        f"<h2>Best: {escape(best['name'])}</h2><pre>{escape(json.dumps(best['settings'], indent=1))}</pre>",
    ]
    return _page(f"Ladder of {ladder['model']}, {ladder['utc']}", parts, ladder)


def _results(document: Mapping[str, Any]) -> str:
    rows = []
    for step in document["steps"]:
        name = escape(step["name"])
        if step["median"] is None:
            rows.append(f'<tr><th>{name}<td class="refused any" colspan="5">{escape(step["refused"])}')
            continue
        spread = (step["most"] - step["least"]) / step["median"]
        floor, member = min(((floor["free_mib"], member) for member, floor in step["memory_floor"].items()), default=("", ""))
        figures = (
            f"{step['median']:.4g}",
            f"{spread:.1%}",
            f"{sum(r['counts'] for r in step['repetitions'])} of {len(step['repetitions'])}",
        )
        rows.append(
            f"<tr><th>{name}{''.join(f'<td class=number>{figure}' for figure in figures)}<td class=number>{floor}<td>{escape(member)}"
        )
    numbers = "".join(
        f"<th class=number>{name}" for name in ("tokens per second, median", "spread", "repetitions that count", "least free MiB")
    )
    header = f"<tr><th>step{numbers}<th>on"
    return f"<table>{header}{''.join(rows)}</table>"


def _provenance(member: str, said: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in said.items() if isinstance(value, str)}
    rows = "".join(f"<tr><th>{escape(name)}<td class=any>{escape(value or 'not known')}" for name, value in plain.items())
    return f"<h3>{escape(member)}</h3><table>{rows}</table><pre class=words>{escape(' '.join(said.get('arguments', [])))}</pre>"
