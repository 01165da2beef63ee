# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cabling of a plan as an SVG: the members side by side, their sockets in the order of a Spark's back, each cable with its legs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

# Pixels.
MARGIN, BOX_WIDTH, BOX_HEIGHT, GAP = 24, 304, 138, 40
SOCKET_WIDTH, SOCKET_HEIGHT, INSET, LANE, RADIUS = 62, 26, 8, 38, 10
SOCKETS = {"RJ45": 46, "0": 146, "1": 248}
"""Middles of the sockets from the left edge of their member's box; cage 0 is the one next to the RJ45 (NVIDIA/dgx-spark-playbooks)."""

# Okabe and Ito's colours, which colour-blind people tell apart, without the yellow, which is faint on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "#ffffff"


@dataclass(frozen=True)
class Wire:
    """A cable between two sockets, by the x of each."""

    left: float
    right: float
    label: str


def svg(plan: Mapping[str, Any]) -> str:
    """The picture as the text of an SVG file; the same plan gives the same bytes."""
    members = plan["cluster"]["members"]
    column = {name: MARGIN + rank * (BOX_WIDTH + GAP) for rank, name in enumerate(members)}
    width = 2 * MARGIN + len(members) * BOX_WIDTH + (len(members) - 1) * GAP
    switched = plan["cluster"]["topology"] == "switched"
    cables = _cables(plan)
    parts = [_member(column[name], name, plan["members"][name], name == plan["cluster"]["head"]) for name in members]
    drawing, depth = _switch(column, cables, width) if switched else _wires(column, cables)
    height = MARGIN + BOX_HEIGHT + depth + MARGIN
    title = f"{plan['cluster']['topology']} of {len(members)}: {', '.join(members)}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", _rectangle(0, 0, width, height, PAPER, PAPER), *parts, *drawing, "</svg>", ""]
    )


def _cables(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each cable (or switched cage) with its sockets as (member, cage), and its networks by half."""
    cables: dict[str, dict[str, Any]] = {}
    for leg in plan["fabric"]["legs"]:
        cable = cables.setdefault(leg["cable"], {"ends": [(end["member"], end["cage"]) for end in leg["ends"]], "networks": []})
        cable["networks"].append(f"{leg['half']} {leg['network']}")
    return cables


def _wires(column: Mapping[str, float], cables: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], float]:
    """Cables below the members, the short ones nearest; with the depth that they take."""
    wires = [
        Wire(*sorted(column[member] + SOCKETS[str(cage)] for member, cage in cable["ends"]), "   ".join(cable["networks"]))
        for cable in cables.values()
    ]
    order = sorted(range(len(wires)), key=lambda index: (wires[index].right - wires[index].left, index))
    lanes: list[list[Wire]] = []
    place: dict[int, int] = {}
    for index in order:
        wire = wires[index]
        lane = next((k for k, taken in enumerate(lanes) if all(wire.right < t.left or wire.left > t.right for t in taken)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(wire)
        place[index] = lane
    lines, labels = [], []
    top = MARGIN + BOX_HEIGHT
    # Deep ones first, so that a crossing shows the short cable whole.
    for index in reversed(order):
        wire, colour, y = wires[index], COLOURS[index % len(COLOURS)], top + SOCKET_HEIGHT / 2 + LANE * (place[index] + 1)
        lines.append(
            f'<path d="M {wire.left} {top - INSET} V {y - RADIUS} Q {wire.left} {y} {wire.left + RADIUS} {y} H {wire.right - RADIUS} '
            f'Q {wire.right} {y} {wire.right} {y - RADIUS} V {top - INSET}" fill="none" stroke="{colour}" stroke-width="4"/>'
        )
        labels.append(_text((wire.left + wire.right) / 2, y - 8, wire.label, colour, halo=True))
    return lines + labels, SOCKET_HEIGHT / 2 + LANE * len(lanes)


def _switch(column: Mapping[str, float], cables: Mapping[str, Mapping[str, Any]], width: float) -> tuple[list[str], float]:
    """A switch below the members, with a cable from each planned cage; with the depth that it takes."""
    top, drop = MARGIN + BOX_HEIGHT, 2 * LANE
    lines = []
    for index, cable in enumerate(cables.values()):
        for member, cage in cable["ends"]:
            x = column[member] + SOCKETS[str(cage)]
            lines.append(f'<path d="M {x} {top - INSET} V {top + drop}" fill="none" stroke="{COLOURS[index]}" stroke-width="4"/>')
    lines.append(_rectangle(MARGIN, top + drop, width - 2 * MARGIN, LANE * (1 + len(cables)), "#f2f2f2", FAINT))
    lines.append(_text(width / 2, top + drop + 24, "switch: one bridge, one VLAN", INK, weight="bold"))
    for index, (name, cable) in enumerate(cables.items()):
        words = f"cage {name.rpartition('.')[2]} of each member:   {'   '.join(cable['networks'])}"
        lines.append(_text(width / 2, top + drop + 24 + LANE * (index + 0.8), words, COLOURS[index]))
    return lines, drop + LANE * (1 + len(cables))


def _member(x: float, name: str, member: Mapping[str, Any], is_head: bool) -> str:
    """A member's box with its sockets at the lower edge and each leg's address above its socket."""
    y = MARGIN
    parts = [
        _rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, "#fafafa", FAINT),
        _text(x + 14, y + 24, name, INK, anchor="start", weight="bold", size=16),
    ]
    parts.append(_text(x + BOX_WIDTH - 14, y + 24, f"rank {member['rank']}{', head' if is_head else ''}", FAINT, anchor="end"))
    management = member["management"]
    parts.append(_text(x + 14, y + 44, f"{management['interface']} {management['address']}", FAINT, anchor="start", size=12))
    socket_y = y + BOX_HEIGHT - SOCKET_HEIGHT - INSET
    for label, middle in SOCKETS.items():
        legs = [leg for leg in member["legs"] if str(leg["cage"]) == label]
        used = bool(legs) or label == "RJ45"
        parts.append(_rectangle(x + middle - SOCKET_WIDTH / 2, socket_y, SOCKET_WIDTH, SOCKET_HEIGHT, PAPER, INK if used else "#c8c8c8"))
        parts.append(_text(x + middle, socket_y + 17, label if label == "RJ45" else f"cage {label}", INK if used else "#a0a0a0", size=12))
        for row, leg in enumerate(legs):
            parts.append(_text(x + middle, socket_y - 24 + 16 * row, f"{leg['half']} {leg['address']}", INK, size=11))
    return "\n".join(parts)


def _rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'


def _text(
    x: float, y: float, words: str, colour: str, *, anchor: str = "middle", weight: str = "normal", size: int = 13, halo: bool = False
) -> str:
    edge = f' stroke="{PAPER}" stroke-width="5" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" fill="{colour}"{edge} '
        f'xml:space="preserve">{escape(words)}</text>'
    )
