# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Images built from a recipe, pulled from a real registry, shipped by their missing layers, proven inside of them; and what goes wrong with it.

The images are small: Debian with Python, the lowest layer of the lab's engine image, and a file or two. No model is served.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pip
import pytest
import yaml
from ansible_collections.gb10.cluster.plugins.lookup import image_recipe
from ansible_collections.gb10.cluster.plugins.module_utils import _image, _recipe
from testinfra.host import Host

from extensions.molecule.tests.conftest import Playbook
from extensions.molecule.tests.lab_hosts import ROOT
from extensions.molecule.tests.registry import ADDRESS, LIAR, TOKEN, USER, registry, serving
from tests.lab.engine import base, image, oci

PORT, LOGIN_PORT, LIAR_PORT = 5000, 5001, 5002
BASE = f"{ADDRESS}:{PORT}/lab/base:1"
MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
NO_PASS = "LABEL gb10.cluster.requires=engine\n"  # these images hold no vLLM

pytestmark = pytest.mark.runtime


class World:
    """A registry's folder, the lab's hosts, and runs of the runtime role on them."""

    def __init__(self, folder: Path, hosts: dict[str, Host], playbook: Playbook, engine: str) -> None:
        self.folder, self.hosts, self._playbook = folder, hosts, playbook
        self.base = ""
        self.engine = engine

    def run(self, image: dict[str, Any], *arguments: str, **variables: Any) -> str:
        """site.yml --tags runtime with a profile of this image; its output, with the recap. Every secret has to stay out of it."""
        profile = yaml.safe_load((ROOT / "profiles/lab-tiny.yml").read_text())
        path = self.folder / "lab-tiny.yml"
        path.write_text(yaml.safe_dump({**profile, "image": image}))
        given = {"cluster_profile": str(path), "cluster_image_archive": None, **variables}
        done = self._playbook("site", "--tags", "runtime", "-e", json.dumps(given), *arguments)
        output = done.stdout + done.stderr
        assert TOKEN not in output
        self.status = done.returncode
        return output

    def refused(self, image: dict[str, Any], words: str, *arguments: str, **variables: Any) -> None:
        """The run fails with a sentence that has these words."""
        output = self.run(image, *arguments, **variables)
        assert self.status, output
        assert re.search(words, re.sub(r"\s+", " ", output)), output

    def changed(self, output: str) -> dict[str, int]:
        """Changed tasks by host."""
        assert self.status == 0, output
        return {name: int(count) for name, count in re.findall(r"^(t\d) .*changed=(\d+)", output, re.MULTILINE)}

    def contents(self, reference: str) -> dict[str, str]:
        """Content of this image on each host; empty where it is not there."""
        found = {}
        for name, host in self.hosts.items():
            done = host.run(f"{self.engine} image inspect %s", reference)
            found[name] = _image.described(json.loads(done.stdout)[0]).content if done.rc == 0 else ""
        return found

    def publish(self, reference: str, text: str) -> None:
        """Build an image on the base, on t2, and push it."""
        host = self.hosts["t2"]
        build, push = f"{self.engine} build --quiet --network=host --tag {reference} -", f"{self.engine} push --quiet {reference}"
        host.run_expect([0], f"printf %s '{text}' | {build} && {push} && {self.engine} image rm --force {reference}")

    def clear(self, host: Host) -> None:
        """Leave no image on a host."""
        host.run_expect([0], f"{self.engine} image prune --all --force")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, hosts: dict[str, Host], plan: dict[str, Any], playbook: Playbook) -> Iterator[World]:
    """A registry with the base image, which all hosts reach without TLS."""
    world = World(tmp_path_factory.mktemp("registry"), hosts, playbook, plan["cluster"]["engine"])
    for host in hosts.values():
        trust(host, world.engine)
        world.clear(host)
        host.run_expect([0], "rm -rf /var/lib/gb10/checks /var/lib/gb10/images")
    archive = world.folder / "base.tar"
    oci.write_image(archive, BASE, [("base", base.base_tree())], {"Cmd": ["python3"]})
    with registry(world.folder, PORT):
        copy(archive, "/root/base.tar")
        hosts["t2"].run_expect([0], f"{world.engine} load --quiet --input /root/base.tar && {world.engine} push --quiet {BASE}")
        asked = f"curl -sfI -H 'Accept: {MANIFESTS}' http://{ADDRESS}:{PORT}/v2/lab/base/manifests/1"
        world.base = hosts["t2"].check_output(f"{asked} | sed -n 's/^docker-content-digest: //Ip' | tr -d '\\r'")
        world.clear(hosts["t2"])
        hosts["t2"].run_expect([0], "rm /root/base.tar")
        yield world


