# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a cluster as one HTML file: the lines of the status screen, and each member's last day as small curves.

No script, nothing fetched: it can lie on any web server, go by mail or be opened as it is. Everything that a member said is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..module_utils._status import Line, last_failure, lines, serves

DAY_S = 86400
GAP_S = 700
"""Two records of five minutes that lie further apart have a gap between them, which is drawn as one."""
WIDTH, HEIGHT = 288, 36
"""Of a curve, in units of its own: a record of five minutes is one wide."""

STYLE = """
:root { color-scheme: light dark; --back: #f4f5f7; --card: #fff; --text: #1c2026; --faint: #626a75; --line: #d9dde3; --good: #11703a; --bad: #b3261e;
  --curve: #1766b0; --fill: #1766b01f }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1d2126; --text: #e6e8eb; --faint: #99a1ac; --line: #343a42; --good: #5fd08b;
  --bad: #ff8a80; --curve: #6cb6ff; --fill: #6cb6ff2b } }
* { box-sizing: border-box }
body { font: 16px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 80rem; margin: 0 auto; padding: 1.2rem 1rem 2rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 0 } p { margin: .3rem 0; overflow-wrap: anywhere }
header, h2 { display: flex; flex-wrap: wrap; gap: .3rem .7rem; align-items: center }
.pill { font-size: .85rem; font-weight: 600; padding: .1rem .6rem; border: 1.5px solid; border-radius: 1rem }
.good { color: var(--good) } .bad { color: var(--bad) } .faint { color: var(--faint); font-size: .9rem }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1rem; margin-top: 1rem; min-width: 0 }
.members { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 1rem; align-items: start }
ul { list-style: none; margin: .5rem 0 0; padding: 0 } li { padding: .35rem 0; border-top: 1px solid var(--line); overflow-wrap: anywhere }
code { display: block; font-size: .85rem; color: var(--curve) } code span { white-space: nowrap } pre { overflow-x: auto; font-size: .8rem }
figure { margin: .8rem 0 0 } figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 .8rem; font-size: .85rem }
figcaption span { color: var(--faint); font-size: .8rem; font-variant-numeric: tabular-nums }
svg { display: block; width: 100%; height: 2.2rem; border-bottom: 1px solid var(--line) } summary { cursor: pointer }
.line { fill: none; stroke: var(--curve); stroke-width: 1.5; vector-effect: non-scaling-stroke; stroke-linejoin: round } .area { fill: var(--fill) }
"""

Point = tuple[float, float]


def page(plan: Mapping[str, Any], members: Mapping[str, Mapping[str, Any] | None], at: float) -> str:
    """The file. `at`: when the members were asked, seconds since 1970."""
    said = lines(plan, members)
    serving = serves(members)
    name, verdict = escape(plan["cluster"]["name"]), "serving" if serving else "not serving"
    fastest = max((rate for member in members.values() for record in _day(member, at) for rate in record["legs"].values()), default=0.0)
    cards = "\n".join(
        _card(line, [one for one in said if one.member == line.member and not one.first], plan, members[line.member], at, fastest)
        for line in said
        if line.first
    )
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: {verdict}</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{name}</h1>{_pill(verdict, serving)}</header>",
        f"<p>{escape(said[0].text)}</p>",
        f'<p class="faint">As of {time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))}. The page does not renew itself.</p>',
        _next_steps([line for line in said if line.command or (not line.member and line is not said[0])]),
        f'<main class="members">{cards}</main>',
        _log(last_failure(plan, members)),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _pill(text: str, good: bool) -> str:
    return f'<span class="pill {"good" if good else "bad"}">{escape(text)}</span>'


def _next_steps(said: Sequence[Line]) -> str:
    if not said:
        return '<section class="card"><p class="good">Nothing is to be done.</p></section>'
    items = "".join(_item(line, f"{line.member}: " if line.member else "") for line in said)
    return f'<section class="card"><h2>What comes next</h2><ul>{items}</ul></section>'


def _item(line: Line, start: str = "") -> str:
    # A line may end between words, never after the hyphens of an option.
    words = " ".join(f"<span>{escape(word)}</span>" for word in line.command.split())
    command = f"<code>{words}</code>" if words else ""
    return f"<li>{escape(start + line.text)}{command}</li>"


