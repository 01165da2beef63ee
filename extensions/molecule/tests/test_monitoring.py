# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The distribution's own Prometheus on the head of a serving group: what rules and dashboard ask for is there, and a fault is seen.

The hosts have no way to a package source, so the package comes from the machine; the role finds it installed and does the rest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from testinfra.host import Host

from extensions.molecule.tests.conftest import Playbook
from extensions.molecule.tests.lab_hosts import INVENTORY, ROOT, as_user, lab, wait_for
from tests.prometheus import prometheus, queries, selectors

pytestmark = pytest.mark.monitoring
URL = "http://127.0.0.1:9090"
OF_A_CARD = {"gb10_hca_pcie_transfers_per_second", "gb10_hca_counter_total"}
"""What only a ConnectX has; tests/unit/node/test_exporter.py reads them from a tree like its own."""
OF_A_FAILURE = {"gb10_guard_ended_group_seconds"}
"""Said from then on that it happened; the same tests have it."""
IDLE = {"panel Prompt tokens found in the prefix cache A", "panel Alerts A"}
"""Panels without a value while nobody asks anything of the group, or nothing is wrong."""
COPY = "src={source} dest=/root/prometheus.deb mode=0644"


def api(host: Host, path: str) -> Any:
    return json.loads(host.check_output(f"curl -gsf '{URL}/api/v1/{path}'"))["data"]


def ask(host: Host, expression: str) -> list[dict[str, Any]]:
    """The series that an expression gives now."""
    found: list[dict[str, Any]] = api(host, f"query?query={quote(expression, safe='')}")["result"]
    return found


INTERVAL = "monitoring_interval_s=3"
"""Also the time that a target has to answer: an engine of two cores takes more than a second when it has just been asked something."""


