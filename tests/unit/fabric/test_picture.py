# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cabling pictures: those of the documentation are what the plans give today, and each shows the whole plan."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from ansible_collections.gb10.cluster.plugins.module_utils import _picture

from tests.unit.fabric.figures import INVENTORIES, figure, plan_of


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_the_documents_picture_is_the_plans(inventory: str) -> None:
    assert figure(inventory).read_text() == _picture.svg(plan_of(inventory)), "run tools/figures and look at the result"


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_a_picture_shows_every_member_address_and_network(inventory: str) -> None:
    plan = plan_of(inventory)
    words = " ".join(ET.fromstring(_picture.svg(plan)).itertext())
    for name, member in plan["members"].items():
        assert name in words and member["management"]["address"] in words
        assert all(f"{leg['half']} {leg['address']}" in words for leg in member["legs"])
    assert all(f"{leg['half']} {leg['network']}" in words for leg in plan["fabric"]["legs"])


def test_every_cable_has_a_line_from_socket_to_socket() -> None:
    plan = plan_of("ring4")
    lines = [element for element in ET.fromstring(_picture.svg(plan)) if element.tag.endswith("path")]
    assert len(lines) == len(plan["fabric"]["cables"])
    assert len({line.get("stroke") for line in lines}) == len(lines)


def test_names_are_text_and_not_markup() -> None:
    plan: dict[str, Any] = plan_of("pair")
    plan["members"] = {f"<{name}>": member for name, member in plan["members"].items()}
    plan["cluster"] |= {"members": list(plan["members"]), "head": next(iter(plan["members"]))}
    for leg in plan["fabric"]["legs"]:
        leg["ends"] = [{**end, "member": f"<{end['member']}>"} for end in leg["ends"]]
    assert "<spark-head>" in " ".join(ET.fromstring(_picture.svg(plan)).itertext())
