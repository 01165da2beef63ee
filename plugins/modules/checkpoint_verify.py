#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint's manifest against what lies on the disk."""

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_verify
short_description: Compare a checkpoint's files with its manifest, by size and SHA-256
version_added: 0.1.0
description:
  - Tells apart what is missing, short, corrupt and extra below a directory. Extra files with a leading dot in their path are let be.
  - Reads the header of every safetensors file and holds them against C(model.safetensors.index.json) where there is one. Every tensor must be
    there once, with its bytes inside its file. A page of HTML, a Git LFS pointer and a file of another length are told by name.
  - A file that a preparation edits, as M(gb10.cluster.virtual_heads) does, is right when the original that is kept beside it
    (C(config.json.orig-hf)) is.
  - Changes nothing but its own memory, one stamp file in C(/var/lib/gb10/stamps) that holds each file's hash with its size, inode and times. A
    file whose stamp fits is not read again, so that a repeat takes a moment; a written file is.
  - A byte that turned on the disk without a write leaves size and times as they were. Only O(deep=true) finds it.
  - Links count as corrupt. A container to which the directory is mounted could not follow them.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Does the same, but leaves the stamp file as it is.
  diff_mode:
    support: N/A
    details:
      - There is nothing to show; stamps are not a setting.
  idempotent: {support: full}
options:
  path:
    description: The checkpoint's directory. It need not exist.
    type: path
    required: true
  manifest:
    description:
      - The files as they should be, C({"version":1,"files":[{"path","size","sha256"}]}), with paths relative to O(path).
      - Where nobody published them, C(size) and C(sha256) may be null, and C("complete":false) says that there may be other files. What is
        known must hold, the rest is learned; RV(manifest) is then the whole one, to be kept and used from then on.
      - Left out, the files that are there are hashed and returned as RV(manifest).
    type: dict
  subset:
    description:
      - The manifest names a chosen part of a checkpoint, so that the index may name files that are not wanted here.
    type: bool
    default: false
  deep:
    description: Read every file, whatever the stamps say.
    type: bool
    default: false
  jobs:
    description: Files to hash at a time. The default is the number of processors, at most 8.
    type: int
  allow_extra:
    description: Take no notice of files that are no part of the checkpoint.
    type: bool
    default: false
  must_match:
    description: Fail, with the first problem, where anything differs.
    type: bool
    default: false
  must_fit:
    description: Fail where the disk has no room for what must be copied.
    type: bool
    default: false
seealso:
  - module: gb10.cluster.weights_replica
"""

EXAMPLES = r"""
- name: Read the whole checkpoint once
  gb10.cluster.checkpoint_verify:
    path: /var/lib/gb10/models/smollm2-135m-instruct
    manifest: "{{ lookup('ansible.builtin.file', 'smollm2-135m-instruct.manifest.json') | from_json }}"
    deep: true
    must_match: true

- name: Make the manifest of a checkpoint that is known to be good
  gb10.cluster.checkpoint_verify:
    path: /var/lib/gb10/models/smollm2-135m-instruct
  register: good
"""

RETURN = r"""
ok:
  description: Whether the directory holds the checkpoint.
  returned: success
  type: bool
directory:
  description: The directory.
  returned: success
  type: str
verdict:
  description: The first problem, how many more there are, and the cure, in one sentence; empty when there is none.
  returned: success
  type: str
problems:
  description: All problems, one sentence each.
  returned: success
  type: list
  elements: str
missing:
  description: Paths of files that are not there.
  returned: success
  type: list
  elements: str
short:
  description: Paths of files whose copy has not ended.
  returned: success
  type: list
  elements: str
corrupt:
  description: Paths of files with other content, and of those that cannot be read.
  returned: success
  type: list
  elements: str
extra:
  description: Paths of files that are no part of the checkpoint.
  returned: success
  type: list
  elements: str
copy_bytes:
  description: Size of the files that must be copied here.
  returned: success
  type: int
free_bytes:
  description: Free space of the disk.
  returned: success
  type: int
hashed:
  description: How many files were read; the others' stamps fitted.
  returned: success
  type: int
tensors:
  description: How many tensors the safetensors files hold.
  returned: success
  type: int
quantization:
  description: What an EXL3 checkpoint says of its own bits per weight; empty for others.
  returned: success
  type: dict
manifest:
  description: The manifest with every size and hash.
  returned: when O(manifest) is left out, or has gaps and RV(ok) is true
  type: dict
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _host, _quantization, _safetensors
from ..module_utils._checkpoint import File, Found, Problem
from ..module_utils._survey import STAMPS, survey, tensor_headers


