#!/usr/bin/python
# Copyright: gb10.cluster contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is at the other end of every port, by layer 2."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cable_check
short_description: See which member, cage and half is at the other end of every port
version_added: 0.1.0
description:
  - Sends beacons out of each of the four ports and listens there for those of the other members, on layer 2. Ports need no address.
  - All members must run it at the same time, so C(forks) must not be smaller than their number, or the task be asynchronous with O(window)
    long enough for the last one to start.
  - It ends as soon as every planned neighbour was heard and has heard this member, else after O(window).
  - The filter P(gb10.cluster.cabling#filter) holds the observations of all members against the plan and says which plug to move.
author: [gb10.cluster contributors (@gb10-cluster)]
extends_documentation_fragment: [gb10.cluster._attributes]
attributes:
  check_mode:
    support: full
    details:
      - Ports that are administratively down stay down then, and say so.
  diff_mode:
    support: N/A
    details:
      - What it brings up is down again at its end.
  idempotent:
    support: full
options:
  member:
    description: This member's name in the plan.
    type: str
    required: true
  cluster:
    description: What tells this cluster's beacons from those of another on the same switch, such as the plan's digest.
    type: str
    required: true
  legs:
    description: The member's legs from the plan (C(members.NAME.legs)), to know when all was heard.
    type: list
    elements: dict
    required: true
  window:
    description: Seconds to listen where not everything is heard before. A link needs some seconds after its port came up.
    type: float
    default: 15
seealso:
  - plugin: gb10.cluster.cabling
    plugin_type: filter
"""

EXAMPLES = r"""
- name: See what is at the other end of every port
  gb10.cluster.cable_check:
    member: "{{ inventory_hostname }}"
    cluster: "{{ plan.cluster.digest }}"
    legs: "{{ plan.members[inventory_hostname].legs }}"
  register: cables

- name: Hold it against the plan
  ansible.builtin.assert:
    that: cabling.ok
    fail_msg: "{{ cabling.message }}"
  run_once: true
  vars:
    seen: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, ['cables', 'ports']))) }}"
    cabling: "{{ plan | gb10.cluster.cabling(seen) }}"
"""

RETURN = r"""
ports:
  description: >-
    Each of the four ports with C(cage), C(half), C(netdev), whether it is C(present), is C(down) by choice, was C(raised) for the check and
    has a C(carrier), and C(heard), the ports whose beacons came in, each as C(member), C(cage) and C(half).
  returned: always
  type: list
  elements: dict
seconds:
  description: How long it took.
  returned: always
  type: float
