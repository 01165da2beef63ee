# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""GID tables as sysfs trees: those of the public reports, and any order at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils._roce import Gid, Hca, expand, judge, judge_selector, read_hcas
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.sysfs import write_tree

TABLES = yaml.safe_load((Path(__file__).parents[2] / "fixtures/gid_tables.yml").read_text())
FOUR = ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"]


def verdict(root: Path, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    netdevs = dict(title.split() for title in case["hcas"])
    planned = {name: (netdevs.get(name, "none"), address) for name, address in case["planned"].items()}
    return judge(read_hcas(write_tree(root, case["hcas"])), planned, **more)


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case["name"])
def test_every_reported_table_gets_its_verdict(tmp_path: Path, case: dict[str, Any]) -> None:
    result = verdict(tmp_path, case)
    assert [row["gid_index"] for row in result["hcas"]] == case["indexes"]
    assert [row["verdict"] for row in result["hcas"]] == case["verdicts"]
    assert result["gid_index"] == case["common"]
    assert case.get("reason", "") in result["gid_reason"]
    assert len(result["problems"]) == len(case.get("problems", []))
    for problem, words in zip(result["problems"], case.get("problems", []), strict=True):
        assert words in problem
    if "holes" in case:
        assert result["hcas"][0]["holes"] == case["holes"]


@pytest.mark.parametrize("case", [case for case in TABLES if "pinned" in case], ids=lambda case: case["name"])
def test_a_pinned_index_is_held_against_every_table(tmp_path: Path, case: dict[str, Any]) -> None:
    """Cases C08 and C09: no number for all hosts; the sentence shows the table."""
    result = verdict(tmp_path, case, pinned=case["pinned"]["index"])
    (problem,) = result["problems"]
    assert [words for words in case["pinned"]["words"] if words not in problem] == []
    assert result["hcas"][0]["verdict"] == "pinned"
    right = verdict(tmp_path / "again", case, pinned=case["common"])
    assert right["problems"] == []


def test_an_absent_hca_is_named_with_what_there_is(tmp_path: Path) -> None:
    # Case C11: no number instead.
    root = write_tree(tmp_path, {"rocep1s0f1 enp1s0f1np1": {"gids": ["1 v2 ll", "5 v2 10.77.1.1"]}})
    result = judge(read_hcas(root), {"rocep1s0f9": ("enp1s0f9np9", "10.77.1.1")})
    (problem,) = result["problems"]
    assert problem.startswith("HCA rocep1s0f9 does not exist")
    assert problem.endswith("active with an address is rocep1s0f1 (10.77.1.1 at 5)")
    assert (result["gid_index"], result["hcas"]) == (None, [])


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("rocep1s0f0,roceP2p1s0f0", ["rocep1s0f0", "roceP2p1s0f0"]),
        ("=rocep1s0f0,roceP2p1s0f0", ["rocep1s0f0", "roceP2p1s0f0"]),
        ("roce", FOUR),
        ("=roce", []),
        ("rocep1", ["rocep1s0f0", "rocep1s0f1"]),
        ("^rocep1s0f1,roceP2p1s0f1", ["rocep1s0f0", "roceP2p1s0f0"]),
        ("^=rocep1s0f1", ["rocep1s0f0", "roceP2p1s0f0", "roceP2p1s0f1"]),
        ("rocep1s0f0:1", ["rocep1s0f0"]),
        ("rocep1s0f0:2", []),
        ("mlx5", []),
        ("^mlx5", FOUR),
    ],
)
def test_a_selector_is_read_as_nccl_does(selector: str, meant: list[str]) -> None:
    # Case C10.
    assert expand(selector, FOUR) == meant


def test_every_hca_of_a_selector_is_looked_at(tmp_path: Path) -> None:
    # Case C10: of four devices only cage 0 is active; the two ports that are down are told, not silently used.
    up = {"gids": ["0 v1 ll", "1 v2 ll", "2 v1 10.77.1.1", "3 v2 10.77.1.1"]}
    down = {"state": "1: DOWN", "gids": ["0 v1 ll", "1 v2 ll"]}
    tree = {"rocep1s0f0 a": up, "roceP2p1s0f0 b": up, "rocep1s0f1 c": down, "roceP2p1s0f1 d": down}
    hcas = read_hcas(write_tree(tmp_path, tree))
    assert judge_selector(hcas, "=rocep1s0f0,roceP2p1s0f0")["gid_index"] == 3
    result = judge_selector(hcas, "roce")
    assert sorted(problem[:17] for problem in result["problems"]) == ["HCA roceP2p1s0f1 "[:17], "HCA rocep1s0f1 is"[:17]]
    assert (result["gid_index"], len(result["hcas"])) == (None, 4)
    (problem,) = judge_selector(hcas, "mlx5")["problems"]
    assert problem.startswith("NCCL_IB_HCA 'mlx5' means no HCA of this host (roceP2p1s0f0, roceP2p1s0f1, rocep1s0f0, rocep1s0f1)")


def test_two_addresses_of_one_hca_are_not_chosen_between(tmp_path: Path) -> None:
    tree = {"rocep1s0f0 a": {"gids": ["1 v2 ll", "3 v2 10.77.1.1", "5 v2 192.0.2.1"]}}
    (problem,) = judge_selector(read_hcas(write_tree(tmp_path, tree)), "roce")["problems"]
    assert problem == "HCA rocep1s0f0 carries 10.77.1.1, 192.0.2.1: leave one address on a"


IP = "10.77.1.1"
ENTRIES = [
    ("IB/RoCE v1", "fe80::1"),
    ("RoCE v2", "fe80::1"),
    ("IB/RoCE v1", f"::ffff:{IP}"),
    ("RoCE v2", f"::ffff:{IP}"),
    ("RoCE v2", "::ffff:192.0.2.1"),
]


@given(st.permutations(ENTRIES), st.lists(st.booleans(), min_size=10, max_size=10))
def test_any_order_with_any_holes_gives_the_entry_itself(order: list[tuple[str, str]], holes: list[bool]) -> None:
    slots = [slot for slot, hole in enumerate(holes) if not hole][: len(order)]
    gids = tuple(Gid(slot, kind, gid, "n") for slot, (kind, gid) in zip(slots, order, strict=False))
    hca = Hca("h", "n", "4: ACTIVE", 200, 9000, gids)
    index = hca.index_of(IP)
    assert [(gid.type, gid.gid) for gid in gids if gid.index == index] == ([("RoCE v2", f"::ffff:{IP}")] if index is not None else [])
    assert (index is None) == (("RoCE v2", f"::ffff:{IP}") not in order[: len(gids)])
    assert set(hca.holes) | {gid.index for gid in gids} == set(range(max((gid.index for gid in gids), default=-1) + 1))
