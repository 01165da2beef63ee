# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Back to what served before, and forward again: network, image, arguments and checkpoint together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _generation
from testinfra.host import Host

from extensions.molecule.tests.group_hosts import ONE_COMMAND, all_serve, recovery
from extensions.molecule.tests.lab_hosts import ROOT

pytestmark = pytest.mark.service

IMAGE, CHECKPOINT, POOL = "localhost/gb10-lab-engine:next", "smollm2-next", "10.20.0.0/16"


def runs(hosts: dict[str, Host]) -> dict[str, Any]:
    """What the head's rank runs, and its legs' addresses, as found on the host."""
    rank = json.loads(hosts["t1"].check_output("cat /etc/gb10/lab/rank.json"))
    command = rank["container"]["command"]
    legs = hosts["t1"].check_output("ip -4 -brief address show enp1s0f0np0").split()[2]
    key = hosts["t1"].check_output("cat /etc/gb10/lab/api-key")
    models = hosts["t1"].check_output(f"curl -s -H 'Authorization: Bearer {key}' http://127.0.0.1:8000/v1/models")
    seen = hosts["t1"].check_output("podman inspect --format '{{.Image}}' gb10-lab")
    assert seen == rank["container"]["image"].removeprefix("sha256:")
    return {
        "model": command[2],
        "served": json.loads(models)["data"][0]["max_model_len"],
        "legs": legs,
        "digests": {json.loads(host.check_output("cat /etc/gb10/lab/rank.json"))["digest"] for host in hosts.values()},
    }


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile with another argument, another image and another checkpoint."""
    profile = yaml.safe_load((ROOT / "profiles" / "lab-smollm2.yml").read_text())
    profile["name"] = "next"
    profile["serving"] |= {"max_model_len": 256, "warm_up": [16]}
    profile["image"]["reference"] = IMAGE
    profile["checkpoint"]["directory"] = CHECKPOINT
    path = tmp_path_factory.mktemp("profiles") / "next.yml"
    path.write_text(yaml.safe_dump(profile))
    return str(path)


def test_a_group_that_has_served_with_nothing_else_stays(playbook: Any, hosts: dict[str, Host]) -> None:
    for host in hosts.values():  # what other tests served with is forgotten
        host.check_output(f"rm -f {_generation.FOLDER}/lab.json")
    done = playbook("start")
    assert done.returncode == 0, done.stdout
    done = playbook("rollback")
    assert done.returncode != 0 and "has served with nothing else on this member, so there is nothing to go back to" in " ".join(
        done.stdout.split()
    ), done.stdout
    assert all_serve(hosts)


def test_all_of_it_goes_back_together_and_forward_again(playbook: Any, hosts: dict[str, Host], plan: dict[str, Any], other: str) -> None:
    first = runs(hosts)
    assert playbook("stop").returncode == 0
    root = str(Path(plan["storage"]["directory"]).parent)
    for host in hosts.values():
        host.check_output(f"cp -al {plan['storage']['directory']} {root}/{CHECKPOINT}")
        # Another image: its id differs, its layers do not.
        # With one time on all hosts it has one id.
        recipe = f"FROM {plan['image']['reference']}\\nLABEL next=1\\n"
        host.check_output(f"printf '{recipe}' | podman build --quiet --timestamp 0 --tag {IMAGE} -")
    change = ("-e", f"cluster_profile={other}", "-e", f"cluster_leg_pool={POOL}")
    done = playbook("start", *change)
    assert done.returncode != 0 and "was measured with other members, legs, image or NCCL variables" in " ".join(done.stdout.split()), (
        done.stdout
    )
    done = playbook("site", "--tags", "fabric,service", *change, "-e", "fabric_gate=false")
    assert done.returncode == 0, done.stdout
    second = runs(hosts)
    assert second["model"].endswith(CHECKPOINT) and second["served"] == 256 and second["legs"].startswith("10.20.")
    with recovery("a rollback to the generation before", ONE_COMMAND):
        done = playbook("rollback")
        assert done.returncode == 0, done.stdout
    assert runs(hosts) == first and all_serve(hosts)
    assert playbook("proof").returncode == 0
    hosts["t2"].check_output(f"mv {root}/{CHECKPOINT} {root}/away")
    done = playbook("rollback")
    hosts["t2"].check_output(f"mv {root}/away {root}/{CHECKPOINT}")
    assert done.returncode != 0 and f"{CHECKPOINT}/config.json of generation 2 of group lab is not there" in " ".join(done.stdout.split())
    assert all_serve(hosts), "it looked before it stopped anything"
    done = playbook("rollback")
    assert done.returncode == 0, done.stdout
    assert runs(hosts) == second and all_serve(hosts)
