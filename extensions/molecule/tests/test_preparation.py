# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a profile asks for beside the files: padded heads, Engram tables as each rank reads them, and old checkpoints that go."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.module_utils import _engram
from testinfra.host import Host

from extensions.molecule.tests.lab_checkpoint import HUB, hub
from extensions.molecule.tests.lab_hosts import ROOT

MODELS, PACKED = "/var/lib/gb10/models", "/var/lib/gb10/engram/prepared"
SHARD, TABLES = "model-00001-of-00048.safetensors", "model-00047-of-00048.safetensors"

pytestmark = pytest.mark.storage


def config() -> dict[str, Any]:
    """A config.json like the release's, with tables of a few thousand rows."""
    numbers = {"engram_layer_ids": [1], "engram_vocab_size": 500, "engram_n_heads": 8, "engram_max_ngram_size": 4, "engram_head_dim": 256}
    primes = [number for number in range(500, 1000) if all(number % divisor for divisor in range(2, 32))]
    return {"text_config": {**numbers, "engram_num_embeddings": [sum(primes[:24])], "num_attention_heads": 64, "o_groups": 8}}


def tensors(*parts: tuple[str, str, tuple[int, int]]) -> bytes:
    """A safetensors file of one-byte numbers, which are random."""
    header, end = {}, 0
    for name, dtype, (rows, columns) in parts:
        begin, end = end, end + rows * columns
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(1).randbytes(end)


class Prepared:
    """A profile with preparations, and the runs that bring it."""

    def __init__(self, root: Path, playbook: Any) -> None:
        self.root, self.playbook, self.repository = root, playbook, root / "repository"
        self.layout = _engram.layouts(config())[0]
        self.repository.mkdir()
        (self.repository / "config.json").write_text(json.dumps(config()))
        (self.repository / SHARD).write_bytes(tensors(("norm", "F8_E4M3", (1000, 1000))))
        weight, scale = _engram.tensor_names(1)
        rows = self.layout.rows
        (self.repository / TABLES).write_bytes(
            tensors((weight, "F8_E4M3", (rows, 256)), (scale, "F8_E8M0", (rows, 8)), ("q", "U8", (1, 5)))
        )

    def run(self, name: str, *arguments: str) -> str:
        """Bring the checkpoint under a name; the output."""
        source = {"kind": "hub", "repository": "lab/checkpoint", "revision": "main"}
        heads = {"num_attention_heads": 72, "o_groups": 9, "from": {"num_attention_heads": 64, "o_groups": 8}}
        engram = {
            "directory": "prepared-engram",
            "source": {**source, "include": ["config.json", TABLES]},
            "size_gib": 0.01,
            "packed_mount": "/engram-packed",
        }
        profile = yaml.safe_load((ROOT / "profiles/lab-tiny.yml").read_text())
        profile["name"] = "profile"
        profile["checkpoint"] |= {"name": name, "directory": name, "preparation": {"virtual_heads": heads, "engram": engram}}
        (self.root / "profile.yml").write_text(yaml.safe_dump(profile))
        variables = {
            "cluster_name": "prepared",
            "cluster_profile": str(self.root / "profile.yml"),
            "storage_origin": {**source, "include": ["config.json", SHARD]},
            "storage_source": "",
            "storage_endpoint": f"http://{HUB[0]}:{HUB[1]}",
            "storage_pinned_manifest_file": f"{self.root}/{{{{ storage_checkpoint }}}}.json",
            "storage_manifest_file": "{{ storage_pinned_manifest_file }}",
            "storage_check_memory": False,  # these are no weights of a model
        }
        # Of the inventory, since the role brings the tables with values of its own for some of these.
        (self.root / "more.yml").write_text(yaml.safe_dump({"sparks": {"hosts": dict.fromkeys(("t1", "t2", "t3"), variables)}}))
        done = self.playbook("site", "-i", str(self.root / "more.yml"), "--tags", "storage", *arguments)
        assert done.returncode == 0, done.stdout
        output: str = done.stdout
        return output


def heads_of(host: Host, directory: str, name: str = "config.json") -> int:
    text = json.loads(host.check_output(f"cat {MODELS}/{directory}/{name}"))["text_config"]
    return int(text["num_attention_heads"])


def test_preparations(tmp_path: Path, playbook: Any, hosts: dict[str, Host]) -> None:
    prepared = Prepared(tmp_path, playbook)
    try:
        with hub(prepared.repository, 0):
            prepared.run("prepared-a", "--check", "--diff")
            assert not hosts["t1"].file(f"{MODELS}/prepared-a").exists
            prepared.run("prepared-a")
        for rank, host in enumerate(hosts.values()):
            assert (heads_of(host, "prepared-a"), heads_of(host, "prepared-a", "config.json.orig-hf")) == (72, 64)
            tables = f"{MODELS}/prepared-engram"
            assert sorted(host.check_output(f"ls {tables}").split()) == ["config.json", TABLES, "model.safetensors.index.json"]
            assert host.check_output(f"stat -c %i {tables}/{TABLES}") == host.check_output(f"stat -c %i {tables}-release/{TABLES}")
            packed = _engram.Packed(prepared.layout, rank, 3)
            assert host.check_output(f"stat -c '%n %s' {PACKED}/*") == f"{PACKED}/{packed.name} {packed.size}"
        assert not re.search(r"changed=[1-9]", prepared.run("prepared-a")), "a second run has something to do"

        # Of what the head has padded, a new member gets the original, and pads it itself.
        hosts["t3"].check_output(f"rm -rf {MODELS}/prepared-a")
        prepared.run("prepared-a")
        assert (heads_of(hosts["t3"], "prepared-a"), heads_of(hosts["t3"], "prepared-a", "config.json.orig-hf")) == (72, 64)

        with hub(prepared.repository, 0):
            prepared.run("prepared-b", "-e", "storage_keep=0")
        for host in hosts.values():
            names = set(host.check_output(f"ls {MODELS}").split())
            assert names >= {"prepared-b", "prepared-engram", "prepared-engram-release"} and "prepared-a" not in names
    finally:
        for host in hosts.values():
            host.run(f"rm -rf {MODELS}/prepared-* {PACKED}")
