# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ssh_config of a lab, read back by ssh itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.progress import LabError
from tests.lab.ssh import Keys, config, control_directory, known_hosts
from tests.lab.topology import standard

NAMESPACE = Path("/run/netns/gb10-lab-ctl")


def options_for(host: str, state: Path) -> dict[str, str]:
    """What ssh would do for that host, by its own `ssh -G`."""
    file = state / "ssh_config"
    file.write_text(config(state, standard(3), NAMESPACE))
    printed = subprocess.run(["ssh", "-G", "-F", str(file), host], check=True, capture_output=True, text=True, timeout=30).stdout
    return dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh on this machine")
    return tmp_path


@pytest.mark.parametrize("host", ["t1", "10.99.0.11"])
def test_every_way_to_a_host_goes_through_the_namespace(host: str, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lab.ssh._SOCKET_PATH_MAX", 4096)  # pytest's directories are long
    options = options_for(host, state)
    assert options["hostname"] == "10.99.0.11"
    assert options["proxycommand"].startswith(f"nsenter --net={NAMESPACE} -- ")
    assert options["controlpath"].startswith(f"{state}/cm/")
    assert options["userknownhostsfile"] == f"{state}/known_hosts"
    assert options["stricthostkeychecking"] == "true"
    assert options["identityfile"] == f"{state}/keys/client"
    assert options["user"] == "root"


@pytest.mark.parametrize("host", ["10.99.1.11", "10.98.0.11", "example"])
def test_other_hosts_are_not_touched(host: str, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lab.ssh._SOCKET_PATH_MAX", 4096)
    assert "proxycommand" not in options_for(host, state)


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    fits = Path("/" + "x" * (107 - 57 - len("//cm/")))
    assert len(str(control_directory(fits))) + 1 + 57 == 107
    with pytest.raises(LabError, match="1 characters too long"):
        control_directory(fits.with_name(fits.name + "x"))


def test_known_hosts_names_each_host_twice_and_drops_the_comment() -> None:
    topology = standard(2)
    keys = Keys("", {}, {host.name: f"ssh-ed25519 AAAA{host.name} lab {host.name}\n" for host in topology.hosts})
    assert known_hosts(topology, keys) == "t1,10.99.0.11 ssh-ed25519 AAAAt1\nt2,10.99.0.12 ssh-ed25519 AAAAt2\n"