def monitoring(playbook: Playbook, *arguments: str) -> str:
    """The playbook, which must succeed; its output."""
    done = playbook("monitoring", "-e", INTERVAL, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def head(hosts: dict[str, Host], playbook: Playbook) -> Iterator[Host]:
    """The head with the package, installed as the role would have it; in the end without a trace of either."""
    host = hosts["t1"]
    (package,) = prometheus().glob("*.deb")
    command = [str(Path(sys.executable).with_name("ansible")), "-i", INVENTORY, "t1", "-m", "ansible.builtin.copy", "-a"]
    subprocess.run([*command, COPY.format(source=package)], cwd=ROOT, check=True, timeout=120, env=as_user(), capture_output=True)
    host.check_output("ln -s /dev/null /etc/systemd/system/prometheus.service")
    # What it depends on draws its own web pages.
    host.check_output("dpkg --force-depends -i /root/prometheus.deb && rm /root/prometheus.deb")
    yield host
    host.check_output("dpkg --purge prometheus && rm -f /etc/systemd/system/prometheus.service && systemctl daemon-reload")


@pytest.fixture(scope="module")
def running(head: Host, playbook: Playbook) -> Host:
    """The same, with the role's Prometheus."""
    said = monitoring(playbook)
    assert "4 of 4 targets answer" in said
    wait_for(lambda: ask(head, "gb10_canary_seconds"), 200)  # the first comes a minute and a half after the start
    return head


def test_check_mode_changes_nothing_on_a_host_without_it(head: Host, playbook: Playbook) -> None:
    monitoring(playbook, "--check", "--diff")
    assert head.run("ls /etc/prometheus/gb10").rc != 0 and head.run("systemctl cat gb10-prometheus").rc != 0


def test_every_metric_and_label_that_is_asked_for_is_said(running: Host) -> None:
    known = set(api(running, "label/__name__/values"))
    for where, expression in queries("lab").items():
        for metric, labels in selectors(expression).items():
            if metric in OF_A_CARD | OF_A_FAILURE | {"ALERTS"}:
                continue
            assert metric in known, f"{where}: nobody says {metric}"
            series = api(running, f"series?match[]={quote(metric, safe='')}")
            assert all(labels <= set(one) for one in series), f"{where}: {metric} lacks one of {sorted(labels)}"


def test_every_panel_shows_something(running: Host) -> None:
    def empty() -> list[str]:
        return [
            where
            for where, expression in queries("lab").items()
            if where.startswith("panel")
            and not OF_A_CARD & set(selectors(expression))
            and where not in IDLE
            and not ask(running, expression)
        ]

    wait_for(lambda: not empty(), 60)


def test_nothing_is_alerted_on_in_a_good_group_and_a_pulled_cable_is(running: Host, plan: dict[str, Any]) -> None:
    rules = {rule["name"]: rule for group in api(running, "rules")["groups"] for rule in group["rules"]}
    assert set(rules) == {where.removeprefix("rule ") for where in queries("lab") if where.startswith("rule")}
    assert all(rule["health"] == "ok" for rule in rules.values())
    assert ask(running, "ALERTS") == []
    leg = plan["members"]["t1"]["legs"][0]
    ends = {("t1", leg["netdev"]), (leg["peers"][0]["member"], leg["peers"][0]["netdev"])}
    down = queries("lab")["rule Gb10LegDown"]
    lab("cut", "t1", leg["netdev"])
    try:
        wait_for(lambda: {(one["metric"]["member"], one["metric"]["device"]) for one in ask(running, down)} == ends, 30)
    finally:
        lab("mend", "t1", leg["netdev"])
    wait_for(lambda: not ask(running, down), 30)


def test_a_second_run_changes_nothing(running: Host, playbook: Playbook) -> None:
    assert " changed=0 " in monitoring(playbook)
    assert " changed=0 " in monitoring(playbook, "--check", "--diff")


def test_a_change_reaches_it_without_a_restart(running: Host, playbook: Playbook) -> None:
    pid = running.check_output("systemctl show gb10-prometheus -P MainPID")
    said = monitoring(playbook, "-e", '{"monitoring_alertmanagers": ["127.0.0.1:9093"]}')
    assert " changed=2 " in said
    assert running.check_output("systemctl show gb10-prometheus -P MainPID") == pid
    wait_for(lambda: "127.0.0.1:9093" in api(running, "status/config")["yaml"], 20)
    monitoring(playbook)


def test_it_is_small_and_may_do_little(running: Host) -> None:
    assert running.check_output("systemctl show gb10-prometheus -P User") == "prometheus"
    assert "OK" in running.check_output("systemd-analyze security --no-pager gb10-prometheus.service").splitlines()[-1]
    assert "127.0.0.1:9090" in running.check_output("ss -Hltn")


def test_a_held_port_is_refused_with_who_holds_it(head: Host, running: Host, playbook: Playbook) -> None:
    # The lab's Prometheus holds 9090 as ours; another program would hold another port.
    head.check_output("systemctl stop gb10-prometheus && systemd-run --unit holder --collect python3 -m http.server -b 127.0.0.1 9090")
    try:
        wait_for(lambda: head.run("ss -Hltn sport = :9090").stdout, 20)
        done = playbook("monitoring")
        assert done.returncode != 0 and re.search(r"port 9090 of t1 is held by python3\S* \(pid \d+\)", " ".join(done.stdout.split()))
    finally:
        head.check_output("systemctl stop holder")


def test_site_takes_it_in_where_the_inventory_asks_for_it(running: Host, playbook: Playbook, tmp_path: Path) -> None:
    more = tmp_path / "hosts.yml"
    more.write_text(yaml.safe_dump({"monitoring": {"hosts": {"t1": None}}}))
    done = playbook("site", "--tags", "monitoring", "-i", str(more), "-e", INTERVAL)
    assert done.returncode == 0 and "4 of 4 targets answer" in " ".join(done.stdout.split()), done.stdout + done.stderr
    without = playbook("site", "--tags", "monitoring")
    assert without.returncode == 0 and "targets answer" not in without.stdout


def test_all_of_it_can_be_taken_back(running: Host, playbook: Playbook) -> None:
    monitoring(playbook, "-e", "monitoring_state=absent")
    assert " changed=0 " in monitoring(playbook, "-e", "monitoring_state=absent")
    for path in ("/etc/prometheus/gb10", "/var/lib/gb10-prometheus", "/etc/systemd/system/gb10-prometheus.service"):
        assert not running.file(path).exists, path
    assert running.run("systemctl is-active gb10-prometheus").stdout.strip() == "inactive"


def test_the_page_has_the_last_day_of_every_member(hosts: dict[str, Host], playbook: Playbook, tmp_path: Path) -> None:
    kept = "/var/lib/gb10/history/lab.json"
    # A record is of five minutes.
    wait_for(lambda: all(host.file(kept).exists for host in hosts.values()), 400)
    done = playbook("status", "-e", "output=html", "-e", f"status_file={tmp_path / 'status.html'}")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "status.html").read_text()
    assert "<title>lab: serving</title>" in page and "Nothing is to be done." in page
    assert page.count('aria-label="least MemFree') == 3 and page.count('aria-label="leg ') == 12
    assert page.count('aria-label="longest token') == page.count('aria-label="KV cache') == 1
    assert not hosts["t1"].file(kept).mode & 0o077
