# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of a member's network that undoes itself unless it is confirmed.

The way back lies on the member alone, armed before anything changes: a transient timer of systemd runs it when the time is over,
and a unit of the next boot runs it before the network starts. So it comes whatever happens to the module, to its connection, to the
controller or to the power. linux-system-roles/network issue 154: a roll-back inside of the module does not survive the module.

The state is a directory that is renamed whole: `pending` (armed), `undoing`, or none. Whoever renames `pending` decides: the confirmation
and the way back cannot both win.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import _host

STORE = Path("/var/lib/gb10/network")
UNIT = "gb10-network-rollback"
"""Of the transient timer and its service."""
BOOT_UNIT = Path(f"/etc/systemd/system/{UNIT}-boot.service")
BOOT_WANTED = Path(f"/etc/systemd/system/multi-user.target.wants/{UNIT}-boot.service")
UNDO_TIMEOUT_S = 120

BOOT_TEXT = f"""\
# Written by gb10.cluster (role fabric); there only until the change is confirmed.
[Unit]
Description=Network files from before a change that was not confirmed
DefaultDependencies=no
RequiresMountsFor=/etc/netplan {STORE}
Wants=network-pre.target
Before=network-pre.target systemd-networkd.service NetworkManager.service

[Service]
Type=oneshot
ExecStart=/bin/sh {STORE}/rollback generate

[Install]
WantedBy=multi-user.target
"""

# `undoing` stays until all is done, so that a way back that is cut short is gone again. Addresses are flushed since neither networkd
# nor NetworkManager takes them from a device that it no longer manages; what was live without a file comes back as it was.
SCRIPT = f"""\
#!/bin/sh
# Written by gb10.cluster (role fabric): puts back the network files that the last change replaced.
# Usage: rollback apply|generate (generate: at boot, before the network starts)
files() {{ cat created; tar -tf replaced.tar | sed 's|^|/|'; }}
cd {STORE} || exit 1
[ -d undoing ] || mv pending undoing 2>/dev/null || exit 0
cd undoing || exit 1
echo "the change of the network was not confirmed: putting the previous files back"
while read -r path; do rm -f "$path"; done <created
tar -C / -xpf replaced.tar || exit 1
# What a power cut in the middle of a write leaves beside a file.
files | while read -r path; do rm -f "${{path%/*}}/.${{path##*/}}."*; done
ip -4 -force -batch flush
netplan "$1"
ip -force -batch links
[ "$1" = generate ] || ip -force -batch addresses
# On the disk before that is gone which would bring them back: tar leaves them in memory, and a power cut would leave empty files.
files | while read -r path; do sync "${{path%/*}}"; [ ! -e "$path" ] || sync "$path"; done
rm -f {BOOT_WANTED} {BOOT_UNIT}
cd .. && rm -rf undoing
"""


def pending() -> str | None:
    """The change that waits for its confirmation, by its name; None where none does."""
    return _host.read(STORE / "pending" / "name")


def settle() -> None:
    """Let a way back that has begun come to its end, so that what follows sees one state; call it before the member is read."""
    if (STORE / "undoing").exists():
        deadline = time.monotonic() + UNDO_TIMEOUT_S
        while _active(f"{UNIT}.service") and time.monotonic() < deadline:
            time.sleep(0.2)
        undo()


def begin(paths: Iterable[str], flush: Sequence[str], links: Sequence[str], addresses: Sequence[str], seconds: int) -> str:
    """Keep the files of `paths` as they are now, arm the way back, and return the change's name.

    `flush`, `links` and `addresses` are lines for `ip -batch`. A change that is pending already is taken over: what it kept stays, so that
    the way back leads to what was confirmed last.
    """
    stop_timer()
    settle()
    name = pending()
    kept = _Kept(STORE / "pending") if name else _Kept(STORE / "new")
    if not name:
        shutil.rmtree(kept.directory, ignore_errors=True)
        name = f"{time.time_ns():x}"
        for file, lines in (("flush", flush), ("links", links), ("addresses", addresses), ("name", [name])):
            _host.write(kept.directory / file, "".join(f"{line}\n" for line in lines).encode(), 0o600)
    kept.keep(paths)
    _host.write(STORE / "rollback", SCRIPT.encode(), 0o700)
    _host.write(BOOT_UNIT, BOOT_TEXT.encode())
    BOOT_WANTED.parent.mkdir(parents=True, exist_ok=True)
    if not BOOT_WANTED.is_symlink():
        BOOT_WANTED.symlink_to(BOOT_UNIT)
    if kept.directory.name == "new":
        os.rename(kept.directory, STORE / "pending")
    # Directories too: after a power cut the way back must be there if the change is.
    _host.run(["sync", str(STORE), str(STORE / "pending"), str(BOOT_UNIT.parent), str(BOOT_WANTED.parent)])
    armed = _host.run(
        [
            "systemd-run", "--quiet", "--collect", f"--unit={UNIT}", f"--on-active={seconds}", "--timer-property=AccuracySec=1s",
            "--description=Previous network unless the change is confirmed", "/bin/sh", str(STORE / "rollback"), "apply",
        ]
    )  # fmt: skip
    if armed.status:
        confirm(name)
        raise OSError(f"systemd-run: {armed.message}")
    return name


def confirm(name: str) -> bool:
    """Disarm the way back; False when there is nothing to confirm, since it was gone or another change took its place."""
    if pending() != name:
        return False
    shutil.rmtree(STORE / "confirmed", ignore_errors=True)
    try:
        os.rename(STORE / "pending", STORE / "confirmed")
    except FileNotFoundError:
        return False
    _host.run(["sync", str(STORE)])  # or a power cut would bring `pending` back, and the next boot the old network
    stop_timer()
    BOOT_WANTED.unlink(missing_ok=True)
    BOOT_UNIT.unlink(missing_ok=True)
    shutil.rmtree(STORE / "confirmed")
    return True


def undo() -> None:
    """Go the way back now."""
    stop_timer()
    _host.run(["/bin/sh", str(STORE / "rollback"), "apply"], timeout=UNDO_TIMEOUT_S)


def stop_timer() -> None:
    """The time is over for nobody any more; a way back that has begun goes on."""
    _host.run(["systemctl", "stop", f"{UNIT}.timer"])


def _active(unit: str) -> bool:
    return _host.run(["systemctl", "is-active", unit]).out.strip() in ("active", "activating", "deactivating")


class _Kept:
    """The files of a change as they were: `replaced.tar` with their bytes, modes and owners, `created` with the paths that did not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, paths: Iterable[str]) -> None:
        """Add files; one that is kept already stays as it was kept."""
        archive, created = _host.read_bytes(self.directory / "replaced.tar"), (_host.read(self.directory / "created") or "").splitlines()
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as target:
            known = set(created)
            if archive:
                with tarfile.open(fileobj=io.BytesIO(archive)) as source:
                    for member in source.getmembers():
                        target.addfile(member, source.extractfile(member))
                        known.add(f"/{member.name}")
            for path in sorted(set(paths) - known):
                if os.path.exists(path):
                    target.add(path, arcname=path.lstrip("/"))
                else:
                    created.append(path)
        _host.write(self.directory / "replaced.tar", content.getvalue(), 0o600)
        _host.write(self.directory / "created", "".join(f"{path}\n" for path in created).encode(), 0o600)