def structure(directory: Path, sound: set[str], subset: bool) -> tuple[list[Problem], int, dict[str, object]]:
    """What the headers of the `sound` files say against the index and the quantization settings; how many tensors; the settings."""
    files = [path for path in sound if path.endswith(_safetensors.SUFFIX)]
    headers, problems = tensor_headers(directory, files)
    if _safetensors.INDEX in sound:
        try:
            index, complete = _safetensors.parse_index(_host.read(directory / _safetensors.INDEX) or "")
            if subset:
                index = {name: file for name, file in index.items() if file in files}
            problems += _safetensors.index_problems(index, complete, headers, [problem.path for problem in problems])
        except _safetensors.FormatError as error:
            problems.append(Problem("corrupt", _safetensors.INDEX, str(error)))
    texts = {}
    for name in (_quantization.CONFIG, _quantization.SEPARATE):
        try:
            texts[name] = json.loads(_host.read(directory / name) or "{}") if name in sound else {}
        except ValueError as error:
            return [*problems, Problem("corrupt", name, f"is no JSON ({error})")], sum(map(len, headers.values())), {}
    settings, contradictions = _quantization.read(texts[_quantization.CONFIG], texts[_quantization.SEPARATE])
    where = _quantization.SEPARATE if texts[_quantization.SEPARATE] else _quantization.CONFIG
    if settings:
        names = {name for tensors in headers.values() for name in tensors}
        contradictions += filter(None, [_quantization.head_problem(settings, names)])
    problems += [Problem("corrupt", where, sentence) for sentence in contradictions]
    return problems, sum(map(len, headers.values())), settings.as_dict() if settings else {}


def compare(given: dict[str, object] | None, found: dict[str, Found], allow_extra: bool) -> tuple[tuple[File, ...], list[Problem], bool]:
    """The wanted files, what differs, and whether the manifest had gaps that are now filled. Raises ManifestError."""
    if given is None:
        return _checkpoint.as_found(found), _checkpoint.compare(_checkpoint.as_found(found), found), True
    known = _checkpoint.parse_known(given)
    if _checkpoint.has_gaps(known):
        return *_checkpoint.learn(known, found), True
    files = _checkpoint.parse_manifest(given)
    return files, _checkpoint.compare(files, found, allow_extra=allow_extra), False


def sizes_of(given: dict[str, object] | None) -> dict[str, int] | None:
    """What to hash: files that have the size of a whole manifest, or all. Raises ManifestError."""
    if given is None or _checkpoint.has_gaps(_checkpoint.parse_known(given)):
        return None
    return {file.path: file.size for file in _checkpoint.parse_manifest(given)}


def main() -> None:
    """Survey and compare."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "manifest": {"type": "dict"},
            "subset": {"type": "bool", "default": False},
            "deep": {"type": "bool", "default": False},
            "jobs": {"type": "int"},
            "allow_extra": {"type": "bool", "default": False},
            "must_match": {"type": "bool", "default": False},
            "must_fit": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path, given = module.params["path"], module.params["manifest"]
    directory = Path(path)
    try:
        sizes = sizes_of(given)
        stamps = None if module.check_mode else STAMPS
        seen = survey(directory, sizes, module.params["deep"], module.params["jobs"], stamps)
        files, problems, learned = compare(given, seen.found, module.params["allow_extra"])
    except _checkpoint.ManifestError as error:
        module.fail_json(msg=str(error))
    sound = {file.path for file in files if file.path in seen.found} - {problem.path for problem in problems}
    broken, tensors, quantization = structure(directory, sound, module.params["subset"])
    problems = sorted([*problems, *broken], key=lambda problem: problem.path)
    wanted = _checkpoint.to_copy(files, problems)
    result = {
        **_checkpoint.report(problems),
        "directory": path,
        "verdict": _checkpoint.verdict(path, problems),
        "copy_bytes": sum(file.size for file in wanted),
        "free_bytes": seen.free,
        "hashed": seen.hashed,
        "tensors": tensors,
        "quantization": quantization,
        **({"manifest": _checkpoint.manifest_of(files)} if learned and (given is None or not problems) else {}),
    }
    if module.params["must_match"] and problems:
        module.fail_json(msg=result["verdict"])
    shortage = _checkpoint.shortage(path, _checkpoint.growth(wanted, seen.found), seen.free)
    if module.params["must_fit"] and shortage:
        module.fail_json(msg=shortage)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
