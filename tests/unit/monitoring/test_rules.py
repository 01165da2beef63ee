# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each alert fires for its bad series and stays silent for the good one, as promtool runs them; what is written for a Prometheus is what it takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _roce
from gb10_node import exporter

from tests.prometheus import promtool, queries, selectors

ROOT = Path(__file__).resolve().parents[3]
RULES_FILE = ROOT / "roles/monitoring/files/rules.yml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]}

MEMBER = 'cluster="lab",member="t1"'
HEAD = f'{MEMBER},group="lab",rank="0"'
SERVING = f'gb10_rank_phase{{{HEAD},phase="serving"}}'
LEG = f'gb10_leg_info{{{MEMBER},device="enp1s0f0np0",hca="rocep1s0f0"}}'
CARRIER = f'gb10_port_carrier{{{MEMBER},device="enp1s0f0np0"}}'
ACTIVE = f'gb10_hca_active{{{MEMBER},hca="rocep1s0f0"}}'
RATE = f'gb10_hca_rate_bits_per_second{{{MEMBER},hca="rocep1s0f0"}}'
PCIE = f'gb10_hca_pcie_transfers_per_second{{{MEMBER},hca="rocep1s0f0"}}'
TABLE = f'gb10_hca_gid_table_crc32{{{MEMBER},hca="rocep1s0f0"}}'
AVAILABLE, FLOOR = f"gb10_memory_available_bytes{{{MEMBER}}}", f"gb10_guard_floor_bytes{{{HEAD}}}"
CANARY, CANARY_AT = f"gb10_canary_seconds{{{HEAD}}}", f"gb10_canary_at_seconds{{{HEAD}}}"
FREE, SIZE = (f'gb10_disk_{what}_bytes{{{MEMBER},path="/var/lib/gb10"}}' for what in ("free", "size"))
UP_GB10, UP_VLLM = (f'up{{{MEMBER},job="{job}"}}' for job in ("gb10", "vllm"))
KV = f'vllm:kv_cache_usage_perc{{{MEMBER},engine="0",model_name="m"}}'
ENDED, BREAKER = f"gb10_guard_ended_group_seconds{{{HEAD}}}", f"gb10_breaker_open{{{HEAD}}}"
MEASURED, MAX_AGE, PASSED = (f'gb10_gate_{what}{{{MEMBER},group="lab"}}' for what in ("measured_seconds", "max_age_seconds", "passed"))

GIB = 1 << 30
Series = dict[str, str]


def constant(value: float) -> str:
    """A series that stays: two hours of a sample a minute."""
    return f"{value:.17g}x130"