"""

import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import _cabling, _host
from ..module_utils._cabling import End
from ..module_utils._topology import PORTS, Port

INTERVAL_S = 0.1
"""Between two beacons of a port."""
NET = Path("/sys/class/net")
IFF_UP = 1


@dataclass
class Listener:
    """A port that is being listened to. `socket` is None where there is no such device or it stays down."""

    port: Port
    end: End
    expected: frozenset[End]
    socket: socket.socket | None = None
    down: bool = False
    raised: bool = False
    carrier: bool = False
    heard: set[End] = field(default_factory=set)
    known_by: set[End] = field(default_factory=set)

    @property
    def netdev(self) -> str:
        return self.port.netdev

    @property
    def settled(self) -> bool:
        """Every planned neighbour was heard and says that it heard this port."""
        return self.expected <= self.heard & self.known_by

    def beacon(self, cluster: str) -> None:
        """Send one; a port that is down now may be up next time.

        A carrier counts when it was there once: the neighbour may have ended already, and its port be down again.
        """
        self.carrier |= _host.read(NET / self.netdev / "carrier") == "1"
        if self.socket:
            try:
                payload = _cabling.encode(cluster, self.end, self.heard)
                self.socket.sendto(payload, (self.netdev, _cabling.ETHERTYPE, 0, 0, _cabling.BROADCAST))
            except OSError:
                pass

    def hear(self, cluster: str) -> None:
        """Take in all that has arrived."""
        while self.socket:
            try:
                payload, (_device, _protocol, kind, *_rest) = self.socket.recvfrom(2048)
            except OSError:
                return
            beacon = _cabling.decode(cluster, payload)
            if beacon and kind != socket.PACKET_OUTGOING:
                self.heard.add(beacon.sender)
                if self.end.token in beacon.heard:
                    self.known_by.add(beacon.sender)

    def report(self) -> dict[str, Any]:
        """The port as data."""
        return {
            "cage": self.port.cage,
            "half": self.port.half,
            "netdev": self.netdev,
            "present": (NET / self.netdev).exists(),
            "down": self.down,
            "carrier": self.carrier,
            "raised": self.raised,
            "heard": [asdict(end) for end in sorted(self.heard)],
        }


def planned_ends(legs: list[dict[str, Any]], port: Port) -> frozenset[End]:
    """Who the plan has at the other end of a port."""
    by_netdev = {other.netdev: other for other in PORTS}
    peers = [peer for leg in legs if leg["netdev"] == port.netdev for peer in leg["peers"]]
    return frozenset(End(peer["member"], by_netdev[peer["netdev"]].cage, by_netdev[peer["netdev"]].half) for peer in peers)


@contextmanager
def opened(listener: Listener, may_raise: bool) -> Iterator[None]:
    """A socket on the port, which is up meanwhile."""
    flags = _host.read(NET / listener.netdev / "flags")
    is_down = flags is not None and not int(flags, 16) & IFF_UP
    listener.raised, listener.down = is_down and may_raise, is_down and not may_raise
    if flags is None or listener.down:
        yield
        return
    try:
        if listener.raised:
            _host.run(["ip", "link", "set", listener.netdev, "up"])
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0) as packets:
            packets.bind((listener.netdev, _cabling.ETHERTYPE))
            listener.socket = packets
            yield
    finally:
        listener.socket = None
        if listener.raised:
            _host.run(["ip", "link", "set", listener.netdev, "down"])


def listen(cluster: str, listeners: list[Listener], window: float) -> list[dict[str, Any]]:
    """Send and hear until all is settled or the window is over; what was seen then."""
    end = time.monotonic() + window
    sockets = [listener.socket for listener in listeners if listener.socket]
    while True:
        for listener in listeners:
            listener.beacon(cluster)
        if all(listener.settled for listener in listeners) or time.monotonic() > end:
            # The beacons just sent were this port's last: they tell the neighbours that it heard them.
            return [listener.report() for listener in listeners]
        pause = time.monotonic() + INTERVAL_S
        while (left := pause - time.monotonic()) > 0:
            select.select(sockets, [], [], left)
            for listener in listeners:
                listener.hear(cluster)


def leave(_signal: int, _frame: Any) -> None:
    """A connection that is lost ends the module in order: ports that it brought up go down again."""
    raise SystemExit(1)


def main() -> None:
    """Listen and report."""
    module = AnsibleModule(
        argument_spec={
            "member": {"type": "str", "required": True},
            "cluster": {"type": "str", "required": True},
            "legs": {"type": "list", "elements": "dict", "required": True},
            "window": {"type": "float", "default": 15},
        },
        supports_check_mode=True,
    )
    parameters = module.params
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    listeners = [Listener(port, End(parameters["member"], port.cage, port.half), planned_ends(parameters["legs"], port)) for port in PORTS]
    begin = time.monotonic()
    try:
        with ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(opened(listener, not module.check_mode))
            ports = listen(parameters["cluster"], listeners, parameters["window"])
    except PermissionError:
        module.fail_json(msg="raw sockets need root: run the play with become")
    module.exit_json(changed=False, ports=ports, seconds=round(time.monotonic() - begin, 3))


if __name__ == "__main__":
    main()
