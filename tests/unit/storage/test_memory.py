# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank's weights from headers made to the published shapes, and the plan of its memory against the published figures."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _memory, _plan, _survey, _weights
from ansible_collections.gb10.cluster.plugins.module_utils._memory import GIB, Launch, Memory
from ansible_collections.gb10.cluster.plugins.module_utils._safetensors import BITS, Tensor
from ansible_collections.gb10.cluster.plugins.module_utils._weights import Sharding
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.storage import shapes

ROOT = Path(__file__).resolve().parents[3]
SPARK = Memory(127_601_216 * 1024, int(114.6 * GIB), int(114.6 * GIB))
"""121.69 GiB, of which 114.6 are free on a Spark at rest (bot-lab-21)."""

System = Callable[[], Iterator[tuple[str, shapes.Tensors]]]


@cache
def described(system: System) -> list[tuple[str, Tensor]]:
    return [
        (name, Tensor(dtype, shape, 0, math.prod(shape) * BITS[dtype] // 8))
        for _file, tensors in system()
        for name, (dtype, shape) in tensors.items()
    ]


def weigh(tensors: list[tuple[str, Tensor]], ranks: int, **loaded: bool) -> _weights.Weights:
    return _weights.weigh(tensors, shapes.CONFIG, Sharding(ranks, **loaded))


@cache
def system_a(ranks: int, **loaded: bool) -> _weights.Weights:
    """What a rank of system A's pack holds: 188,000 tensors, so each way once."""
    return weigh(described(shapes.system_a), ranks, **loaded)


@cache
def system_b(ranks: int, **loaded: bool) -> _weights.Weights:
    """The same of system B's."""
    return weigh(described(shapes.system_b), ranks, **loaded)


def test_the_shapes_are_the_published_ones() -> None:
    """So that what follows is no arithmetic with itself: every file of system A to a thousandth, system B's matrices to the last one."""
    manifest = json.loads((ROOT / "profiles/manifests/deepseek-v4.1-flash-exl3-3.5bpw.json").read_text())
    published = {entry["path"]: entry["size"] for entry in manifest["files"]}
    for file, tensors in shapes.system_a():
        size = sum(math.prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())
        assert size < published[file] < size * 1.001
    system_b = described(shapes.system_b)
    assert sum(name.endswith(".trellis") for name, _tensor in system_b) == 47_900
    assert 196 <= sum(tensor.size for _name, tensor in system_b) / GIB <= 197


def test_system_b_keeps_what_is_published() -> None:
    """99.5 GiB a rank by the kit's own budget, which counts the vision tower; 3.5 of them go with the drafter."""
    whole = system_b(2, draft=True, vision=True)
    assert whole.total / GIB == pytest.approx(99.5, rel=0.02)
    assert (whole.total - system_b(2, vision=True).total) / GIB == pytest.approx(3.5, rel=0.02)


def test_system_a_keeps_what_is_published() -> None:
    """79.5 GiB a rank (LLMKube), of the runs before vision was switched on; 79.9 for text without a drafter on another build (tonyd2wild)."""
    text = system_a(3, draft=True)
    assert text.total / GIB == pytest.approx(79.5, rel=0.02)
    assert system_a(3).total / GIB == pytest.approx(79.9, rel=0.02)
    assert text.left_out["engram"] / GIB == pytest.approx(62.9, rel=0.01)
    assert text.parts["vision"] == 0 < text.left_out["vision"]


def test_resident_tables_do_not_fit() -> None:
    """At four ranks 47.2 GiB of tables on each (sparkring), beside 68.9 of the rest, the larger of two published figures."""
    resident = system_a(4, draft=True, vision=True, resident_tables=True)
    assert (resident.total - resident.parts["engram"]) / GIB == pytest.approx(68.9, rel=0.02)
    assert resident.parts["engram"] / GIB == pytest.approx(47.2, rel=0.01)
    assert resident.left_out["engram"] == 0


def test_bits_are_those_of_the_shapes() -> None:
    bits = system_a(3).bits
    assert len(bits) == 40
    assert [bits[layer] for layer in (0, 15, 20)] == [(4, 4), (3, 3), (3, 4)]


def matrices(name: str, inputs: int, outputs: int, bits: int = 0) -> list[tuple[str, Tensor]]:
    tensors = shapes.exl3(name, inputs, outputs, bits) if bits else {f"{name}.weight": ("BF16", (outputs, inputs))}
    return [(key, Tensor(dtype, shape, 0, math.prod(shape) * BITS[dtype] // 8)) for key, (dtype, shape) in tensors.items()]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "bits", "ranks", "own"),
    [
        # 18 blocks of 128 over four ranks: the largest part has five. The vector of the inputs is whole.
        ("layers.0.ffn.experts.0.w1", 5120, 2304, 4, 4, (5 * 128 * 5120 * 4 // 8) + 5120 * 2 + 5 * 128 * 2 + 4),
        ("layers.0.ffn.experts.0.w2", 2304, 5120, 4, 3, (768 * 5120 * 4 // 8) + 768 * 2 + 5120 * 2 + 4),
        # 8 groups over three ranks: three groups each, one of them invented somewhere.
        ("layers.0.attn.wq_b", 1280, 32768, 0, 3, 3 * 4096 * 1280 * 2),
        ("layers.0.attn.wo_b", 8192, 5120, 0, 3, 3 * 1024 * 5120 * 2),
        ("layers.0.attn.wo_a.slice.0", 4096, 1024, 5, 2, 4096 * 1024 * 5 // 8 // 2 + 2048 * 2 + 512 * 2 + 4),
        ("layers.0.attn.wq_a", 5120, 1280, 0, 3, 5120 * 1280 * 2),
        ("layers.2.attn.indexer.wq_b", 1280, 4096, 0, 3, 1280 * 4096 * 2),
        ("embed", 5120, 129280, 0, 3, 43136 * 5120 * 2),
        ("mtp.2.markov_head.embed", 256, 129280, 0, 3, 256 * 129280 * 2),
        ("an.unknown.module", 64, 64, 0, 3, 64 * 64 * 2),
        ("model.layers.0.self_attn.k_proj", 576, 192, 0, 3, 192 * 576 * 2),  # one KV head is on every rank
        ("model.layers.0.mlp.down_proj", 1536, 576, 0, 3, 512 * 576 * 2),
    ],
)
def test_every_kind_is_divided_by_its_rule(name: str, inputs: int, outputs: int, bits: int, ranks: int, own: int) -> None:
    config = {"o_groups": 8, "num_attention_heads": 64, "num_key_value_heads": 1}
    weights = _weights.weigh(matrices(name, inputs, outputs, bits), config, Sharding(ranks, draft=True))
    assert weights.total == own


def test_experts_may_be_divided_whole() -> None:
    tensors = [pair for expert in range(7) for pair in matrices(f"layers.0.ffn.experts.{expert}.w1", 128, 128, 4)]
    whole = sum(tensor.size for _name, tensor in tensors)
    weights = _weights.weigh(tensors, {"n_routed_experts": 7}, Sharding(3, expert_parallel=True))
    assert whole * 3 / 7 <= weights.total <= whole * 3 / 7 + len(tensors)


def test_block_scales_become_one_a_row() -> None:
    name = "layers.0.attn.wq_a"
    tensors = [(key, Tensor(dtype, shape, 0, math.prod(shape))) for key, (dtype, shape) in shapes.fp8(name, 5120, 1280).items()]
    assert _weights.weigh(tensors, {}, Sharding(2)).total == 5120 * 1280 + 1280 * 5120 // 32


def test_padded_heads_in_the_file_change_nothing() -> None:
    """The budget is of the real groups, also after virtual_heads."""
    padded = {**shapes.CONFIG, "virtual_heads_from": {"num_attention_heads": 64, "o_groups": 8}}
    padded["text_config"] = {**shapes.CONFIG["text_config"], "num_attention_heads": 72, "o_groups": 9}
    some = [pair for pair in described(shapes.system_a) if pair[0].startswith("layers.0.attn")]
    assert _weights.weigh(some, padded, Sharding(3)).total == _weights.weigh(some, shapes.CONFIG, Sharding(3)).total


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 3]))
def test_all_ranks_together_hold_everything(ranks: int, rows: int, columns: int, bits: int) -> None:
    tensors = matrices("layers.0.ffn.experts.0.w1", rows * 128, columns * 128, bits)
    total = _weights.weigh(tensors, {}, Sharding(ranks)).total
    whole = sum(tensor.size for _name, tensor in tensors)
    assert whole <= total * ranks
    assert total <= whole


def rank_config(profile: str, topology: str, members: int) -> dict[str, Any]:
    """What the plan of a real profile tells rank 1."""
    hosts = [{"name": f"t{rank}", "address": f"198.51.100.{10 + rank}"} for rank in range(members)]
    settings = {"cluster_name": "group", "cluster_profile": profile, "cluster_topology": topology}
    return _plan.build_plan(hosts, settings, _inputs.load_profile(profile))["members"]["t1"]["rank_config"]


@pytest.fixture(scope="module")
def config_a() -> dict[str, Any]:
    return rank_config("dsv41-exl3-3.5bpw-tp3", "ring", 3)


@pytest.fixture(scope="module")
def config_b() -> dict[str, Any]:
    return rank_config("dsv41-exl3-2.9bpw-tp2", "pair", 2)


def test_what_is_launched_is_what_is_counted(config_a: dict[str, Any], config_b: dict[str, Any]) -> None:
    a, b = _memory.launch_of(config_a), _memory.launch_of(config_b)
    assert (a.ranks, a.context, a.sequences, a.batched_tokens, a.kv_bytes) == (3, 524_288, 2, 8192, 4_509_715_660)
    assert (a.draft, a.vision, a.expert_parallel, a.tables_on_disk, a.gpu) == (True, True, False, True, True)
    assert (b.ranks, b.context, b.batched_tokens, b.kv_bytes, b.vision, b.tables_on_disk) == (2, 600_000, 1024, 2_684_354_560, False, True)


def test_our_own_image_reads_the_tables_from_disk_too() -> None:
    launch = _memory.launch_of(rank_config("dsv41-exl3-3.5bpw-tp3-lakyfx", "ring", 3))
    assert (launch.tables_on_disk, launch.kv_bytes, launch.sequences) == (True, 8_074_035_200, 8)


@pytest.mark.parametrize(
    ("sibling", "topology", "ranks", "weights"),
    [
        ("dsv41-exl3-2.9bpw-tp2", "pair", 2, lambda: system_b(2, draft=True)),
        ("dsv41-exl3-3.5bpw-tp3", "ring", 3, lambda: system_a(3, draft=True, vision=True)),
    ],
)
def test_our_own_image_fits_where_the_published_one_does(
    sibling: str, topology: str, ranks: int, weights: Callable[[], _weights.Weights]
) -> None:
    """With the tables on disk a rank needs what it needs there, to the byte."""
    theirs, ours = (rank_config(name, topology, ranks) for name in (sibling, f"{sibling}-own"))
    launches = [_memory.launch_of(config) for config in (theirs, ours)]
    lines = [_memory.parts(weights().parts, shapes.CONFIG, launch) for launch in launches]
    assert all(launch.tables_on_disk for launch in launches) and lines[0] == lines[1]
    verdict = _memory.verdict("t1", lines[1], launches[1], SPARK, _inputs.load_profile(f"{sibling}-own")["memory"]["kv_bytes_per_token"])
    assert (verdict.fits, verdict.sentence) == (True, "") and verdict.context > launches[1].context
    assert ours["start"]["free_mib"] * 2**20 >= lines[1]["weights"] + lines[1]["KV cache"]


@pytest.mark.parametrize(("context", "factor"), [(262_144, 40), (524_288, 16)])
def test_our_own_images_indexer_is_the_releases(context: int, factor: int) -> None:
    """It does not look at the sequences; a lever may make it smaller."""
    config = rank_config("dsv41-exl3-3.5bpw-tp3-lakyfx", "ring", 3)
    launch = replace(_memory.launch_of(config), context=context)
    assert _memory.parts({}, shapes.CONFIG, launch)["indexer workspace"] == context * factor * 132
    smaller = replace(launch, variables={**launch.variables, "GB10_INDEXER_FACTOR": "2"})
    assert _memory.parts({}, shapes.CONFIG, smaller)["indexer workspace"] == context * 2 * 132


def test_system_b_fits_as_published_and_not_with_much_more(config_b: dict[str, Any]) -> None:
    """The kit asks for 12 GiB beside the weights; its worker had 5.8 GiB available after the start. Its pool of 2.5 GiB held 774,400 tokens."""
    launch = _memory.launch_of(config_b)
    weights = system_b(2, draft=True)
    lines = _memory.parts(weights.parts, shapes.CONFIG, launch)
    beside = sum(lines.values()) - lines["weights"] - lines["long prefill"]
    assert beside / GIB == pytest.approx(12, rel=0.05)
    per_token = 2_684_354_560 / 774_400
    verdict = _memory.verdict("t1", lines, launch, SPARK, per_token)
    assert (verdict.fits, verdict.drop_caches, verdict.sentence) == (True, False, "")
    assert verdict.context == 774_400
    after_start = SPARK.available - verdict.need + lines["reserve"] + lines["long prefill"]
    assert after_start / GIB == pytest.approx(5.8, rel=0.05)
    crowded = Memory(SPARK.total, SPARK.free, int(110 * GIB))
    refused = _memory.verdict("t1", lines, launch, crowded, per_token)
    assert not refused.fits
    assert 0 < refused.context < 600_000
    assert f"the longest context that fits is {refused.context} tokens" in refused.sentence
    shorter = Launch(**{**vars(launch), "context": refused.context, "kv_bytes": math.ceil(refused.context * per_token)})
    assert _memory.verdict("t1", _memory.parts(weights.parts, shapes.CONFIG, shorter), shorter, crowded, per_token).fits


def test_system_a_fits_as_published(config_a: dict[str, Any]) -> None:
    """4.2 GiB held 1,057,457 tokens; 8 GiB stayed free through a prefill of 450,000."""
    launch = _memory.launch_of(config_a)
    lines = _memory.parts(system_a(3, draft=True, vision=True).parts, shapes.CONFIG, launch)
    verdict = _memory.verdict("t1", lines, launch, Memory(SPARK.total, 111 * GIB, 111 * GIB), 4_509_715_660 / 1_057_457)
    assert verdict.fits
    assert (111 * GIB - verdict.need + lines["reserve"]) / GIB > 8


@pytest.mark.parametrize(
    ("variables", "published"),
    [({}, 4.7), ({"NCCL_MAX_NCHANNELS": "4"}, 0.3), ({"NCCL_MAX_NCHANNELS": "8", "NCCL_BUFFSIZE": "1048576"}, 0.14)],
)
def test_nccls_buffers_are_as_measured(config_b: dict[str, Any], variables: dict[str, str], published: float) -> None:
    launch = Launch(**{**vars(_memory.launch_of(config_b)), "variables": variables})
    assert _memory.parts({}, {}, launch)["NCCL buffers"] / GIB == pytest.approx(published, rel=0.1)


def test_the_indexers_workspace_is_the_published_one(config_b: dict[str, Any]) -> None:
    launch = _memory.launch_of(config_b)
    assert _memory.parts({}, shapes.CONFIG, launch)["indexer workspace"] == 600_000 * 132
    stock = Launch(**{**vars(launch), "variables": {}, "sequences": 256})
    assert _memory.parts({}, shapes.CONFIG, stock)["indexer workspace"] == 600_000 * 132 * 40
    ours = Launch(**{**vars(launch), "variables": {"GB10_INDEXER_FACTOR": "2"}})
    assert _memory.parts({}, shapes.CONFIG, ours)["indexer workspace"] == 600_000 * 132 * 2
    off = Launch(**{**vars(stock), "variables": {"GB10_INDEXER_FACTOR": "0"}})
    assert _memory.parts({}, shapes.CONFIG, off) == _memory.parts({}, shapes.CONFIG, stock)
    assert "indexer workspace" not in _memory.parts({}, {}, launch)


def test_page_cache_is_no_free_memory(config_b: dict[str, Any]) -> None:
    """Only a drop of caches makes it fit: three numbers, and no silent yes."""
    launch = _memory.launch_of(config_b)
    cached = Memory(SPARK.total, int(41.52 * GIB), int(115.85 * GIB))
    verdict = _memory.verdict("t1", {"weights": 100 * GIB, "KV cache": launch.kv_bytes or 0}, launch, cached, 3466)
    assert (verdict.fits, verdict.drop_caches) == (True, True)
    for number in ("115.85 GiB", "102.50", "41.52 GiB"):
        assert number in verdict.sentence


def test_a_share_that_this_member_never_has_is_refused_with_the_highest_that_it_has() -> None:
    memory = Memory(int(121.69 * GIB), 102 * GIB, 102 * GIB)
    assert re.search(r"0\.87 needs 105\.87 GiB, have 102\.00, .* highest share that passes is 0\.82", _memory.share_problem(memory, 0.87))
    assert _memory.share_problem(memory, 0.82) == ""


def test_a_share_leaves_what_it_leaves(config_b: dict[str, Any]) -> None:
    launch = Launch(**{**vars(_memory.launch_of(config_b)), "kv_bytes": None, "share": 0.88})
    lines = {"weights": 90 * GIB, "KV cache": 0, "processes": 2 * GIB, "reserve": GIB}
    verdict = _memory.verdict("t1", lines, launch, SPARK, 4096)
    assert verdict.context == int(0.88 * SPARK.total - 90 * GIB) // 4096
    refused = _memory.verdict("t1", lines, Launch(**{**vars(launch), "share": 0.99}), SPARK, 4096)
    assert "highest share that passes is 0.93" in refused.sentence


def test_tables_in_memory_are_the_same_memory(config_a: dict[str, Any]) -> None:
    """Pinned on the host or not: the sum is refused, and on the disk 14.9 GiB are left (sparkring's numbers)."""
    launch = Launch(**{**vars(_memory.launch_of(config_a)), "kv_bytes": 20 * GIB})
    memory = Memory(int(121.69 * GIB), int(121.69 * GIB), int(121.69 * GIB))
    lines = {"weights": int(78.8 * GIB), "engram": int(47.2 * GIB), "KV cache": 20 * GIB, "reserve": 8 * GIB}
    refused = _memory.verdict("t1", lines, launch, memory, 4265)
    assert "121.69 GiB of memory available and a rank needs 154.00" in refused.sentence
    assert "no context fits" in refused.sentence
    fits = _memory.verdict("t1", {**lines, "engram": 0}, launch, memory, 4265)
    assert fits.fits
    assert (memory.available - fits.need) / GIB == pytest.approx(14.9, abs=0.05)


def test_a_pool_that_holds_no_whole_context_is_refused(config_b: dict[str, Any]) -> None:
    launch = _memory.launch_of(config_b)
    verdict = _memory.verdict("t1", {"weights": GIB, "KV cache": launch.kv_bytes or 0}, launch, SPARK, 8192)
    assert (
        "holds 327680 tokens and serving.max_model_len is 600000: lower it to 327680 or raise memory.kv_cache_bytes to 4915200001"
        in verdict.sentence
    )


def test_the_least_a_token_takes_is_less_than_any_image_measured() -> None:
    least = _memory.kv_bytes_per_token(shapes.CONFIG)
    assert least == 716 * 2.5
    assert least < min(2_684_354_560 / 774_400, 4_509_715_660 / 1_057_457, 8_074_035_200 / 3_299_563)
    assert _memory.kv_bytes_per_token({"num_hidden_layers": 30}) == 0


class Member:
    """Two ranks' checkpoint of a few small tensors, and a member's /proc/meminfo."""

    def __init__(self, root: Path, write: Callable[..., Path], run: Callable[..., dict[str, Any]], config: dict[str, Any]) -> None:
        self.root, self.run_module, self.config = root, run, config
        tensors = {"embed.weight": ("BF16", (2**20, 5120)), **shapes.exl3("layers.0.ffn.experts.0.w1", 5120, 2304, 3)}
        write(root / "model/model.safetensors", tensors)
        (root / "model/config.json").write_text(json.dumps(shapes.CONFIG))
        self.memory(120)

    def memory(self, gib: float) -> None:
        (self.root / "proc").mkdir(exist_ok=True)
        lines = {"MemTotal": 127_601_216, "MemFree": int(gib * 2**20), "MemAvailable": int(gib * 2**20)}
        (self.root / "proc/meminfo").write_text("".join(f"{name}:  {kib} kB\n" for name, kib in lines.items()))

    def plan(self, **options: Any) -> dict[str, Any]:
        paths = {"path": self.root / "model", "procfs_root": self.root / "proc"}
        return self.run_module("memory_plan", **{**paths, "config": self.config, "kv_bytes_per_token": 3466, "member": "t1", **options})


@pytest.fixture
def member(
    tmp_path: Path, write_tensors: Callable[..., Path], run_module: Callable[..., dict[str, Any]], config_b: dict[str, Any]
) -> Member:
    return Member(tmp_path, write_tensors, run_module, config_b)


def test_the_module_adds_up_and_names_what_fits(member: Member) -> None:
    result = member.plan()
    assert result["weights"]["vocabulary"] == 2**20 * 5120 * 2 // 2
    assert result["need"] == sum(result["parts"].values())
    assert result["bits"] == {"0": [3, 3]}
    assert (result["changed"], result["compared"], result["context"], result["note"]) == (False, True, 774_481, "")


def test_the_module_refuses_before_anything_starts(member: Member) -> None:
    need = member.plan()["need"]
    member.memory(need / GIB - 1)
    refused = member.plan()
    assert refused["msg"].startswith("t1 has")
    assert f"longest context that fits is {refused['context']} tokens" in refused["msg"]
    member.memory(1)
    assert "no context fits" in member.plan()["msg"]


def test_a_checkpoint_that_cannot_be_read_is_no_reason_to_skip(member: Member) -> None:
    """The kit's gate is skipped when its budget fails; ours is not."""
    (member.root / "model/model.safetensors").write_bytes(b"<!DOCTYPE html>")
    assert "is an HTML page" in member.plan()["msg"]
    (member.root / "model/model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is no index" in member.plan()["msg"]
    (member.root / "model/config.json").unlink()
    assert "config.json cannot be read" in member.plan()["msg"]
    assert "config.json cannot be read" in member.plan(path=member.root / "elsewhere")["msg"]


def test_hosts_without_a_gpu_need_what_their_container_may_take(member: Member) -> None:
    container = {**member.config["container"], "gpus": False, "memory_mib": 8192}
    member.memory(9)
    result = member.plan(config={**member.config, "container": container}, kv_bytes_per_token=None)
    assert result["need"] == 8192 * 2**20
    container["memory_mib"] = 7168
    assert "raise memory.container_limit_mib" in member.plan(config={**member.config, "container": container})["msg"]


def test_headers_are_read_from_files_as_they_were_described(tmp_path: Path, write_tensors: Callable[..., Path]) -> None:
    """Some of system B as files on a disk, with holes for data."""
    some = list(itertools.islice(shapes.system_b(), 3))
    for file, tensors in some:
        write_tensors(tmp_path / file, tensors)
    headers, problems = _survey.tensor_headers(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert problems == []
    read = [pair for tensors in headers.values() for pair in tensors.items()]
    assert weigh(read, 2, vision=True).parts == weigh(described(lambda: iter(some)), 2, vision=True).parts