# Alert: series that are good, series that are bad, minutes from their begin to a look at which the bad ones have fired.
CASES: list[tuple[str, list[Series], list[Series], int]] = [
    ("Gb10MemberSilent", [{UP_GB10: constant(1)}, {UP_VLLM: constant(0)}], [{UP_GB10: "1x5 0x30"}], 10),
    (
        "Gb10EngineSilent",
        [{UP_VLLM: constant(1), SERVING: constant(1)}, {UP_VLLM: constant(0), SERVING: constant(0)}],
        [{UP_VLLM: "1x5 0x30", SERVING: constant(1)}],
        10,
    ),
    (
        "Gb10MemoryNearFloor",
        [{AVAILABLE: constant(3 * GIB), FLOOR: constant(1.5 * GIB)}, {AVAILABLE: constant(GIB)}],
        [{AVAILABLE: constant(2 * GIB), FLOOR: constant(1.5 * GIB)}],
        3,
    ),
    ("Gb10GuardEndedGroup", [{SERVING: constant(1)}], [{ENDED: constant(1.7e9)}], 1),
    (
        "Gb10GidTableChanged",
        [{TABLE: constant(4021), LEG: constant(1)}, {TABLE: "4021x5 4022x30"}, {TABLE: "4021x5 4022x60", LEG: constant(1)}],
        [{TABLE: "4021x20 4022x30", LEG: constant(1)}],
        30,
    ),
    (
        "Gb10LegDown",
        [{LEG: constant(1), CARRIER: constant(1), ACTIVE: constant(1)}, {CARRIER: constant(0), ACTIVE: constant(0)}],
        [
            {LEG: constant(1), CARRIER: constant(0), ACTIVE: constant(1)},
            {LEG: constant(1), ACTIVE: constant(1)},
            {LEG: constant(1), CARRIER: constant(1), ACTIVE: constant(0)},
        ],
        5,
    ),
    (
        "Gb10LegSlow",
        [
            {LEG: constant(1), RATE: constant(_roce.WIRE_GBPS * 1e9), PCIE: constant(_roce.PCIE_GTPS * _roce.PCIE_LANES * 1e9)},
            {LEG: constant(1)},
            {RATE: constant(1e11)},
        ],
        [
            {LEG: constant(1), RATE: constant(_roce.WIRE_GBPS * 1e9 - 1), PCIE: constant(1.28e11)},
            {LEG: constant(1), RATE: constant(2e11), PCIE: constant(_roce.PCIE_GTPS * _roce.PCIE_LANES * 1e9 - 1)},
        ],
        5,
    ),
    # The clock of these tests starts at 0.
    (
        "Gb10GateStale",
        [{MEASURED: constant(-604800 + 7200), MAX_AGE: constant(604800)}, {MEASURED: constant(-1e9)}, {PASSED: constant(1)}],
        [{MEASURED: constant(-604800), MAX_AGE: constant(604800)}],
        90,
    ),
    ("Gb10GateFailed", [{PASSED: constant(1)}], [{PASSED: constant(0)}], 1),
    (
        "Gb10CanaryLate",
        [
            {CANARY: constant(0.3), CANARY_AT: "0+60x130", SERVING: constant(1)},
            {CANARY: constant(40), CANARY_AT: constant(0), SERVING: constant(0)},
        ],
        [
            {CANARY: constant(40), CANARY_AT: "0+60x130", SERVING: constant(1)},
            {CANARY: constant(0.3), CANARY_AT: constant(0), SERVING: constant(1)},
        ],
        15,
    ),
    ("Gb10BreakerOpen", [{BREAKER: constant(0)}], [{BREAKER: "0x5 1x30"}], 10),
    ("Gb10KvCacheFull", [{KV: constant(0.9)}, {KV: "0.99x5 0.5x30"}], [{KV: constant(0.95)}], 15),
    (
        "Gb10DiskFilling",
        [{FREE: constant(11 * GIB), SIZE: constant(100 * GIB)}],
        [{FREE: constant(9 * GIB), SIZE: constant(100 * GIB)}],
        15,
    ),
]  # fmt: skip


def firing(alert: str, labels: str = "") -> str:
    """An expression for how many of an alert's instances fire."""
    return f'count(ALERTS{{alertname="{alert}",alertstate="firing"{labels}}}) or vector(0)'


