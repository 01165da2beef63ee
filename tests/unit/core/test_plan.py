# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole plan: its form, what it depends on and what it refuses."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _schema, _serving
from ansible_collections.gb10.cluster.plugins.module_utils._errors import PlanError
from ansible_collections.gb10.cluster.plugins.module_utils._plan import COORDINATION_PORT, build_plan
from ansible_collections.gb10.cluster.plugins.module_utils._topology import Member
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]


@pytest.fixture
def inputs(members: list[dict[str, Any]], settings: dict[str, Any], profile: dict[str, Any]) -> Inputs:
    return members, settings, profile


def names(count: int) -> list[dict[str, Any]]:
    return [{"name": f"t{rank + 1}", "address": f"198.51.100.{rank + 1}"} for rank in range(count)]


@pytest.mark.parametrize(
    ("count", "topology", "profile"),
    [
        (2, "pair", "dsv41-exl3-2.9bpw-tp2"),
        (2, "switched", "dsv41-exl3-2.9bpw-tp2"),
        (3, "ring", "dsv41-exl3-3.5bpw-tp3"),
        (3, "switched", "lab-smollm2"),
        (3, "ring", "lab-tiny"),
    ],
)
@pytest.mark.parametrize("devices", [[], ["/dev/infiniband"]])
def test_a_plan_has_the_form_of_its_schema(count: int, topology: str, profile: str, devices: list[str]) -> None:
    plan = _inputs.plan(
        names(count),
        {
            "cluster_name": "x",
            "cluster_profile": profile,
            "cluster_topology": topology,
            "cluster_devices": devices,
            "cluster_checkpoint_source": "/srv/checkpoint",
            "cluster_image_archive": "/srv/image.tar",
        },
    )
    Draft202012Validator(_schema.PLAN).validate(plan)
    assert json.loads(json.dumps(plan)) == plan


def test_ranks_differ_in_nothing_but_their_place(inputs: Inputs) -> None:
    plan = build_plan(*inputs)
    commands, environments = [], []
    for member in plan["members"].values():
        container = member["rank_config"]["container"]
        command = list(container["command"])
        at = command.index("--node-rank")
        assert command[at + 1] == str(member["rank"])
        del command[at : at + 2]
        place = ["--headless"] if member["rank"] else ["--host", "0.0.0.0", "--port", "8000"]
        at = command.index(place[0])
        assert command[at : at + len(place)] == place
        del command[at : at + len(place)]
        commands.append(command)
        environments.append({key: value for key, value in container["environment"].items() if key not in ("VLLM_HOST_IP", "NCCL_IB_HCA")})
        assert container["environment"]["VLLM_HOST_IP"] == member["management"]["address"]
        assert member["rank_config"]["digest"] == plan["cluster"]["digest"]
    assert commands[0] == commands[1] == commands[2]
    assert environments[0] == environments[1] == environments[2]


def test_the_words_of_options(inputs: Inputs) -> None:
    members, settings, profile = inputs
    profile["engine"]["arguments"] = {"z": True, "many": [1, "b"], "json": {"b": [1], "a": False}, "number": 0.25}
    command = build_plan(members, settings, profile)["members"]["t2"]["rank_config"]["container"]["command"]
    assert command == [
        *["vllm", "serve", "/models/deepseek-v4.1-flash-exl3-3.5bpw"],
        *["--tensor-parallel-size", "3", "--nnodes", "3", "--node-rank", "1"],
        *["--master-addr", "198.51.100.11", "--master-port", "29500", "--distributed-executor-backend", "mp", "--headless"],
        *["--gpu-memory-utilization", "0.8", "--json", '{"a":false,"b":[1]}', "--kv-cache-memory-bytes", "4509715660"],
        *["--many", "1", "b", "--max-model-len", "524288", "--number", "0.25"],
        *["--served-model-name", "DeepSeek-V4.1-Flash-EXL3", "--z"],
    ]


def test_the_service_starts_workers_first(inputs: Inputs) -> None:
    service = build_plan(*inputs)["service"]
    assert service["launch_order"] == ["t2", "t3", "t1"]
    assert service["url"] == "http://198.51.100.11:8000"
    assert service["unit"] == "gb10-rank@ring.service"


def test_copies_of_a_ring_of_four_go_over_its_cables(inputs: Inputs) -> None:
    members, settings, profile = inputs
    members.append({"name": "t4", "address": "198.51.100.14"})
    profile["parallelism"]["tensor_parallel_size"] = 4
    # Cables in order: t1-t2, t1-t4, t2-t3, t3-t4.
    assert build_plan(members, settings, profile)["storage"]["replicas"] == [
        {"member": "t2", "from": "t1", "address": "10.10.0.1"},
        {"member": "t4", "from": "t1", "address": "10.10.2.1"},
        {"member": "t3", "from": "t2", "address": "10.10.4.1"},
    ]


