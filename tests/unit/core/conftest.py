# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inputs that the tests of the core vary."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from ansible_collections.gb10.cluster.plugins.plugin_utils import _inputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What was found valid in an earlier run says nothing about this one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def members() -> list[dict[str, Any]]:
    return [{"name": f"t{rank}", "address": f"198.51.100.{10 + rank}"} for rank in (1, 2, 3)]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {
        "cluster_name": "ring",
        "cluster_profile": "dsv41-exl3-3.5bpw-tp3",
        "cluster_topology": "ring",
        "cluster_management_network": "198.51.100.0/24",
    }


@pytest.fixture(scope="session")
def _profile() -> dict[str, Any]:
    return _inputs.load_profile("dsv41-exl3-3.5bpw-tp3")


@pytest.fixture
def profile(_profile: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(_profile)
