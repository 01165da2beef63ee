# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One directory of the head, read by members over NFS: what is exported to whom, and how it is mounted.

For members whose disks cannot hold a copy. What others export on the head stays as it is: the export is a file of its own
below /etc/exports.d, made live by name, and the server is never told to read everything again.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

MOUNT_OPTIONS = "nfsvers=4.2,ro,nconnect=8,rsize=1048576,wsize=1048576,hard,timeo=600,nosuid,nodev,noexec"
"""As the two-Spark kit mounts weights (MiaAI-Lab's NFS_OPTS_CLIENT); `hard`: a read waits for a head that reboots, instead of failing a rank."""
MOUNT_TIMEOUT_S = 120
"""At a boot, for a head that boots as well; logins do not wait (`nofail`). Not longer: without its server an unmount hangs, and a shutdown with it."""
TRIAL_OPTIONS = "soft,timeo=50,retrans=1,retry=0"
"""For one try with an answer, by systems that would else wait for the head."""
NOT_EXPORTABLE = {
    "overlay": "an overlay",
    "nfs": "itself an NFS mount",
    "nfs4": "itself an NFS mount",
    "fuse.sshfs": "itself a network mount",
}
"""Kinds of file systems that the kernel's server cannot export, or only as a copy of a copy."""
_NAMESPACE = uuid.UUID("7d1d6f0e-6f43-5f0b-9a9c-0d5a3f6b2c10")


@dataclass(frozen=True)
class Export:
    """A live export: path, client, and options as the server spells them."""

    path: str
    client: str
    options: frozenset[str]


def fsid(path: str) -> str:
    """The file system's identity for clients: the same after each boot and on whichever disk, or their mounts go stale."""
    return str(uuid.uuid5(_NAMESPACE, path))


def export_options(path: str) -> str:
    """Read-only, for unprivileged readers: a checkpoint's files can be read by everybody, and root of a member is nobody here."""
    return f"ro,sync,no_subtree_check,root_squash,fsid={fsid(path)}"


def exports_path(name: str) -> str:
    """The file with this export alone."""
    return f"/etc/exports.d/gb10-{name}.exports"


def exports_text(path: str, clients: Sequence[str]) -> str:
    """What the server reads at a boot."""
    allowed = " ".join(f"{client}({export_options(path)})" for client in sorted(clients))
    return f'# Written by gb10.cluster.\n"{path}" {allowed}\n'


def clients_of(text: str) -> list[str]:
    """The clients that such a file names."""
    return re.findall(r"(\S+)\(", "".join(line for line in text.splitlines(True) if not line.startswith("#")))


def parse_exports(text: str) -> list[Export]:
    """The output of `exportfs -s`, one client per line."""
    found = []
    for line in text.splitlines():
        if match := re.fullmatch(r'"?(/[^"]*?)"?\s+(\S+)\((.*)\)\s*', line):
            found.append(Export(match[1], match[2], frozenset(match[3].split(","))))
    return found


def is_live(export: Export, path: str, client: str) -> bool:
    """Whether a client gets the directory as it should: read-only, root squashed, by our identity."""
    return (export.path, export.client) == (path, client) and {"ro", "root_squash", f"fsid={fsid(path)}"} <= export.options


def refusal(path: str, clients: Sequence[str], filesystem: str) -> str:
    """Why a directory is not exported; empty if it may be."""
    if not clients:
        return f"nobody is named that may mount {path}, and NFS would give it to everybody: name the members' addresses on the legs"
    if any(not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", client) for client in clients):
        return f"{path} is exported to single addresses only: name the members' addresses on the legs, not {', '.join(clients)}"
    if filesystem in NOT_EXPORTABLE:
        return f"{path} is {NOT_EXPORTABLE[filesystem]} and cannot be exported by NFS: put it on a disk's own file system, or use rsync"
    return ""


def filesystem_of(path: str, mountinfo: str) -> str:
    """Kind of the file system that a path is on, from /proc/self/mountinfo; the last of equal mount points is on top."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _dash, right = line.partition(" - ")
        point = _unescaped(left.split()[4])
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, right.split()[0]
    return kind


@dataclass(frozen=True)
class Mount:
    """What is mounted at a path: its kind, its source, and the options of mount and file system together."""

    kind: str
    source: str
    options: frozenset[str]


def mount_at(path: str, mountinfo: str) -> Mount | None:
    """The uppermost mount at exactly this path, from /proc/self/mountinfo; None where it is none."""
    found = None
    for line in mountinfo.splitlines():
        left, _dash, right = line.partition(" - ")
        fields, (kind, source, options) = left.split(), right.split(" ")  # a source may be empty
        if _unescaped(fields[4]) == path:
            found = Mount(kind, _unescaped(source), frozenset(f"{fields[5]},{options}".split(",")))
    return found


def is_as_wanted(mount: Mount | None, server: str, source: str) -> bool:
    """Whether the head's directory is mounted, and read-only by NFS 4.2."""
    return mount is not None and mount.source == f"{server}:{source}" and {"ro", "vers=4.2"} <= mount.options


def trial_argv(server: str, source: str, directory: str) -> list[str]:
    """Mounts it where nobody sees it, and lets go of it at once: what the server says is known before anything changes here."""
    options = f"{MOUNT_OPTIONS},{TRIAL_OPTIONS}"
    return ["unshare", "--mount", "mount", "-t", "nfs4", "-o", options, f"{server}:{source}", directory]


def trial_refusal(server: str, source: str, words: str) -> str:
    """One sentence about a mount that failed, from what mount.nfs4 says."""
    if re.search(r"not supported", words):
        return (
            f"the NFS server at {server} does not speak version 4.2 ({words}): allow it there (vers4.2 in /etc/nfs.conf), or copy by rsync"
        )
    if re.search(r"No such file|denied|not permitted", words):
        return f"{server} does not export {source} to this member ({words}): run site.yml --tags storage with the head in it"
    if re.search(r"refused|timed out|No route|unreachable|is down", words):
        return f"no NFS server answers at {server} ({words}): check nfs-server there, and the leg (site.yml --tags fabric)"
    return f"{server}:{source} cannot be mounted ({words}): look at the kernel's log on this member and on the head"


def mount_unit(name: str, server: str, source: str, path: str) -> str:
    """The unit that mounts it at each boot."""
    return (
        f"[Unit]\nDescription=Checkpoint {name} from {server}\nAfter=network-online.target\nWants=network-online.target\n\n"
        f"[Mount]\nWhat={server}:{source}\nWhere={path}\nType=nfs4\nOptions={MOUNT_OPTIONS},nofail\n"
        f"TimeoutSec={MOUNT_TIMEOUT_S}\n\n"
        "[Install]\nWantedBy=remote-fs.target\n"
    )


def _unescaped(field: str) -> str:
    """mountinfo writes blanks as octal numbers."""
    return field.encode().decode("unicode_escape")
