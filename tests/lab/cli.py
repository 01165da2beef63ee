# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's command line: `python -m tests.lab VERB`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from .backend import State
from .lab import BACKENDS, DEFAULT_BACKEND, Lab
from .progress import LabError, step
from .topology import CONTROLLER

DEFAULT_HOSTS = 3
DEFAULT_PROFILE = "lab-smollm2"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.act(Lab(), options) or 0
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except subprocess.SubprocessError as error:
        print(f"lab: {error}; `down` and then `up` start afresh", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; `up` goes on from here, `down` clears it away", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab", description="Real test hosts on this machine; GB10_LAB names the lab (default: lab)."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, help_text: str, act: object, *positionals: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_text, description=help_text)
        for positional in positionals:
            sub.add_argument(positional)
        sub.set_defaults(act=act)
        return sub

    up = verb("up", "start the lab, or go on with what is there", lambda lab, o: lab.up(o.hosts, o.backend))
    prepare = verb("prepare", "up, and build what the hosts are to serve", lambda lab, o: lab.prepare(o.hosts, o.profile, o.backend))
    backend = os.environ.get("GB10_LAB_BACKEND") or DEFAULT_BACKEND
    for sub in (up, prepare):
        sub.add_argument(
            "--hosts", type=int, default=DEFAULT_HOSTS, help="how many (default: %(default)s); 2 are a pair, 3 and more a ring"
        )
        sub.add_argument(
            "--backend",
            choices=sorted(BACKENDS),
            default=backend,
            help=f"what they are made of (default: GB10_LAB_BACKEND, else {DEFAULT_BACKEND})",
        )
    profile = os.environ.get("GB10_LAB_PROFILE") or DEFAULT_PROFILE
    prepare.add_argument("--profile", default=profile, help=f"what is to be served (default: GB10_LAB_PROFILE, else {DEFAULT_PROFILE})")
    verb("down", "remove the lab, leave nothing", lambda lab, o: lab.down())
    verb("status", "show hosts and legs", _status)
    run = verb("exec", "run a command inside a host", _exec, "host")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    run = verb("run", "run a command in the controller's network namespace", _run)
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    verb("off", "cut a host's power", lambda lab, o: lab.power_off(o.host), "host")
    verb("on", "power a host on and wait until it has booted", _on, "host")
    verb("hang", "freeze a host: it keeps its links and answers nothing", lambda lab, o: lab.backend.hang(lab.host(o.host)), "host")
    verb("resume", "let a hung host go on", lambda lab, o: lab.backend.resume(lab.host(o.host)), "host")
    verb("cut", "take a leg down; its peer loses the carrier", lambda lab, o: lab.set_leg(o.host, o.netdev, up=False), "host", "netdev")
    verb("mend", "take a leg up again", lambda lab, o: lab.set_leg(o.host, o.netdev, up=True), "host", "netdev")
    fill = verb("fill", "fill a host's disk", lambda lab, o: print(lab.fill(o.host, o.leave), end=""), "host")
    fill.add_argument("--leave", type=int, default=0, metavar="MIB", help="free space to leave (default: %(default)s)")
    verb("drain", "undo fill", lambda lab, o: print(lab.drain(o.host), end=""), "host")
    return parser


def _command(options: argparse.Namespace) -> list[str]:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LabError("no command given: write it after `--`")
    return command


def _exec(lab: Lab, options: argparse.Namespace) -> int:
    return lab.backend.exec(lab.host(options.host), _command(options)).returncode


def _run(lab: Lab, options: argparse.Namespace) -> None:
    lab.topology()  # refuses if the lab is not up
    argv = lab.network.enter(CONTROLLER, _command(options))
    os.execvp(argv[0], argv)


def _on(lab: Lab, options: argparse.Namespace) -> None:
    with step(f"{options.host} is on"):
        lab.power_on(options.host)


def _status(lab: Lab, _options: argparse.Namespace) -> int:
    """One screen; status 0 only if every host has booted."""
    topology = lab.topology()
    print(f"lab {lab.name}   controller {lab.network.namespace(CONTROLLER)}   state {lab.state}")
    booted = True
    for host in topology.hosts:
        state = lab.backend.state(host)
        booted &= state.booted
        advice = {State.OFF: f"   -> on {host.name}", State.HUNG: f"   -> resume {host.name}"}.get(state, "")
        print(f"\n{host.name}  {state.value:9} {host.address}  {lab.backend.memory_bytes(host) >> 20} MiB{advice}")
        links = {link["ifname"]: link for link in lab.backend.links(host)}
        peers = {a: b for leg in topology.legs() for a, b in (leg, leg[::-1])}
        for port in topology.ports():
            if port.host == host:
                link = links[port.netdev]
                carrier = "down" if "UP" not in link["flags"] else "carrier" if "LOWER_UP" in link["flags"] else "no carrier"
                addresses = ", ".join(f"{a['local']}/{a['prefixlen']}" for a in link["addr_info"] if a["family"] == "inet") or "-"
                peer = f"{peers[port].host.name}.{peers[port].cage}" if port in peers else "nothing"
                print(f"    {port.cage}{port.half} {port.netdev:14} {carrier:10} mtu {link['mtu']:<5} {addresses:18} to {peer}")
    return 0 if booted else 1
