# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/architecture.svg, drawn from the sources: which role calls which modules, and what runs on a member and in its container."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]

# Pixels.
MARGIN, GAP, LINE, PAD, TITLE = 24, 20, 17, 12, 24
WIDTH = 1180
INK, FAINT, PAPER, BLUE, GREEN, ORANGE = "#1a1a1a", "#6b6b6b", "#ffffff", "#e6f1f8", "#e5f4ee", "#fbeee2"


def order() -> list[str]:
    """Roles as site.yml comes to them."""
    text = (ROOT / "playbooks/site.yml").read_text()
    found = re.findall(r"name: gb10\.cluster\.(\w+), tasks_from: apply", text)
    others = sorted(path.name for path in (ROOT / "roles").iterdir() if path.name not in found and (path / "tasks/main.yml").exists())
    return list(dict.fromkeys(found)) + others


def modules(role: str) -> list[str]:
    """The collection's modules that a role's tasks call."""
    known = {path.stem for path in (ROOT / "plugins/modules").glob("*.py")}
    text = "\n".join(path.read_text() for path in sorted((ROOT / f"roles/{role}/tasks").glob("*.yml")))
    return sorted({name for name in re.findall(r"^\s+gb10\.cluster\.(\w+):", text, re.MULTILINE) if name in known})


def purpose(role: str) -> str:
    """The short description of its specification."""
    specification = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
    return str(specification["argument_specs"]["main"]["short_description"])


def wrapped(text: str, characters: int) -> list[str]:
    """Words in lines of so many characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > characters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def height(lines: Sequence[str]) -> int:
    return TITLE + PAD + LINE * len(lines) + PAD


def box(x: int, y: int, width: int, tall: int, title: str, lines: Sequence[str], fill: str) -> str:
    """A box with a title and lines."""
    texts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{tall}" rx="6" fill="{fill}" stroke="{FAINT}"/>',
        f'<text x="{x + PAD}" y="{y + TITLE}" font-weight="bold" fill="{INK}">{escape(title)}</text>',
    ]
    texts += [
        f'<text x="{x + PAD}" y="{y + TITLE + PAD + LINE * (row + 1) - 5}" font-size="12" fill="{INK}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    return "\n".join(texts)


def arrow(x: int, top: int, bottom: int) -> str:
    return f'<path d="M{x} {top}V{bottom - 2}" stroke="{FAINT}" fill="none" marker-end="url(#end)"/>'


def svg() -> str:
    """The picture; the same sources give the same bytes."""
    names = order()
    wide = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) // len(names)
    half = (WIDTH - 2 * MARGIN - GAP) // 2
    characters = (wide - 2 * PAD) // 7
    parts, y = [], MARGIN

    inventory = wrapped("members in order, cables, addresses, what this site wants", 60)
    profile = wrapped("checkpoint, image, arguments, memory, probes; every value with its source", 60)
    tall = max(height(inventory), height(profile))
    parts += [box(MARGIN, y, half, tall, "inventory", inventory, BLUE), box(MARGIN + half + GAP, y, half, tall, "profile", profile, BLUE)]
    parts += [arrow(x, y + tall, y + tall + GAP + 6) for x in (MARGIN + half // 2, WIDTH - MARGIN - half // 2)]
    y += tall + GAP + 6

    plan = wrapped(
        "legs and addresses, NCCL's variables with reasons, each rank's command, units, what is refused and why: pure functions, JSON", 150
    )
    parts.append(box(MARGIN, y, WIDTH - 2 * MARGIN, height(plan), "plan (plugins/module_utils)", plan, GREEN))
    y += height(plan)
    top, y = y, y + GAP + 6

    columns = [[*wrapped(purpose(name), characters), "", *modules(name)] for name in names]
    tall = max(height(column) for column in columns)
    for index, (name, column) in enumerate(zip(names, columns, strict=True)):
        x = MARGIN + index * (wide + GAP)
        parts += [arrow(x + wide // 2, top, y), box(x, y, wide, tall, f"role {name}", column, BLUE)]
    parts += [arrow(x, y + tall, y + tall + GAP + 6) for x in (MARGIN + half // 2, WIDTH - MARGIN - half // 2)]
    y += tall + GAP + 6

    node = sorted(path.stem for path in (ROOT / "runtime/node/gb10_node").glob("*.py") if not path.stem.startswith("__"))
    services = wrapped(f"gb10_node: {', '.join(node)}", 74)
    container = wrapped(
        "vLLM's release, gb10_vllm (runtime/overlay), gb10_exl3 (kernels/exl3); the gate and the GPU's series run in the same image", 74
    )
    tall = max(height(services), height(container))
    parts += [
        box(MARGIN, y, half, tall, "beside the container, on each member", services, ORANGE),
        box(MARGIN + half + GAP, y, half, tall, "in the container", container, ORANGE),
    ]
    y += tall + GAP

    playbooks = wrapped(", ".join(sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))), 150)
    parts.append(box(MARGIN, y, WIDTH - 2 * MARGIN, height(playbooks), "playbooks", playbooks, GREEN))
    y += height(playbooks) + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">\n<title>How gb10.cluster is built</title>\n'
        f'<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>\n<rect width="{WIDTH}" height="{y}" fill="{PAPER}"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])
