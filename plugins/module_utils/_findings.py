# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a judgement of the core says of a host, a log or a series: sentences that can be told apart by a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REFUSE, WARN = "refuse", "warn"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `sentence`: what, where, and what to do; `evidence`: the line or value that says so, if any.

    `severity` is REFUSE where the cause is known to break a group, WARN where it is only known to cost or is a mere suspect.
    """

    severity: str
    code: str
    sentence: str
    evidence: str = ""


def refused(findings: Iterable[Finding]) -> list[Finding]:
    """Those that a caller must not go on with."""
    return [finding for finding in findings if finding.severity == REFUSE]
