# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sizes that must divide by the ranks, and the config.json that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _padding
from ansible_collections.gb10.cluster.plugins.module_utils._padding import PaddingError
from hypothesis import given
from hypothesis import strategies as st

REAL = {"num_attention_heads": 64, "o_groups": 8}
SHAPE = {"num_attention_heads": 72, "o_groups": 9, "from": REAL}
ORIGINAL = json.dumps({"model_type": "deepseek_v41", "text_config": {"hidden_size": 5120, **REAL, "vocab_size": 129280}}, indent=2)


@pytest.mark.parametrize(("ranks", "heads"), [(2, 64), (3, 66), (4, 64), (5, 65), (6, 66), (8, 64)])
def test_the_fewest_heads_are_added(ranks: int, heads: int) -> None:
    assert _padding.padded_heads(64, ranks) == heads


def test_an_alignment_that_leaves_a_rank_without_real_heads_is_refused() -> None:
    assert _padding.padded_heads(64, 3, alignment=8) == 72
    with pytest.raises(PaddingError, match=r"96 \(\+50 %\), and the last rank has none"):
        _padding.padded_heads(64, 6, alignment=8)


@given(st.integers(1, 256), st.integers(1, 16), st.integers(1, 16))
def test_every_rank_has_a_real_head_or_the_plan_is_refused(heads: int, ranks: int, alignment: int) -> None:
    try:
        padded = _padding.padded_heads(heads, ranks, alignment)
    except PaddingError:
        return
    share = padded // ranks
    assert padded >= heads
    assert share * ranks == padded
    assert share % alignment == 0
    assert heads > share * (ranks - 1)
    assert padded - heads < ranks * alignment


@pytest.mark.parametrize(("ranks", "shape"), [(2, (64, 8)), (3, (72, 9)), (4, (64, 8)), (8, (64, 8))])
def test_groups_are_padded_whole(ranks: int, shape: tuple[int, int]) -> None:
    assert _padding.padded_groups(64, 8, ranks) == shape


def test_other_sizes_are_padded_to_their_kernels_granule() -> None:
    assert [_padding.padded_vocabulary(129280, ranks) for ranks in (2, 3, 4)] == [129280, 129408, 129280]
    assert _padding.padded_vocabulary(154880, 3, granule=128) == 155136
    assert [_padding.padded_width(width, 3) for width in (2048, 2304, 12288)] == [2304, 2304, 12288]


@given(st.integers(1, 10**6), st.integers(1, 16), st.sampled_from([32, 64, 128]))
def test_padded_sizes_divide(size: int, ranks: int, granule: int) -> None:
    rows, width = _padding.padded_vocabulary(size, ranks, granule), _padding.padded_width(size, ranks, granule)
    assert rows >= size
    assert rows % ranks == rows % granule == width % (ranks * granule) == 0
    assert size <= width < size + ranks * granule


class Directory:
    """A checkpoint's directory with its config.json, and the module on it."""

    def __init__(self, path: Path, run: Callable[..., dict[str, Any]]) -> None:
        self.path, self._run = path, run
        self.config, self.original = path / "config.json", path / "config.json.orig-hf"
        self.config.write_text(ORIGINAL)

    def run(self, **options: Any) -> dict[str, Any]:
        return self._run("virtual_heads", **{"path": self.path, "ranks": 3, "shape": SHAPE, **options})

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.path.iterdir()}


@pytest.fixture
def directory(tmp_path: Path, run_module: Callable[..., dict[str, Any]]) -> Directory:
    return Directory(tmp_path, run_module)


def test_both_levels_and_the_marker_are_written_once(directory: Directory) -> None:
    result = directory.run()
    config = json.loads(directory.config.read_text())
    assert {key: config["text_config"][key] for key in REAL} == {"num_attention_heads": 72, "o_groups": 9}
    assert config["virtual_heads_from"] == config["text_config"]["virtual_heads_from"] == REAL
    assert "64 heads in 8 groups reported as 72 heads in 9 groups" in config["kai_tp3_virtual_heads"]
    assert config["text_config"]["hidden_size"] == 5120
    assert directory.original.read_text() == ORIGINAL
    assert "text_config.num_attention_heads: 64 -> 72" in result["changes"]
    assert "text_config.o_groups: 8 -> 9" in result["changes"]
    before = directory.files()
    assert not directory.run()["changed"]
    assert directory.files() == before