def expect(series: Series, expression: str, values: dict[int, int]) -> dict[str, Any]:
    """One of promtool's tests: values of an expression by minute. Which labels it has is not asked for."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
            for minute, value in values.items()
        ],
    }


def run(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """promtool's verdict on them."""
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run([promtool(), "test", "rules", file], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(("alert", "good", "bad", "minutes"), CASES, ids=[case[0] for case in CASES])
def test_an_alert_fires_for_what_is_bad_alone(tmp_path: Path, alert: str, good: list[Series], bad: list[Series], minutes: int) -> None:
    # Silence is asked for at the end as well: nothing that waits long enough fires after all.
    tests = [expect(series, firing(alert), {minutes: 0, 90: 0}) for series in good]
    # A label that an expression loses would leave a hole in the sentence.
    named = set(re.findall(r"\$labels\.(\w+)", RULES[alert]["annotations"]["summary"]))
    labels = "".join(f',{name}=~".+"' for name in sorted(named))
    tests += [expect(series, firing(alert, labels), {minutes: 1}) for series in bad]
    done = run(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    tests = [expect({BREAKER: constant(opened)}, firing("Gb10BreakerOpen"), {5: 1 - opened}) for opened in (0, 1)]
    said = run(tmp_path, tests)
    assert said.returncode != 0 and (said.stdout + said.stderr).count("FAILED") == 1 and (said.stdout + said.stderr).count("got:") == 2


def test_every_alert_has_a_case_and_says_what_where_and_what_to_run() -> None:
    assert [case[0] for case in CASES] == list(RULES)
    for name, rule in RULES.items():
        summary = rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert "$labels." in summary and ": " in summary, name
        for playbook in re.findall(r"gb10\.cluster\.(\w+)", summary):
            assert (ROOT / f"playbooks/{playbook}.yml").exists(), f"{name}: {playbook}"


def test_every_query_is_one_and_asks_for_what_something_says(tmp_path: Path) -> None:
    asked = queries("lab")
    assert len(asked) > 40
    done = run(tmp_path, [{"promql_expr_test": [{"expr": expression, "eval_time": "1m"} for expression in asked.values()]}])
    assert done.returncode == 0, done.stdout + done.stderr
    own = {name for expression in asked.values() for name in selectors(expression) if not name.startswith("vllm:")} - {"up", "ALERTS"}
    assert own <= set(exporter.HELP)


def test_metrics_and_labels_are_found_in_an_expression() -> None:
    said = selectors('max by (a, b) (x:y{c="1",d=~"e|f"}[5m]) > 2e9 and on (g) (time() - z_1 > 3 unless rate(w{}[1m]) == 1)')
    assert said == {"x:y": {"c", "d"}, "z_1": set(), "w": set()}


def render(folder: Path, **variables: Any) -> Path:
    """What the role writes for the ring of three, by its own template and variables."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles/monitoring" / name / "main.yml") for name in ("defaults", "vars")],
        "tasks": [
            {
                "ansible.builtin.template": {"src": str(ROOT / "roles/monitoring/templates" / f"{name}.j2"), "dest": str(folder / name)},
                "vars": {"_monitoring_folder": str(folder), **variables},
            }
            for name in ("prometheus.yml", "gb10-prometheus.service")
        ],
    }
    (folder / "play.yml").write_text(json.dumps([play]))
    (folder / "rules.yml").write_bytes(RULES_FILE.read_bytes())
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", "inventories/ring3", folder / "play.yml"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "prometheus.yml"


def config_check(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), "check", "config", path], capture_output=True, text=True, check=False, timeout=60)


def test_the_generated_configuration_is_one_and_has_every_member(tmp_path: Path) -> None:
    path = render(tmp_path)
    done = config_check(path)
    assert done.returncode == 0 and f"{len(RULES)} rules found" in done.stdout, done.stdout + done.stderr
    jobs = {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}
    assert [entry["labels"]["member"] for entry in jobs["gb10"]["static_configs"]] == ["spark1", "spark2", "spark3"]
    assert all(target.endswith(":29620") for entry in jobs["gb10"]["static_configs"] for target in entry["targets"])
    assert len(jobs["vllm"]["static_configs"]) == 1 and "authorization" not in jobs["vllm"]


def test_a_key_goes_by_a_file_that_must_be_there(tmp_path: Path) -> None:
    key = tmp_path / "token"
    path = render(tmp_path, monitoring_credentials_file=str(key), monitoring_alertmanagers=["10.0.0.9:9093"], monitoring_interval_s=5)
    assert config_check(path).returncode != 0
    key.write_text("sesame-of-a-test")
    key.chmod(0o600)
    assert config_check(path).returncode == 0
    config = yaml.safe_load(path.read_text())
    assert config["scrape_configs"][1]["authorization"] == {"credentials_file": str(key)}
    assert config["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["10.0.0.9:9093"]}]
    assert "sesame" not in path.read_text() + (tmp_path / "gb10-prometheus.service").read_text()
