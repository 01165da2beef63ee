# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""JSON schemas (2020-12): a benchmark's document, `bench.json`, and a ladder's, `ladder.json`.

Units are in the names: tokens, seconds (`_s`), tokens per second, MiB.
"""

from __future__ import annotations

from . import _ladder
from ._bench import DECODE, MIXED, PREFILL, VERSION
from ._schema import BOOLEAN, TEXT, Schema, _integer, _list, _object

STRING: Schema = {"type": "string"}
SPEED: Schema = {"type": ["number", "null"], "exclusiveMinimum": 0}
SECONDS: Schema = {"type": "number", "minimum": 0}

REQUEST = _object(
    {"prompt_tokens": _integer(0), "completion_tokens": _integer(0), "first_s": SECONDS, "last_s": SECONDS, "wall_s": SECONDS},
    {"decode_tok_s": {"type": "number", "exclusiveMinimum": 0}},
)
REPETITION = _object({"requests": _list(REQUEST), "value": SPEED, "refused": STRING, "counts": BOOLEAN})
FLOOR = _object({"free_mib": _integer(0), "available_mib": _integer(0)})
STEP = _object(
    {
        "name": TEXT,
        "kind": {"enum": [PREFILL, DECODE, MIXED]},
        "tokens": _integer(1),
        "concurrency": _integer(1),
        "beside": _integer(0),
        "repetitions": _list(REPETITION),
        "median": SPEED,
        "least": SPEED,
        "most": SPEED,
        "steady": BOOLEAN,
        "refused": STRING,
        "memory_floor": {"type": "object", "additionalProperties": FLOOR},
        "client_cpu_share": {"type": "number", "minimum": 0},
    }
)
PROVENANCE = _object(
    {
        "image": STRING,
        "arguments": _list(STRING),
        "environment": {"type": "object", "additionalProperties": STRING},
        "checkpoint": STRING,
        "kernel": STRING,
        "driver": STRING,
        "nccl": _list(STRING),
    }
)
DOCUMENT = _object(
    {
        "version": {"const": VERSION},
        "utc": TEXT,
        "group": TEXT,
        "model": TEXT,
        "gate": TEXT,
        "gpu": TEXT,
        "settings": _object({"profile": TEXT, "topology": TEXT, "members": _list(TEXT)}),
        "provenance": {"type": "object", "additionalProperties": PROVENANCE},
        "steps": _list(STEP),
    }
)
SETTINGS_CHANGE: Schema = {"type": "object", "propertyNames": {"pattern": "^cluster_"}}
TRY = _object(
    {
        "name": TEXT,
        "on": TEXT,
        "settings": SETTINGS_CHANGE,
        "verdict": {"enum": [_ladder.FIRST, _ladder.BETTER, _ladder.SAME, _ladder.WORSE, _ladder.UNMEASURED, _ladder.FAILED]},
        "why": STRING,
        "digest": STRING,
        "differences": _list(STRING),
        "steps": _list(STEP),
        "provenance": DOCUMENT["properties"]["provenance"],
    }
)
LADDER = _object(
    {
        "version": {"const": _ladder.VERSION},
        "utc": TEXT,
        "group": TEXT,
        "model": TEXT,
        "digest": TEXT,
        "case": _list({"type": "object"}, minItems=1),
        "rungs": _list(_object({"name": TEXT, "settings": SETTINGS_CHANGE}), minItems=1),
        "tries": _list(TRY),
        "done": BOOLEAN,
    }
)