def test_a_container_gets_rdma_and_locked_memory_together(inputs: Inputs) -> None:
    # Case C14, and its opposite: a host without the device.
    members, settings, profile = inputs

    def container(devices: list[str]) -> dict[str, Any]:
        plan = build_plan(members, {**settings, "cluster_devices": devices}, profile)
        return plan["members"]["t1"]["rank_config"]["container"]

    assert container(["/dev/infiniband"])["capabilities"] == ["IPC_LOCK"]
    assert container(["/dev/infiniband"])["ulimits"] == {"memlock": "-1"}
    assert container([])["capabilities"] == container([])["devices"] == []


def test_engram_tables_and_the_cache_are_mounted(settings: dict[str, Any]) -> None:
    settings |= {"cluster_topology": "pair", "cluster_profile": "dsv41-exl3-2.9bpw-tp2", "cluster_storage_root": "/srv"}
    plan = _inputs.plan([{"name": f"t{i}", "address": f"198.51.100.{i}"} for i in (1, 2)], settings)
    assert plan["members"]["t2"]["rank_config"]["container"]["volumes"] == [
        {"source": "/srv/deepseek-v4.1-flash-exl3-2.9bpw", "target": "/models/deepseek-v4.1-flash-exl3-2.9bpw", "read_only": True},
        {"source": "/srv/deepseek-v4.1-flash-engram", "target": "/models/deepseek-v4.1-flash-engram", "read_only": True},
        {"source": "/var/lib/gb10/engram/ring", "target": "/engram-packed", "read_only": True},
        {"source": "/var/lib/gb10/cache/ring", "target": "/cache", "read_only": False},
    ]


def test_a_member_may_have_its_own_management_interface(inputs: Inputs) -> None:
    # Case C16.
    members, settings, profile = inputs
    members[1]["interface"] = "wlP9s9"
    plan = build_plan(members, settings, profile)
    assert [plan["members"][name]["management"]["interface"] for name in ("t1", "t2")] == ["enP7s7", "wlP9s9"]
    assert plan["members"]["t2"]["rank_config"]["container"]["environment"]["GLOO_SOCKET_IFNAME"] == "wlP9s9"


def test_a_ring_of_four_says_in_the_plan_what_a_plain_library_lacks(inputs: Inputs) -> None:
    members, settings, profile = inputs
    fabric = build_plan(members, settings, profile)["fabric"]
    assert fabric["notes"] == []
    assert [each["feature"] for each in fabric["nccl"]["library"]] == ["IB_SUBNET_AWARE_ROUTING"]
    # One index for all devices cannot be pinned, and the plan says why.
    assert "the index differs per port and moves when a link flaps" in fabric["nccl"]["absent"]["NCCL_IB_GID_INDEX"]
    members.append({"name": "t4", "address": "198.51.100.14"})
    profile["parallelism"]["tensor_parallel_size"] = 4
    fabric = build_plan(members, settings, profile)["fabric"]
    (note,) = fabric["notes"]
    assert "a plain NCCL still connects trees" in note
    assert fabric["nccl"]["library"][1]["reason"] == note


def _set(part: str, *keys: str, value: Any) -> Callable[[Inputs], None]:
    def apply(inputs: Inputs) -> None:
        target: Any = dict(zip(("members", "settings", "profile"), inputs, strict=True))[part]
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("profile", "parallelism", "tensor_parallel_size", value=2),
            "profile dsv41-exl3-3.5bpw-tp3: parallelism.tensor_parallel_size is 2, but group sparks has 3 members (t1, t2, t3): "
            "choose a profile for 3 members or correct the group",
        ),
        (_set("profile", "memory", value={"container_limit_mib": 64, "shm_mib": 64}), "memory has neither kv_cache_bytes nor"),
        (_set("profile", "engine", "arguments", "port", value=1), "engine.arguments.port is set by cluster_api_port: remove it"),
        (_set("profile", "engine", "arguments", "api-key", value="x"), "engine.arguments.api-key is set by the key file on the head"),
        (_set("profile", "engine", "environment", "NCCL_IB_TC", value="1"), "environment.NCCL_IB_TC belongs in nccl.overrides"),
        (_set("profile", "engine", "environment", "VLLM_HOST_IP", value="1"), "environment.VLLM_HOST_IP is set by the inventory"),
        (_set("profile", "nccl", "overrides", "NCCL_IB_GID_INDEX", value=3), "nccl.overrides.NCCL_IB_GID_INDEX may not be set"),
        (_set("profile", "engine", "master_port", value=8000), "engine.master_port is 8000, which is also cluster_api_port"),
        (_set("profile", "engine", "master_port", value=COORDINATION_PORT), "which is the rank supervisors' port"),
        (_set("settings", "cluster_api_port", value=COORDINATION_PORT), "inventory: cluster_api_port is 29600"),
        (
            _set("profile", "checkpoint", "source", value={"kind": "directory"}),
            "checkpoint.source names no path: set cluster_checkpoint_source in the inventory",
        ),
        (_set("profile", "image", "source", value={"kind": "archive"}), "image.source names no path: set cluster_image_archive"),
    ],
)
def test_refused(inputs: Inputs, change: Callable[[Inputs], None], message: str) -> None:
    change(inputs)
    with pytest.raises(PlanError) as error:
        build_plan(*inputs)
    assert message in str(error.value)