def trust(host: Host, engine: str) -> None:
    """Let a host's engine ask the test's registries without TLS."""
    registries = [f"{ADDRESS}:{port}" for port in (PORT, LOGIN_PORT, LIAR_PORT)]
    if engine == "docker":
        settings = json.loads(host.check_output("cat /etc/docker/daemon.json")) | {"insecure-registries": registries}
        host.run_expect([0], f"printf %s {shlex.quote(json.dumps(settings))} > /etc/docker/daemon.json && systemctl reload docker")
    else:
        settings = "".join(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n' for registry in registries)
        folder = "/etc/containers/registries.conf.d"
        host.run_expect([0], f"mkdir -p {folder} && printf %s {shlex.quote(settings)} > {folder}/lab.conf")


def copy(path: Path, target: str) -> None:
    """A file to t2, by the lab's own way in."""
    with path.open("rb") as file:
        subprocess.run(
            [sys.executable, "-m", "tests.lab", "exec", "t2", "--", "sh", "-c", f"cat > {target}"], cwd=ROOT, stdin=file, check=True
        )


class Recipe:
    """A recipe of two files on the lab's base, in the layout of the collection's own."""

    def __init__(self, folder: Path, digest: str, last: str = "") -> None:
        self.folder = folder
        lock = {
            "platform": _image.own_platform(),
            "base": {"reference": BASE, "digest": digest, "source": "synthetic: the test's own registry"},
            "engine": {"version": "0.0.0"},
            "nccl": {"features": []},
            "wheels": {},
        }
        text = f"ARG BASE\nFROM ${{BASE}}\nCOPY runtime/image/note /note\n{last}ARG STAMP\nLABEL gb10.cluster.stamp=${{STAMP}}\n"
        for path, content in ((_recipe.CONTAINERFILE, text), (_recipe.LOCK, json.dumps(lock))):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        self.write("first")

    def write(self, note: str) -> None:
        (self.folder / "runtime/image/note").write_text(note)

    def image(self, reference: str = "localhost/lab/built:1", **more: str) -> dict[str, Any]:
        return {"reference": reference, "source": {"kind": "build", "recipe": str(self.folder), **more}}


def shipped_bytes(output: str) -> int:
    """What image_export laid out, from a run with -v."""
    part = output.partition("Lay the layers out]")[2].partition("TASK [")[0]
    return sum(map(int, re.findall(r"size: (\d+)", part)))


def test_a_recipe_is_built_once_shipped_by_its_missing_layers_and_a_second_run_changes_nothing(world: World, tmp_path: Path) -> None:
    recipe = Recipe(tmp_path, world.base)
    first = world.run(recipe.image(), "-v")
    assert all(world.changed(first).values())
    assert len(set(world.contents("localhost/lab/built:1").values()) - {""}) == 1
    assert shipped_bytes(first) > 50_000_000  # the base as well: nobody had it

    second = world.run(recipe.image())
    assert set(world.changed(second).values()) == {0}

    recipe.write("second")
    before = world.contents("localhost/lab/built:1")
    third = world.run(recipe.image(), "-v")
    assert all(world.changed(third).values())
    contents = set(world.contents("localhost/lab/built:1").values())
    assert len(contents) == 1 and contents != set(before.values())
    assert 0 < shipped_bytes(third) < 100_000  # the one layer that is new
    for host in world.hosts.values():
        assert host.check_output(f"{world.engine} run --rm --network none localhost/lab/built:1 cat /note") == "second"
        assert not host.file("/var/lib/gb10/images").exists
        kept = json.loads(host.file(f"/var/lib/gb10/checks/{min(contents)}.json").content_string)
        assert kept["passed"] and kept["image"]["content"] in contents


def test_a_build_that_fails_says_the_line_and_leaves_the_image_as_it_was(world: World, tmp_path: Path) -> None:
    before = world.contents("localhost/lab/built:1")
    recipe = Recipe(tmp_path, world.base, last="RUN python3 -c 'raise SystemExit(\"the note is wrong\")'\n")
    world.refused(
        recipe.image(), r"the build of localhost/lab/built:1 failed \(.*the note is wrong.*\): see /run/gb10/jobs/image-build.log"
    )
    assert world.contents("localhost/lab/built:1") == before
    assert not world.hosts["t1"].check_output("ls /var/lib/gb10 | grep ^build- || true")


def test_an_image_that_lacks_what_it_promises_stops_the_role_with_the_line(world: World, tmp_path: Path) -> None:
    recipe = Recipe(tmp_path, world.base, last=NO_PASS)
    world.refused(
        recipe.image("localhost/lab/empty:1"), r"localhost/lab/empty:1 fails its check \(engine: there is no Python module vllm\)"
    )
    # It is remembered as no pass.
    world.refused(recipe.image("localhost/lab/empty:1"), r"fails its check \(engine:")


def test_a_tag_that_moved_leads_to_no_second_image_and_a_stray_gets_the_heads(world: World) -> None:
    reference = f"{ADDRESS}:{PORT}/lab/app:1"
    wanted = {"reference": reference, "source": {"kind": "registry"}}
    world.publish(reference, f"FROM {BASE}\nLABEL version=1\n")
    world.changed(world.run(wanted))
    first = world.contents(reference)
    assert len(set(first.values())) == 1 and "" not in first.values()

    world.publish(reference, f"FROM {BASE}\nLABEL version=2\n")
    assert world.contents(reference)["t2"] == ""  # publish removed it there
    assert world.changed(world.run(wanted))["t1"] == 0  # and what the head has is right
    assert world.contents(reference) == first

    world.hosts["t3"].run_expect(
        [0],
        f"{world.engine} tag {BASE} {reference} || {world.engine} pull --quiet {BASE} && {world.engine} tag {BASE} {reference}",
    )
    world.refused(wanted, "of this member is not the image that t1 has", runtime_obtain="never")
    assert world.changed(world.run(wanted))["t3"] > 0
    assert world.contents(reference) == first


def test_a_registry_that_wants_a_login_gets_one_that_stays_nowhere(world: World) -> None:
    reference = f"{ADDRESS}:{LOGIN_PORT}/lab/base:1"
    wanted = {"reference": reference, "source": {"kind": "registry"}}
    with registry(world.folder, LOGIN_PORT, login=True):
        world.refused(
            wanted, f"{reference} was not pulled .* {ADDRESS}:{LOGIN_PORT} wants a login, or another one: set runtime_registry_user"
        )
        world.changed(world.run(wanted, runtime_registry_user=USER, runtime_registry_token=TOKEN))
    for host in world.hosts.values():
        assert (
            host.run(
                "grep -rslF %s /etc/containers /etc/docker /root/.config /root/.docker /run/gb10 /run/containers /var/lib/gb10 /tmp", TOKEN
            ).stdout
            == ""
        )
        assert TOKEN not in host.check_output("journalctl --no-pager -q")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (f"{ADDRESS}:5009/lab/base:1", f"{ADDRESS}:5009 cannot be reached from this member: see that it is up"),
        (f"{ADDRESS}:{PORT}/lab/base:9", f"{ADDRESS}:{PORT} does not have it: correct the reference"),
        (f"{ADDRESS}:{PORT}/lab/base@sha256:{'0' * 64}", f"{ADDRESS}:{PORT} does not have it"),
        (f"{ADDRESS}:{LIAR_PORT}/lab/base@sha256:{'0' * 64}", f"{ADDRESS}:{LIAR_PORT} serves another image for it: correct the digest"),
    ],
    ids=["down", "no such tag", "no such digest", "another digest"],
)
def test_what_a_registry_does_not_give_is_one_sentence(world: World, reference: str, words: str, tmp_path: Path) -> None:
    liar = tmp_path / "liar.py"
    liar.write_text(LIAR)
    with serving([sys.executable, str(liar), ADDRESS, str(LIAR_PORT)], LIAR_PORT):
        world.refused({"reference": reference, "source": {"kind": "registry"}}, re.escape(words), "--limit", "t1")
    assert world.contents(_image.local_name(reference))["t1"] == ""


