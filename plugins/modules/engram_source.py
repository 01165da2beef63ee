#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A directory with the Engram tables and nothing else, without a copy of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_source
short_description: Make a directory of the Engram tables alone, by links to the release's files
version_added: 0.1.0
description:
  - An engine that reads the tables of DeepSeek V4.1 from a directory wants only them there. A loader that found the release's whole index would look
    for its other shards, and the tables' own shards hold other tensors that must not be loaded twice.
  - Makes a directory with hard links to the shards that hold the tables, or with clones of them where the filesystem shares blocks, with an index of
    just these tensors, and with the release's config.json. It takes no room of its own, and is refused where it would.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes, gb10.cluster._attributes.STATEFUL]
options:
  source:
    description: The directory with config.json and the safetensors files that hold the tables. There may be others. Needed for O(state=present).
    type: path
  path:
    description: The directory to make, on the same filesystem.
    type: path
    required: true
  state:
    description: V(absent) removes what this module makes there. The release's files stay.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gb10.cluster.engram_pack
"""

EXAMPLES = r"""
- name: Only what serves
  gb10.cluster.engram_source:
    source: /var/lib/gb10/models/deepseek-v4.1-flash
    path: /var/lib/gb10/models/deepseek-v4.1-flash-engram
"""

RETURN = r"""
files:
  description: Names of the files that were made or replaced, or would be in check mode.
  returned: success
  type: list
  elements: str
"""

import errno
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _checkpoint, _engram, _host, _safetensors
from ..module_utils._engram import EngramError
from ..module_utils._survey import tensor_headers

FICLONE = 0x40049409
"""The ioctl that makes a file of another's blocks (linux/fs.h)."""
CONFIG = "config.json"


def texts_and_shards(source: Path) -> tuple[dict[str, bytes], list[str]]:
    """What the directory holds: small files by name, and the names of the shards to link. Raises EngramError."""
    config = _host.read_bytes(source / CONFIG)
    try:
        layouts = _engram.layouts(json.loads(config or b""))
    except ValueError as error:
        raise (
            error if isinstance(error, EngramError) else EngramError(f"{source} has no readable config.json: fetch the release's")
        ) from None
    headers, broken = tensor_headers(source, [path.name for path in source.glob(f"*{_safetensors.SUFFIX}")])
    if broken:
        raise EngramError(_checkpoint.verdict(str(source), broken))
    tables = _engram.tables(headers, layouts)
    index = {name: table.file for table in tables for name in _engram.tensor_names(table.layout.layer)}
    content = {
        "metadata": {"total_size": sum(table.weight.size + table.scale.size for table in tables), _safetensors.SUBSET_KEY: "engram"},
        "weight_map": index,
    }
    return {CONFIG: config or b"", _safetensors.INDEX: (json.dumps(content, indent=1) + "\n").encode()}, sorted(set(index.values()))


def is_same(path: Path, source: Path) -> bool:
    """Whether a file is the source's, by link or as a clone that carries its time."""
    try:
        here, there = path.lstat(), source.stat()
    except FileNotFoundError:
        return False
    return here.st_ino == there.st_ino or (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)


def share(source: Path, path: Path) -> None:
    """Put a file's blocks at another place, whole or not at all. Raises EngramError where only a copy could."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            with source.open("rb") as blocks, temporary.open("xb") as clone:
                fcntl.ioctl(clone, FICLONE, blocks.fileno())
            status = source.stat()
            os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
            raise
        raise EngramError(
            f"{path} and {source} cannot share their blocks, and a copy would take {_checkpoint.size_text(source.stat().st_size)}: "
            "choose a path on the filesystem of the source"
        ) from None


def main() -> None:
    """Compare, and where it is no check, act."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path"},
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("source",))],
        supports_check_mode=True,
    )
    directory, source = Path(module.params["path"]), Path(module.params["source"] or "/")
    removed: list[Path] = []
    texts: dict[str, bytes] = {}
    shards: list[str] = []
    try:
        if module.params["state"] == "present":
            if directory.resolve() == source.resolve():
                raise EngramError(f"{source} would lose its own index: choose another path for the tables alone")
            texts, shards = texts_and_shards(source)
        elif _safetensors.SUBSET_KEY in (_host.read(directory / _safetensors.INDEX) or ""):
            removed = sorted(directory.iterdir())
        links = [name for name in shards if not is_same(directory / name, source / name)]
        writes = [name for name, content in texts.items() if _host.read_bytes(directory / name) != content]
        if not module.check_mode:
            if links:
                directory.mkdir(parents=True, exist_ok=True)
            for name in links:
                share(source / name, directory / name)
            for name in writes:
                _host.write(directory / name, texts[name])
            for path in removed:
                path.unlink()
            if removed:
                directory.rmdir()
    except EngramError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{directory} cannot be made ({error.strerror}): correct the path or its rights")
    made = [*links, *writes]
    module.exit_json(
        changed=bool(made or removed),
        files=made,
        diff={
            "before_header": str(directory),
            "after_header": str(directory),
            "before": "".join(f"{path.name}\n" for path in removed),
            "after": "".join(f"{name}\n" for name in made),
        },
    )


if __name__ == "__main__":
    main()
