# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lookup and the filters inside a real ansible-playbook, on inventories whose hosts do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _schema
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]

SETTINGS = {
    "cluster_name": "lab",
    "cluster_profile": "lab-tiny",
    "cluster_topology": "ring",
    "cluster_devices": [],
    "cluster_gpu": False,
    "cluster_management_interface": "mgmt0",
    "cluster_checkpoint_source": "{{ somewhere }}/tiny",
    "cluster_image_archive": "/srv/image.tar",
    "somewhere": "/srv",
    # A play may keep the plan under this name; it must not be taken for a setting.
    "cluster_plan": "{{ lookup('gb10.cluster.plan') }}",
}
HOSTS = {f"t{rank}": {"ansible_host": f"198.51.100.{rank}"} for rank in (1, 2, 3)}


def play(
    folder: Path, tasks: list[dict[str, Any]], hosts: dict[str, Any] | None = None, where: str = "localhost", **settings: Any
) -> tuple[int, str]:
    """Run tasks, without connecting to a member; the exit status and all output."""
    inventory = {"sparks": {"hosts": hosts or HOSTS, "vars": {**SETTINGS, **settings}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    plays = [{"name": "Doors", "hosts": where, "gather_facts": False, "tasks": tasks}]
    (folder / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    return run(folder, "hosts.yml", "play.yml")


def run(folder: Path, inventory: str | Path, *arguments: str | Path) -> tuple[int, str]:
    """Run ansible-playbook of this Python's environment in a folder without an ansible.cfg."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env |= {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"), "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def keep(expression: str, name: str) -> dict[str, Any]:
    """A task that writes a value beside the playbook, one file per host."""
    return {
        "name": f"Keep {name}",
        "ansible.builtin.copy": {
            "content": f"{{{{ ({expression}) | to_json }}}}",
            "dest": f"{{{{ playbook_dir }}}}/{name}-{{{{ inventory_hostname }}}}.json",
            "mode": "0600",
        },
        "delegate_to": "localhost",
    }


def show(expression: str) -> dict[str, Any]:
    """A task that prints a value, and goes on when it cannot."""
    return {
        "name": f"Show {expression[:9]}",
        "ansible.builtin.debug": {"msg": f"{{{{ {expression} }}}}"},
        "ignore_errors": True,
    }


def test_every_host_and_localhost_get_the_same_plan(tmp_path: Path) -> None:
    code, output = play(tmp_path, [keep("lookup('gb10.cluster.plan')", "direct")], where="localhost:sparks")
    assert code == 0, output
    plans = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("direct-*.json"))]
    assert len(plans) == 4
    assert all(plan == plans[0] for plan in plans)
    members = [{"name": name, "address": host["ansible_host"]} for name, host in HOSTS.items()]
    settings = {key: value for key, value in SETTINGS.items() if key not in ("somewhere", "cluster_plan")}
    assert plans[0] == _inputs.plan(members, {**settings, "cluster_checkpoint_source": "/srv/tiny"})


def test_addresses_and_interfaces_of_single_hosts(tmp_path: Path) -> None:
    hosts = {
        "t1": {"ansible_host": "one.example", "cluster_address": "198.51.100.1"},
        "t2": {"ansible_host": "198.51.100.2", "cluster_management_interface": "eth7"},
        "t3": {"cluster_address": "198.51.100.3"},
    }
    code, output = play(tmp_path, [keep("lookup('gb10.cluster.plan').members", "members")], hosts)
    assert code == 0, output
    members = json.loads((tmp_path / "members-localhost.json").read_text())
    assert {name: tuple(member["management"].values()) for name, member in members.items()} == {
        "t1": ("198.51.100.1", "mgmt0"),
        "t2": ("198.51.100.2", "eth7"),
        "t3": ("198.51.100.3", "mgmt0"),
    }


def test_each_item_of_a_loop_has_the_plan_of_its_own_settings(tmp_path: Path) -> None:
    """What the inventory says is read once for a task, what the task says is not."""
    task = keep("lookup('gb10.cluster.plan').service.port", "port-{{ item }}") | {"loop": [8001, 8002]}
    code, output = play(tmp_path, [task | {"vars": {"cluster_api_port": "{{ item }}"}}])
    assert code == 0, output
    assert [json.loads((tmp_path / f"port-{port}-localhost.json").read_text()) for port in (8001, 8002)] == [8001, 8002]


def test_changes_of_the_profile_add_up_from_inventory_and_lookup(tmp_path: Path) -> None:
    more = "{'cluster_profile_changes': {'engine': {'arguments': {'max-num-seqs': 4, 'dtype': none}}}, 'cluster_api_port': 8001}"
    tasks = [keep(f"lookup('gb10.cluster.plan', {more}).members.t1.rank_config.container.command", "command")]
    changes = {"engine": {"arguments": {"max-num-batched-tokens": 64}}}
    code, output = play(tmp_path, tasks, cluster_profile_changes=changes)
    assert code == 0, output
    command = json.loads((tmp_path / "command-localhost.json").read_text())
    given = {command[place]: command[place + 1] for place in range(len(command) - 1) if command[place].startswith("--")}
    assert (given["--max-num-batched-tokens"], given["--max-num-seqs"], given["--port"]) == ("64", "4", "8001") and "--dtype" not in given
    # `-e NAME=VALUE` gives text.
    changes["engine"]["arguments"]["max-num-batched-tokens"] = 128
    code, output = run(tmp_path, "hosts.yml", "play.yml", "-e", f"cluster_profile_changes='{json.dumps(changes)}'")
    assert code == 0 and '"128"' in (tmp_path / "command-localhost.json").read_text(), output


def test_filters_give_the_parts_of_the_plan(tmp_path: Path) -> None:
    inputs = {
        "nodes": [{"name": name, "address": host["ansible_host"]} for name, host in HOSTS.items()],
        "fabric": {"cluster_topology": "ring"},
        "all": {"cluster_name": "ring", "cluster_profile": "dsv41-exl3-3.5bpw-tp3", "cluster_topology": "ring"},
    }
    expressions = {
        "plan": "nodes | gb10.cluster.plan(all)",
        "addresses": "nodes | gb10.cluster.fabric_addresses(fabric)",
        "nccl": "nodes | gb10.cluster.nccl_env(fabric)",
        "explained": "nodes | gb10.cluster.nccl_env(fabric, explain=true)",
        "vllm": "nodes | gb10.cluster.vllm_args(all)",
    }
    together = ", ".join(f"'{name}': {expression}" for name, expression in expressions.items())
    code, output = play(tmp_path, [{**keep(f"{{{together}}}", "all"), "vars": inputs}])
    assert code == 0, output
    got = json.loads((tmp_path / "all-localhost.json").read_text())
    Draft202012Validator(_schema.PLAN).validate(got["plan"])
    members = got["plan"]["members"]
    assert got["addresses"] == {name: member["legs"] for name, member in members.items()}
    assert got["vllm"] == {name: member["rank_config"]["container"]["command"] for name, member in members.items()}
    for name, member in members.items():
        # The plan's environment has the profile's variables as well.
        assert got["nccl"][name].items() <= member["rank_config"]["container"]["environment"].items()
    assert got["explained"]["members"] == got["nccl"]
    assert got["explained"]["absent"] == got["plan"]["fabric"]["nccl"]["absent"]
    assert got["explained"]["reasons"].items() <= got["plan"]["fabric"]["nccl"]["reasons"].items()


@pytest.mark.parametrize(
    ("hosts", "settings", "message"),
    [
        (None, {"cluster_topologie": "ring"}, "inventory: cluster_topologie is not a known key (did you mean cluster_topology?)"),
        (None, {"cluster_profile": "dsv41-exl3-2.9bpw-tp2"}, "parallelism.tensor_parallel_size is 2, but group sparks has 3 members"),
        (
            {**HOSTS, "t2": {"ansible_host": "198.51.100.1"}},
            {},
            "inventory: t1 and t2 both have the management address 198.51.100.1",
        ),
        (
            {**HOSTS, "t3": {"ansible_host": "198.51.100.3", "cluster_mtu": 1500}},
            {"cluster_mtu": 9000},
            "inventory: cluster_mtu is 9000 for t1, but 1500 for t3: set it once, in the group variables of sparks",
        ),
    ],
)
def test_a_mistake_ends_the_play_with_its_sentence(
    tmp_path: Path, hosts: dict[str, Any] | None, settings: dict[str, Any], message: str
) -> None:
    task = {**show("lookup('gb10.cluster.plan')"), "ignore_errors": False}
    code, output = play(tmp_path, [task], hosts, **settings)
    assert code != 0
    assert message in " ".join(output.split())


def test_wrong_calls_are_told_apart(tmp_path: Path) -> None:
    calls = {
        "[] | gb10.cluster.nccl_env({'cluster_topology': 'ring'})": "cluster_topology ring needs at least 3 members",
        "[] | gb10.cluster.plan": "missing 1 required positional argument: 'settings'",
        "lookup('gb10.cluster.plan', 'x')": "takes one mapping of settings at most",
    }
    output = play(tmp_path, [show(expression) for expression in calls])[1]
    assert [message for message in calls.values() if message not in " ".join(output.split())] == []
    assert "ignored=3" in output


def test_an_inventory_without_members_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("[other]\nx\n")
    code, output = run(tmp_path, "none", ROOT / "playbooks" / "plan.yml")
    assert code != 0
    assert "inventory: group sparks has no hosts" in " ".join(output.split())


@pytest.mark.parametrize("inventory", ["pair", "ring3", "ring4", "switched"])
def test_the_plan_playbook_shows_and_writes_the_plan(tmp_path: Path, inventory: str) -> None:
    hosts = ROOT / "inventories" / inventory
    code, output = run(tmp_path, hosts, ROOT / "playbooks" / "plan.yml", "-e", f"plan_file={tmp_path}/plan.json")
    assert code == 0, output
    plan = json.loads((tmp_path / "plan.json").read_text())
    Draft202012Validator(_schema.PLAN).validate(plan)
    code, output = run(tmp_path, hosts, ROOT / "playbooks" / "plan.yml")
    assert code == 0, output
    assert plan["cluster"]["digest"] in output