def test_a_published_image_of_another_recipe_is_not_taken(world: World, tmp_path: Path) -> None:
    """What is pulled leads to no name, and the recipe is built; or, where nothing may be built, the run says both stamps."""
    published = f"{ADDRESS}:{PORT}/lab/published:1"
    recipe = Recipe(tmp_path, world.base)
    world.publish(published, f"FROM {BASE}\nLABEL {_image.STAMP_LABEL}=0123456789abcdef\n")
    wanted = recipe.image("localhost/lab/published:1", published=published)
    world.refused(wanted, "serves an image of recipe 0123456789abcdef for .*, expected [0-9a-f]{64}", runtime_obtain="pull")
    assert set(world.contents("localhost/lab/published:1").values()) == {""}
    world.changed(world.run(wanted))
    contents = world.contents("localhost/lab/published:1")
    assert len(set(contents.values())) == 1 and "" not in contents.values()


def test_what_needs_no_gpu_compiler_of_the_real_recipe_is_built_and_answers(world: World) -> None:
    """The first stage of the collection's Containerfile, on the lab's engine image with pip: kernels and overlay install, the reference answers."""
    host = world.hosts["t2"]
    copy(image.engine_image(), "/root/engine.tar")
    host.run_expect([0], f"{world.engine} load --quiet --input /root/engine.tar && rm /root/engine.tar")
    context = world.folder / "context.tar.gz"
    context.write_bytes(_recipe.archive(_recipe.context(image_recipe.files(ROOT)) | pip_files()))
    copy(context, "/root/context.tar.gz")
    host.run_expect([0], "rm -rf /root/context && mkdir /root/context && tar -xzf /root/context.tar.gz -C /root/context")
    with_pip = f"FROM {image.REFERENCE}\nCOPY pip /usr/lib/python3/dist-packages/pip\n"
    host.run_expect(
        [0],
        f"printf %s '{with_pip}' > /root/context/Base && cd /root/context"
        f" && {world.engine} build -q --network=none -t localhost/lab/pip:1 -f Base .",
    )
    build = f"{world.engine} build --network=none --target=packages --build-arg=BASE=localhost/lab/pip:1 --tag=localhost/lab/packages:1"
    host.run_expect([0], f"cd /root/context && {build} --file={_recipe.CONTAINERFILE} .")
    check = f"{world.engine} run --rm --network=none localhost/lab/packages:1 python3 /opt/gb10/check.py --require=engine,kernels,engram"
    output = host.check_output(f"{check} || true")
    results = json.loads(output.splitlines()[-1])["checks"]
    assert {name: results[name]["result"] for name in ("engine", "kernels", "engram", "library")} == {
        "engine": "ok", "kernels": "ok", "engram": "ok", "library": "absent",
    }, output  # fmt: skip
    assert results["overlay"]["result"] != "absent", output


def pip_files() -> dict[str, _recipe.File]:
    """The pip of this environment as files of a build's context."""
    folder = Path(pip.__file__).parent
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {f"pip/{path.relative_to(folder)}": _recipe.File(path.read_bytes()) for path in found}
