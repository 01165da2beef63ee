# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parts of pages that are made from data and code: `tools/pages` writes all of them anew, and a test says when that is needed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _acceptance, _claims, _levers, _schema

from tests.unit.docs import architecture, sbom

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "extensions/molecule/results"


def table(*rows: tuple[str, ...]) -> str:
    """Markdown, the first row as its head."""
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))
        .replace("| --- ", "|---")
        .replace("--- |\n", "---|\n")
    )


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by tools/pages -->\n", f"<!-- end of {name} -->\n"


def roles() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("roles/*/README.md") if marks("variables")[0] in path.read_text())


def markdown(text: str) -> str:
    """Ansible's markup as Markdown, in one line of a table."""
    return " ".join(re.sub(r"\b[CVO]\(([^)]*)\)", r"`\1`", text).split()).replace("|", "\\|")


def variables(role: str) -> str:
    """A role's variables by its specification; what an expression computes is said in words."""
    specification = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())
    rows = []
    for name, option in specification.items():
        if name.startswith("cluster_"):
            continue
        expression = str(defaults.get(name))
        kind = (
            "from the inventory"
            if name == f"{role}_plan"
            else "from the plan"
            if "plan" in expression and "{{" in expression
            else "computed"
        )
        default = "required" if option.get("required") else kind if "{{" in expression else f"`{json.dumps(option.get('default'))}`"
        said = option["description"]
        meaning = markdown(said if isinstance(said, str) else " ".join(said))
        choices = f" One of {', '.join(f'`{json.dumps(choice)}`' for choice in option['choices'])}." if "choices" in option else ""
        rows.append((f"`{name}`", default, meaning + choices))
    return table(("variable", "default", "meaning"), *rows)


def _command(text: str) -> str:
    """A playbook with its options as code; what is code already, or an act, stays."""
    return re.sub(r"^gb10\.cluster\.\w+(?: -e \S+| --[a-z]+(?: [a-z]+)?)*", r"`\g<0>`", text)


def measured_claims() -> str:
    whens = {step.name: step.when for step in _claims.STEPS}
    permission = {_claims.STOPPED: "stop", _claims.AROUND: "stop", _claims.LOAD: "load", _claims.REBOOT: "reboot"}
    rows = [
        (
            f"`{one.id}`",
            one.statement,
            f"`{permission[whens[one.step]]}`" if whens[one.step] in permission else "",
            _command(one.command),
            one.see,
        )
        for one in _claims.MEASURED
    ]
    return table(("claim", "what it says", "to be allowed", "alone", "what to see"), *rows)


def claims_by_hand() -> str:
    return table(
        ("claim", "what it says", "what to do", "what to see"),
        *((f"`{c.id}`", c.statement, _command(c.command), c.see) for c in _claims.BY_HAND),
    )


def playbooks() -> str:
    """Each playbook by the sentences at its head, with the variables of its first lines of usage."""
    rows = []
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        head = [line[1:].strip() for line in path.read_text().partition("\n---")[0].splitlines()]
        said = " ".join(line for line in head if not line.startswith(("Copyright", "SPDX", "ansible-playbook ")))
        usage = [
            re.split(r" +# ", line.removeprefix("ansible-playbook -i INVENTORY ")) for line in head if line.startswith("ansible-playbook ")
        ]
        code = "".join(f"<br>`{command}`{': ' if why else ''}{' '.join(why)}" for command, *why in usage)
        rows.append((f"`gb10.cluster.{path.stem}`", said.replace("|", "\\|") + code.replace("|", "\\|")))
    return table(("playbook", "what it does"), *rows)


OVERLAY = "kernels/results/h200-overlay.json"
FORWARD = "kernels/results/h200-forward.json"


def proven_where() -> str:
    """What was run on which machine, by the evidence that is kept."""
    kernels, builds = (json.loads((ROOT / f"kernels/results/{name}.json").read_text()) for name in ("h200", "resources"))
    overlay, forward = (json.loads((ROOT / path).read_text()) for path in (OVERLAY, FORWARD))
    faults = json.loads((RESULTS / "faults.json").read_text())
    by_itself = sum(fault["how"] == "by itself" for fault in faults.values())
    fits = [kernel for arch, kernels_ in builds["kernels"].items() if arch.startswith("sm_121") for kernel in kernels_.values()]
    rows = [
        (
            "three hosts of one machine, without GPU and RDMA",
            f"{len(faults)} faults below a serving group, after {by_itself} of which it came back by itself",
            max(fault["date"] for fault in faults.values()),
            "[faults.json](extensions/molecule/results/faults.json)",
        )
    ]
    for path in sorted(RESULTS.glob("acceptance-*.json")):
        document = json.loads(path.read_text())
        counts = {
            verdict: sum(claim["verdict"] == verdict for claim in document["claims"])
            for verdict in (_acceptance.MEASURED, _acceptance.FAILED)
        }
        what = f"{counts['measured']} of {len(document['claims'])} claims of `acceptance` measured, {counts['failed']} failed"
        rows.append(
            (
                path.stem.removeprefix("acceptance-").replace("-", " "),
                what,
                document["utc"][:10],
                f"[{path.name}](extensions/molecule/results/{path.name})",
            )
        )
    rows += [
        (
            f"one {kernels['card']}",
            f"EXL3 kernels: {kernels['checks']['pytest']} (checks against the reference), memcheck {kernels['checks']['sanitizer']['memcheck']}, times",
            kernels["date"],
            "[h200.json](kernels/results/h200.json)",
        ),
        (
            f"one {overlay['ranks'][0]['card']}",
            f"the vLLM plugin's layers on these kernels: {overlay['checks']['tests']} tests, "
            f"{overlay['checks']['failures'] + overlay['checks']['errors']} failed; a rank of the full-size model in its memory",
            overlay["date"],
            f"[h200-overlay.json]({OVERLAY})",
        ),
        (
            f"one {forward['card']}",
            f"vLLM's engine with the plugin, a small model of the release's layers: {len(forward['runs'])} runs on up to 3 ranks that share the card, "
            "compared with each other",
            forward["date"],
            f"[h200-forward.json]({FORWARD})",
        ),
        (
            "a compiler for GB10 (sm_121a), no GPU",
            f"{len(fits)} kernels built, {sum(kernel['spilled_bytes'] > 0 for kernel in fits)} of them spill registers",
            "",
            "[resources.json](kernels/results/resources.json)",
        ),
        ("Sparks", "nothing yet", "", "[what only they can prove](docs/on-real-sparks.md)"),
    ]
    return table(("where", "what was run", "date", "evidence"), *rows)


