# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A group that is suspended and resumed, containers that earlier lives left, a followed log, a lock that its owner has forgotten."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import UNIT, all_serve
from extensions.molecule.tests.lab_hosts import begin, wait_for
from tests.certificates import pair

pytestmark = pytest.mark.service

# What a crash of podman leaves: its database has forgotten the container, its storage has not.
FORGET = """python3 -c "
import sqlite3
database = sqlite3.connect('/var/lib/containers/storage/db.sql')
for table in ('ContainerState', 'ContainerConfig', 'IDNamespace'):
    database.execute(f'DELETE FROM {table}')
database.commit()" """


def said(host: Host, command: str) -> str:
    """What a command prints; nothing where the host is not there yet."""
    try:
        return str(host.run(command).stdout.strip())
    except RuntimeError:  # ssh itself failed
        return ""


def test_a_suspended_group_is_not_started_by_a_boot(playbook: Any, hosts: dict[str, Host]) -> None:
    done = playbook("suspend")
    assert done.returncode == 0, done.stdout
    assert {host.run("systemctl is-enabled gb10@lab.target").stdout.strip() for host in hosts.values()} == {"disabled"}
    boot = hosts["t2"].check_output("cat /proc/sys/kernel/random/boot_id; systemctl show --property=UserspaceTimestampMonotonic")
    hosts["t2"].check_output("systemd-run --quiet --on-active=1 systemctl reboot")
    again = "cat /proc/sys/kernel/random/boot_id; systemctl show --property=UserspaceTimestampMonotonic"
    wait_for(lambda: said(hosts["t2"], again) not in ("", boot), 120)
    wait_for(lambda: said(hosts["t2"], "systemctl is-system-running") in ("running", "degraded"), 120)
    assert not hosts["t2"].service(UNIT).is_running
    assert "a boot does not start the group here -> ansible-playbook gb10.cluster.resume" in " ".join(playbook("status").stdout.split())


def test_it_is_resumed_over_containers_that_earlier_lives_left(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    """One that was created, one that only the storage knows, and one that runs on though podman has forgotten it."""
    image = plan["image"]["reference"]
    hosts["t1"].check_output(f"podman create --name gb10-lab --entrypoint true {image}")
    hosts["t2"].check_output(f"podman create --name gb10-lab --entrypoint true {image} && {FORGET}")
    assert hosts["t2"].check_output("podman ps --all --quiet") == "" != hosts["t2"].check_output("podman ps --all --external --quiet")
    hosts["t3"].check_output(f"podman run --detach --name gb10-lab --entrypoint sleep {image} 4711 && {FORGET}")
    assert hosts["t3"].check_output("pgrep --full --exact 'sleep 4711'")
    done = playbook("resume")
    assert done.returncode == 0, done.stdout
    assert all_serve(hosts)
    assert hosts["t3"].run("pgrep --full --exact 'sleep 4711'").rc == 1, "it would hold the memory that the rank needs"
    assert {host.check_output("systemctl is-enabled gb10@lab.target") for host in hosts.values()} == {"enabled"}


def test_a_load_tells_its_memory_and_warms_up(hosts: dict[str, Host]) -> None:
    since = f"journalctl --unit {UNIT} --identifier gb10-rank --output cat --no-pager --boot"
    log = hosts["t1"].check_output(since)
    life = log[log.rindex("gb10: loading: the model") : log.rindex("gb10: serving")]
    assert "gb10: MemFree " in life and "MemAvailable" in life
    assert "tokens, to warm up" in life


def test_a_followed_log_shows_what_comes(playbook: Any, hosts: dict[str, Host]) -> None:
    with begin("logs", "-e", "follow=25", "-e", "rank=head", "-e", "lines=1") as following:
        time.sleep(12)
        hosts["t1"].run("curl -s http://127.0.0.1:8000/v1/models?mark=sesame")
        said = following.communicate(timeout=300)[0]
    assert following.returncode == 0, said
    assert any(line.startswith("t1: ") and "mark=sesame" in line for line in said.splitlines()), said
    assert "t2: " not in said


def test_a_lock_is_taken_over_by_its_age(playbook: Any, hosts: dict[str, Host]) -> None:
    path = "/run/gb10/locks/lab.json"

    def hold(seconds: float) -> None:
        now = float(hosts["t1"].check_output("date +%s"))
        owner = {"who": "ann@elsewhere", "boot": "another", "pid": 1, "what": "site"}
        record = json.dumps({"owner": owner, "since": now - seconds, "seen": now - seconds})
        hosts["t1"].check_output(f"echo '{record}' > {path}")

    hold(600)
    done = playbook("start")
    assert done.returncode != 0 and "ann@elsewhere has been running site on this cluster for 10 min" in " ".join(done.stdout.split())
    hold(3700)
    done = playbook("start")
    flat = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0 and "took over from ann@elsewhere, whose site began 62 min ago: it has not been heard of for" in flat, flat
    assert hosts["t1"].check_output(f"cat {path}") == "" and all_serve(hosts)


def test_the_endpoint_speaks_https_and_no_longer(playbook: Any, hosts: dict[str, Host], tmp_path: Path) -> None:
    files = [tmp_path / "chain.pem", tmp_path / "key.pem"]
    for file, text in zip(files, pair(9), strict=True):
        file.write_text(text)
    tls = ("-e", '{"cluster_tls": true, "cluster_allow_disruption": true}')
    done = playbook(
        "site", "--tags", "service", "--diff", *tls, "-e", f"service_tls_certificate={files[0]}", "-e", f"service_tls_key={files[1]}"
    )
    assert done.returncode == 0 and "https://10.99.0.11:8000/v1" in done.stdout, done.stdout
    assert "BEGIN PRIVATE KEY" not in done.stdout
    assert hosts["t1"].check_output("curl -sk -o /dev/null -w '%{http_code}' https://127.0.0.1:8000/health") == "200"
    assert hosts["t1"].check_output("stat -c %a /etc/gb10/lab/tls/key.pem") == "600"
    assert not hosts["t2"].file("/etc/gb10/lab/tls").exists
    done = playbook("verify", "-e", "verify_only=health,models,key", *tls)
    assert done.returncode == 0, done.stdout
    again = playbook("site", "--tags", "service", *tls)
    assert again.returncode == 0 and "changed=0" in again.stdout and "changed=1" not in again.stdout, again.stdout
    done = playbook("site", "--tags", "service", "--diff", "-e", '{"cluster_allow_disruption": true}')
    assert done.returncode == 0 and "http://10.99.0.11:8000/v1" in done.stdout and "BEGIN PRIVATE KEY" not in done.stdout, done.stdout
    assert hosts["t1"].run("curl -s http://127.0.0.1:8000/health").rc == 0 and not hosts["t1"].file("/etc/gb10/lab/tls/key.pem").exists
    for done in playbook("rollback"), playbook("site", "--tags", "service", *tls):
        assert done.returncode != 0 and "is planned with TLS and its head has no certificate: set service_tls_certificate" in done.stdout
        assert all_serve(hosts), "it looked before it stopped anything"