def _card(first: Line, more: Sequence[Line], plan: Mapping[str, Any], member: Mapping[str, Any] | None, at: float, fastest: float) -> str:
    """One member: what it does, what is wrong with it, its day."""
    rank = plan["members"][first.member]["rank"]
    phase = "unreachable" if member is None else member["phase"]
    heading = f'<h2>{escape(first.member)} <span class="faint">rank {rank}{", head" if rank == 0 else ""}</span>{_pill(phase, phase == "serving")}</h2>'
    # What has a command stands above already.
    listed = "".join(_item(line) for line in more if not line.command)
    if member is None:
        return f'<section class="card">{heading}</section>'
    text = f"<p>{escape(first.text)}</p>"
    return (
        f'<section class="card">{heading}{text}{f"<ul>{listed}</ul>" if listed else ""}{_curves(_day(member, at), at, fastest)}</section>'
    )


def _rate(bytes_per_second: float) -> str:
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_second >= unit:
            return f"{bytes_per_second / unit:.3g} {name}"
    return f"{bytes_per_second:.0f} B/s"


def _day(member: Mapping[str, Any] | None, at: float) -> list[Mapping[str, Any]]:
    return [record for record in (member or {}).get("history", []) if at - DAY_S <= record["at"] <= at + GAP_S]


def _curves(day: Sequence[Mapping[str, Any]], at: float, fastest: float) -> str:
    """Free memory, the head's token and KV cache, and each leg on one scale for all, so that a slow one is seen beside the others."""
    if not day:
        return '<p class="faint">No curves: its exporter has kept nothing of the last day.</p>'
    kinds: list[tuple[str, str, float | None, Callable[[float], str]]] = [
        ("least MemFree", "free", None, lambda mib: f"{mib / 1024:.1f} GiB"),
        ("longest token", "canary", None, lambda seconds: f"{seconds:.2f} s"),
        ("KV cache", "kv", 1.0, lambda share: f"{share:.0%}"),
    ]
    drawn = [
        _curve(title, [(record["at"], record[key]) for record in day if key in record], at, top, said) for title, key, top, said in kinds
    ]
    legs = dict.fromkeys(leg for record in day for leg in record["legs"])
    for leg in legs:
        points = [(record["at"], record["legs"][leg]) for record in day if leg in record["legs"]]
        drawn.append(_curve(f"leg {leg}", points, at, fastest, _rate))
    return "".join(drawn) + '<p class="faint">The last 24 hours, by five minutes. In a gap nobody looked.</p>'


def _curve(title: str, points: Sequence[Point], at: float, top: float | None, said: Callable[[float], str]) -> str:
    if not points:
        return ""
    values = [value for _time, value in points]
    scale = HEIGHT - 2
    full = top or max(values) or 1.0
    shapes = []
    for piece in _pieces(points):
        places = [((when - at + DAY_S) * WIDTH / DAY_S, HEIGHT - scale * min(value / full, 1.0)) for when, value in piece]
        if len(places) == 1:  # a lone record is as wide as its five minutes
            places.insert(0, (places[0][0] - 1, places[0][1]))
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        shapes.append(
            f'<path class="area" d="M{places[0][0]:.1f} {HEIGHT} L{path} L{places[-1][0]:.1f} {HEIGHT} Z"/><path class="line" d="M{path}"/>'
        )
    told = f"now {said(values[-1])}, {said(min(values))} to {said(max(values))}"
    if at - points[-1][0] > GAP_S:
        told = f"last {said(values[-1])}, {said(min(values))} to {said(max(values))}"
    label = escape(f"{title}: {told}")
    return (
        f"<figure><figcaption>{escape(title)} <span>{escape(told)}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{label}">{"".join(shapes)}</svg></figure>'
    )


def _pieces(points: Iterable[Point]) -> list[list[Point]]:
    """Points between which nothing is missing."""
    pieces: list[list[Point]] = []
    for point in points:
        if pieces and point[0] - pieces[-1][-1][0] <= GAP_S:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _log(failure: Mapping[str, Any] | None) -> str:
    if not failure or not failure.get("log"):
        return ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(failure["at"]))
    text = escape("\n".join(failure["log"]))
    return (
        f'<section class="card"><details><summary>The last log lines of the failure of {when}, of {escape(failure["culprit"])}</summary>'
        f"<pre>{text}</pre></details></section>"
    )