def levers() -> str:
    """The overlay's levers, each with the value that turns it off and the default where that is another one."""
    rows = [
        (
            f"`{lever['variable']}`",
            (f"`{lever['off']}`" if lever["off"] else "empty")
            + ("" if lever["default"] == lever["off"] else f" (default `{lever['default']}`)"),
            lever["what"],
        )
        for lever in json.loads((ROOT / _levers.LEVERS).read_text())
    ]
    return table(("variable", "off", "what"), *rows)


def overlay_times() -> str:
    """A rank of the full-size models on the GPU on which that was measured: memory, and the EXL3 layers' part of a step."""
    rows = []
    for rank in json.loads((ROOT / OVERLAY).read_text())["ranks"]:
        what = {"all": "everything in EXL3, 2.9 bits", "experts": "experts in EXL3, 3.5 bits"}[rank["kind"]]
        first = (f"{what}, one of {rank['ranks']} ranks", f"{rank['parameters_gib']} GiB, {rank['decode'][0]['layers']} EXL3 layers")
        for step in rank["decode"]:
            that = f"{step['gb_per_s']} GB/s of {step['weights_gib']} GiB"
            rows.append((*first, f"decoding, m = {step['rows']}", f"{step['ms']} ms", that))
            first = ("", "")
        for step in rank["prefill"]:
            that = f"{step['tokens_per_s']} tokens/s, {step['memory_mib']} MiB of memory on the way"
            rows.append((*first, f"prefill, m = {step['rows']}", f"{step['ms']} ms", that))
    return table((f"model, on one {rank['card']}", "parameters", "step", "its EXL3 layers", "that is"), *rows)


FORWARD_PAIRS = {
    ("exl3", "dense"): "EXL3 and bfloat16",
    ("dense", "rounded"): "two roundings to bfloat16",
    ("wrong", "dense"): "EXL3 with one wrong matrix and bfloat16",
    ("exl3", "exl3, 2 ranks"): "EXL3, one and two ranks",
    ("exl3", "exl3, 3 ranks"): "EXL3, one and three ranks (72 heads)",
}


def forward_differences() -> str:
    """By how much whole forward passes differ, for each prompt."""
    pairs = {(pair["one"], pair["other"]): pair["apart"] for pair in json.loads((ROOT / FORWARD).read_text())["pairs"]}
    lengths = [f"{part['prompt_tokens']} tokens" for part in pairs["exl3", "dense"]]
    rows = [(what, *(f"{part['median']:.3g}" for part in pairs[names])) for names, what in FORWARD_PAIRS.items()]
    return table(("compared", *lengths), *rows)


def settings() -> str:
    """Names and defaults of the group's settings, for the schema's own page."""
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Plan of gb10.cluster", **_schema.PLAN}, indent=1)
        + "\n"
    )


SECTIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"proven": proven_where},
    "docs/on-real-sparks.md": {"measured": measured_claims, "by hand": claims_by_hand},
    "docs/overlay.md": {"levers": levers, "times": overlay_times, "forward": forward_differences},
    "docs/playbooks.md": {"playbooks": playbooks},
    "docs/licences.md": {"image": sbom.image_table, "controller": sbom.controller_table},
    **{f"roles/{role}/README.md": {"variables": functools.partial(variables, role)} for role in roles()},
}
"""What is made anew within pages, by page and name of the section."""
WHOLE: Mapping[str, Callable[[], str]] = {
    "docs/plan.schema.json": settings,
    "docs/acceptance.schema.json": lambda: (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **_acceptance.DOCUMENT}, indent=1) + "\n"
    ),
    "docs/architecture.svg": architecture.svg,
    "docs/sbom.cdx.json": sbom.text,
}
"""Files that are made as a whole."""


def with_section(text: str, name: str, content: str) -> str:
    """A page with one section made anew. Raises ValueError where its marks are not there."""
    begin, end = marks(name)
    if begin not in text or end not in text:
        raise ValueError(f"the marks of {name} are missing: {begin.strip()} and {end.strip()}")
    return f"{text.split(begin)[0]}{begin}{content}{end}{text.split(end, 1)[1]}"


def wanted() -> Iterator[tuple[Path, str]]:
    """Every file with what it should hold."""
    for name, sections in SECTIONS.items():
        text = (ROOT / name).read_text()
        for section, make in sections.items():
            text = with_section(text, section, make())
        yield ROOT / name, text
    for name, make in WHOLE.items():
        yield ROOT / name, make()


if __name__ == "__main__":
    for path, text in list(wanted()):
        path.write_text(text)