# The digest ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        _set("profile", "engine", "environment", "MAX_JOBS", value="2"),
        _set("profile", "engine", "arguments", "max-num-seqs", value=3),
        _set("profile", "engine", "master_port", value=29501),
        _set("profile", "memory", "shm_mib", value=64),
        _set("profile", "serving", "start_timeout_s", value=1),
        _set("profile", "image", "reference", value="other"),
        _set("profile", "checkpoint", "preparation", value={}),
        _set("profile", "nccl", "overrides", "NCCL_IB_TC", value=1),
        _set("settings", "cluster_mtu", value=1500),
        _set("settings", "cluster_leg_pool", value="10.20.0.0/16"),
        _set("settings", "cluster_engine", value="podman"),
        _set("settings", "cluster_api_port", value=8001),
        _set("settings", "cluster_storage_root", value="/srv"),
        _set("settings", "cluster_cables", value=["t1.1 - t2.0", "t2.1 - t3.0", "t3.1 - t1.0"]),
    ],
)
def test_what_the_group_runs_with_changes_the_digest(inputs: Inputs, change: Callable[[Inputs], None]) -> None:
    before = build_plan(*copy.deepcopy(inputs))["cluster"]["digest"]
    change(inputs)
    assert build_plan(*inputs)["cluster"]["digest"] != before


@pytest.mark.parametrize(
    "change",
    [
        _set("profile", "description", value="other"),
        _set("profile", "probes", "chat", "prompt", value="other"),
        _set("profile", "checkpoint", "source", value={"kind": "http", "url": "http://192.0.2.1/"}),
        _set("profile", "image", "source", value={"kind": "archive", "path": "/x"}),
        _set("settings", "cluster_checkpoint_source", value="/x"),
        _set("settings", "cluster_allow_disruption", value=True),
        _set("settings", "cluster_reserved_networks", value=[]),
    ],
)
def test_what_it_does_not_run_with_leaves_the_digest(inputs: Inputs, change: Callable[[Inputs], None]) -> None:
    before = build_plan(*copy.deepcopy(inputs))["cluster"]["digest"]
    change(inputs)
    assert build_plan(*inputs)["cluster"]["digest"] == before


def shuffled(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(draw, value[key]) for key in draw(st.permutations(list(value)))}
    return [shuffled(draw, item) for item in value] if isinstance(value, list) else value


@given(st.data())
@hypothesis_settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_keys_means_nothing(inputs: Inputs, data: st.DataObject) -> None:
    again = shuffled(data.draw, list(inputs))
    one, two = build_plan(*inputs), build_plan(*again)
    assert one == two
    assert one["members"]["t1"]["rank_config"]["container"]["command"] == two["members"]["t1"]["rank_config"]["container"]["command"]


@pytest.mark.parametrize(
    ("name", "count", "change", "words"),
    [
        (
            "dsv41-exl3-2.9bpw-tp2",
            2,
            {"kv-cache-dtype": "fp8"},
            "engine.arguments.kv-cache-dtype may not be set, since this image takes its own",
        ),
        (
            "dsv41-exl3-3.5bpw-tp3",
            3,
            {"hf-overrides": {"text_config": {"o_groups": 9}}},
            "hf-overrides.text_config may not be set, since a mapping",
        ),
    ],
)
def test_an_argument_that_breaks_an_image_is_refused_with_the_reason(name: str, count: int, change: dict[str, Any], words: str) -> None:
    profile = _inputs.load_profile(name, ".")
    profile["engine"]["arguments"] |= change
    members = [Member(member["name"], rank, member["address"], "x") for rank, member in enumerate(names(count))]
    with pytest.raises(PlanError, match=words):
        _serving.check_profile(profile, members)
    profile["engine"]["arguments"] |= dict.fromkeys(change)
    _serving.check_profile(profile, members)
    assert not {f"--{option}" for option in change} & set(_serving.arguments(profile, members, 0, 8000)), "null is not passed"


def test_experts_are_not_spread_where_the_drafters_do_not_divide() -> None:
    profile = _inputs.load_profile("dsv41-exl3-3.5bpw-tp3", ".")
    profile["parallelism"]["expert_parallel"] = True
    members = [Member(member["name"], rank, member["address"], "x") for rank, member in enumerate(names(3))]
    with pytest.raises(PlanError, match="expert_parallel may not be set, since the drafter's 128 experts do not divide by 3: remove it"):
        _serving.check_profile(profile, members)


def test_capture_sizes_follow_from_sequences_and_speculated_tokens() -> None:
    assert _serving.capture_sizes(2, 5) == [5, 6, 10, 12]
    profile = _inputs.load_profile("dsv41-exl3-3.5bpw-tp3", ".")
    members = [Member(member["name"], rank, member["address"], "x") for rank, member in enumerate(names(3))]
    assert '"cudagraph_capture_sizes":[5,6,10,12]' in " ".join(_serving.arguments(profile, members, 0, 8000))
    profile["engine"]["arguments"]["compilation-config"]["cudagraph_capture_sizes"] = [1]
    assert '"cudagraph_capture_sizes":[1]' in " ".join(_serving.arguments(profile, members, 0, 8000))