def test_a_check_shows_the_change_and_makes_none(directory: Directory) -> None:
    result = directory.run(check=True)
    assert result["changed"]
    assert '"o_groups": 9' in result["diff"]["after"]
    assert directory.files() == {"config.json": ORIGINAL}


def test_a_staged_original_is_padded_again_and_is_the_one_that_is_kept(directory: Directory) -> None:
    directory.run()
    newer = ORIGINAL.replace("129280", "129281")
    directory.config.write_text(newer)
    assert directory.run()["changed"]
    assert json.loads(directory.config.read_text())["text_config"]["vocab_size"] == 129281
    assert directory.original.read_text() == newer


def test_absent_restores_the_bytes(directory: Directory) -> None:
    directory.run()
    assert directory.run(state="absent", check=True)["changed"]
    assert directory.original.exists()
    assert directory.run(state="absent")["changed"]
    assert directory.files() == {"config.json": ORIGINAL}
    assert not directory.run(state="absent")["changed"]


def test_absent_keeps_a_newer_original(directory: Directory) -> None:
    directory.run()
    newer = ORIGINAL.replace("129280", "129281")
    directory.config.write_text(newer)
    directory.run(state="absent")
    assert directory.files() == {"config.json": newer}


def test_absent_without_an_original_says_so(directory: Directory) -> None:
    directory.run()
    directory.original.unlink()
    assert "is not kept beside it: fetch config.json again" in directory.run(state="absent")["msg"]


def test_what_another_tool_padded_is_done(directory: Directory) -> None:
    """LakyFx's files have no marker and no original; the numbers are what counts."""
    config = json.loads(ORIGINAL)
    config["text_config"].update({"num_attention_heads": 72, "o_groups": 9, "virtual_heads_from": REAL})
    config["virtual_heads_from"] = REAL
    directory.config.write_text(json.dumps(config))
    assert not directory.run()["changed"]


@pytest.mark.parametrize("change", [{"num_attention_heads": 80, "o_groups": 10}, {"vocab_size": 7}])
def test_a_file_that_is_not_its_originals_padding_is_made_anew(directory: Directory, change: dict[str, int]) -> None:
    """Padded for other ranks, or from another original, by whatever tool: the kept original says what is right."""
    directory.run()
    padded = directory.config.read_text()
    config = json.loads(padded)
    config["text_config"].update(change)
    directory.config.write_text(json.dumps(config))
    assert directory.run()["changed"]
    assert directory.config.read_text() == padded


def test_only_three_ranks_can_have_eight_groups_padded(directory: Directory) -> None:
    assert (
        "the last rank has none of the real ones"
        in directory.run(ranks=5, shape={"num_attention_heads": 80, "o_groups": 10, "from": REAL})["msg"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("[]", "no mapping"),
        ("{}", "no text_config"),
        (ORIGINAL.replace("64", "96"), "num_attention_heads 96, o_groups 8, expected 64 heads in 8 groups"),
        (ORIGINAL.replace("64", "72").replace('"o_groups": 8', '"o_groups": 9'), "num_attention_heads 72"),
        (ORIGINAL.replace('"vocab', f'"virtual_heads_from": {json.dumps(REAL)}, "vocab'), "expected 64 heads"),
    ],
)
def test_a_file_of_another_shape_stays_as_it_is(directory: Directory, text: str, words: str) -> None:
    directory.config.write_text(text)
    assert words in directory.run()["msg"]
    assert directory.files() == {"config.json": text}


def test_a_checkpoint_without_config_is_told(directory: Directory) -> None:
    directory.config.unlink()
    assert "has no config.json: fetch the checkpoint first" in directory.run()["msg"]


def test_numbers_that_do_not_follow_are_the_profiles_mistake(directory: Directory) -> None:
    wrong = {**SHAPE, "num_attention_heads": 66}
    assert "66 heads in 9 groups, but 64 heads in 8 groups over 3 ranks are 72 heads in 9 groups" in directory.run(shape=wrong)["msg"]
    assert "divide by 2 ranks as they are" in directory.run(ranks=2, shape={**REAL, "from": REAL})["msg"]
    assert "has no usable" in directory.run(shape={"from": REAL})["msg"]
    assert directory.files() == {"config.json": ORIGINAL}


def test_an_image_that_pads_at_launch_gets_no_padded_file(directory: Directory) -> None:
    assert "pads heads at launch" in directory.run(padded_at_launch=True)["msg"]
    assert directory.files() == {"config.json": ORIGINAL}
    directory.run()
    assert directory.run(padded_at_launch=True, state="absent")["changed"]
    assert directory.files() == {"config.json": ORIGINAL}
