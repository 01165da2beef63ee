# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copies between members: a read-only rsync daemon on the source's legs, and the pull of named files from it.

A daemon needs no ssh keys between members and costs no encryption; who may read is decided by address.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from . import _host
from ._host import Result

PORT = 8730
"""Beside rsync's own 873, which an administrator's daemon may hold."""
LIFETIME_S = 24 * 3600
"""When a source ends by itself because nobody ended it: 460 GB from a hub take ten hours at 100 Mbit/s."""
CONFIG_FOLDER = Path("/run/gb10")
OFFERS = Path("/run/gb10/offers")
OFFER = "+offer"
"""Ends the name of the module with a source's offer; no source's own name can end so."""

GREETING_EVERY_S = 5.0
"""While a copy runs: between two looks whether its source still greets, and the longest that a greeting may take."""
DEATH_S = 30.0
"""Without a greeting: a cut cable, or a member that is frozen or off."""

_CONNECT_TIMEOUT_S = 10
_SILENCE_TIMEOUT_S = 120
"""A receiver is silent while it reads the old content of a file that differs."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LINK_STATUSES = {10: "socket", 12: "protocol", 30: "timeout", 35: "connect timeout", 124: "no greeting"}
_DISK_STATUS = 11


def is_name(name: str) -> bool:
    """Whether a source can be called so: it becomes an rsync module, a unit's name and a file's name."""
    return bool(_NAME.fullmatch(name))


def config_path(name: str) -> Path:
    """The daemons' configuration; one for all addresses of a source."""
    return CONFIG_FOLDER / f"weights-{name}.conf"


def config(name: str, directory: str, port: int, peers: Iterable[str], offers: Path) -> str:
    """The configuration of a daemon that serves one directory, and the folder with the offer of it, to these addresses. No name look-ups: legs have no DNS."""
    lines = [
        "# Written by gb10.cluster; it goes when the copies are made.",
        f"port = {port}",
        "use chroot = no",
        "reverse lookup = no",
        "forward lookup = no",
        f"[{name}]",
        f"path = {directory}",
        "read only = yes",
        "list = no",
        f"hosts allow = {' '.join(sorted(peers))}",
    ]
    offer = [f"[{name}{OFFER}]", f"path = {offers}", *lines[-3:]]
    return "\n".join(lines + offer) + "\n"


def offer_folder(name: str) -> Path:
    """Where a member says which files of a source it has; see `_relay`."""
    return OFFERS / name


def unit(name: str, address: str) -> str:
    """The unit of the daemon on one address. The @ sets the name apart: `units` of one source match no other's."""
    return f"gb10-weights-{name}@{address}.service"


def units(name: str) -> str:
    """The pattern of all units of a source."""
    return unit(name, "*")


def source_argv(name: str, address: str) -> list[str]:
    """Starts the daemon as a transient unit: a user of its own that can read every file and write none."""
    properties = {
        "RuntimeMaxSec": str(LIFETIME_S),
        "DynamicUser": "yes",
        "AmbientCapabilities": "CAP_DAC_READ_SEARCH",
        "CapabilityBoundingSet": "CAP_DAC_READ_SEARCH",
    }
    return [
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={unit(name, address)}",
        f"--description=Serves {name} to the other members",
        *(f"--property={key}={value}" for key, value in properties.items()),
        "rsync",
        "--daemon",
        "--no-detach",
        f"--config={config_path(name)}",
        f"--address={address}",
    ]


def url(name: str, address: str, port: int) -> str:
    """Where a source is reached."""
    return f"rsync://{address}:{port}/{name}/"


def pull_argv(source: str, list_file: str, directory: str, sparse: bool = False) -> list[str]:
    """Copies the files whose paths the list holds, each ended by a zero byte, whatever their sizes and times say.

    In place: a file that is not there goes whole, a copy that is cut goes on where it ended, and a file with one wrong byte
    is healed by its one block. So a file may have its name before it has its content; only its hash says that it is whole.
    With `sparse`, zeros become holes; rsync then writes by the KiB, so it is for files only that have holes at the source.
    """
    return [
        "rsync",
        "--inplace",
        *(["--sparse"] if sparse else []),
        "--ignore-times",
        "--times",
        "--perms",
        "--chmod=D755,F644",
        f"--contimeout={_CONNECT_TIMEOUT_S}",
        f"--timeout={_SILENCE_TIMEOUT_S}",
        "--from0",
        f"--files-from={list_file}",
        source,
        f"{directory}/",
    ]


def greets(source: str) -> bool:
    """Whether a source's daemon answers a new connection. A kernel whose daemon is frozen still accepts one."""
    where = urlsplit(source)
    with suppress(OSError), socket.create_connection((where.hostname, where.port), GREETING_EVERY_S) as connection:
        return bool(connection.recv(1))
    return False


def pull(source: str, list_file: str, directory: str, sparse: bool = False) -> Result:
    """Run the copy of `pull_argv` until its source has greeted nobody for DEATH_S.

    rsync's own time limit does not see a cut cable: its receiver counts the keep-alives that it writes as life, and the
    kernel takes them until TCP gives up, after 15 minutes (net.ipv4.tcp_retries2).
    """
    heard = time.monotonic()

    def fault() -> str:
        nonlocal heard
        if greets(source):
            heard = time.monotonic()
        silent = time.monotonic() - heard
        return f"nothing answers there for {silent:.0f} s" if silent > DEATH_S else ""

    return _host.run_while(pull_argv(source, list_file, directory, sparse), fault, GREETING_EVERY_S)


def list_content(paths: Sequence[str]) -> bytes:
    """Content of the list file of `pull_argv`."""
    return b"".join(path.encode() + b"\0" for path in paths)


def is_local(result: Result) -> bool:
    """Whether a pull ended for a reason of this member, which no other source cures."""
    return result.status in (_DISK_STATUS, 127)


def pull_failure(source: str, result: Result) -> str:
    """One sentence about a pull that ended early."""
    lines = [line for line in result.err.splitlines() if line.strip()]
    reason = lines[0].strip() if lines else f"exit status {result.status}"
    if result.status in _LINK_STATUSES:
        cure = "check the cable and the leg's address (site.yml --tags fabric)"
    elif result.status == _DISK_STATUS:
        cure = "make room on this member's disk"
    elif result.status == 127:
        cure = "install it (apt-get install rsync)"
    else:
        cure = "look at the source's directory"
    return f"copying from {source} stopped ({reason}): {cure} and run again, it goes on where it ended"
