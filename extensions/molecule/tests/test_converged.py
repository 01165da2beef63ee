# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What site.yml brought the hosts to, seen from the hosts."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host

UNIT = "gb10-rank@lab.service"
KEY_FILE = "/etc/gb10/lab/api-key"


def state(host: Host) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(host.check_output("cat /run/gb10/lab/state.json"))
    return content


def test_kernel_settings_are_live_and_kept(host: Host) -> None:
    assert host.check_output("cat /proc/sys/vm/min_free_kbytes") == "1048576"
    assert host.check_output("cat /proc/sys/vm/watermark_scale_factor") == "200"
    kept = host.file("/etc/sysctl.d/90-gb10.conf").content_string
    assert "vm.min_free_kbytes = 1048576" in kept and "vm.watermark_scale_factor = 200" in kept


def test_no_swap_is_on_or_comes_back(host: Host) -> None:
    assert host.check_output("tail -n +2 /proc/swaps") == ""
    assert host.run(r"grep -E '^[^#].*\sswap\s' /etc/fstab").rc == 1


def test_legs_have_the_planned_address_and_mtu(host: Host, plan: dict[str, Any]) -> None:
    assert host.file("/etc/netplan/60-gb10-fabric.yaml").mode == 0o600
    legs = plan["members"][host.member]["legs"]
    assert len(legs) == 4
    for leg in legs:
        shown = json.loads(host.check_output(f"ip -json address show {leg['netdev']}"))[0]
        ipv4 = [f"{a['local']}/{a['prefixlen']}" for a in shown["addr_info"] if a["family"] == "inet"]
        assert (shown["mtu"], ipv4) == (9000, [f"{leg['address']}/{leg['prefix_length']}"])


def test_every_leg_carries_a_full_packet_unbroken(host: Host, plan: dict[str, Any]) -> None:
    for leg in plan["members"][host.member]["legs"]:
        for peer in leg["peers"]:
            host.check_output(f"ping -n -c 1 -W 2 -M do -s 8972 -I {leg['netdev']} {peer['address']}")
            assert host.run(f"ping -n -c 1 -W 2 -M do -s 8973 -I {leg['netdev']} {peer['address']}").rc != 0


def test_a_leg_keeps_its_address_when_its_peer_goes_down(hosts: dict[str, Host]) -> None:
    """Without ignore-carrier networkd takes the address away, and with it the GID."""
    hosts["t2"].check_output("ip link set enp1s0f1np1 down")
    try:
        assert "NO-CARRIER" in hosts["t1"].check_output("sleep 3; ip address show enp1s0f0np0")
        assert "inet 10.10.0.1/30" in hosts["t1"].check_output("ip address show enp1s0f0np0")
    finally:
        hosts["t2"].check_output("ip link set enp1s0f1np1 up")
    hosts["t1"].check_output("ping -n -c 1 -w 10 -I enp1s0f0np0 10.10.0.2")


def test_the_checkpoint_is_the_same_everywhere(hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    sums = [host.check_output(f"cd {plan['storage']['directory']} && sha256sum $(ls)") for host in hosts.values()]
    assert "model.safetensors" in sums[0]
    assert sums[0] == sums[1] == sums[2]


def test_the_same_image_runs_everywhere(hosts: dict[str, Host]) -> None:
    command = "podman inspect --format '{{.Image}} {{.State.Running}}' gb10-lab"
    images = {host.check_output(command) for host in hosts.values()}
    assert len(images) == 1 and images.pop().endswith(" true")


def test_the_rank_serves_and_comes_back_after_a_boot(host: Host) -> None:
    assert host.service(UNIT).is_running
    assert host.check_output("systemctl is-enabled gb10@lab.target") == "enabled"
    assert state(host)["phase"] == "serving"


def test_workers_started_before_the_head(hosts: dict[str, Host]) -> None:
    command = "podman inspect --format '{{.State.StartedAt.UnixMilli}}' gb10-lab"
    started = {name: int(host.check_output(command)) for name, host in hosts.items()}
    assert max(started["t2"], started["t3"]) < started["t1"]


def test_the_guard_watches_the_rank(host: Host) -> None:
    assert host.service("gb10-guard@lab.service").is_running
    assert "watches group lab, at the floor it stops the rank" in host.check_output(
        "journalctl -u gb10-guard@lab.service -o cat --no-pager"
    )


def test_the_exporter_knows_the_rank_and_is_on_the_management_network_alone(host: Host, plan: dict[str, Any]) -> None:
    address = plan["members"][host.member]["management"]["address"]
    said = host.check_output(f"curl -sf http://{address}:29620/metrics")
    assert f'gb10_rank_phase{{group="lab",rank="{plan["members"][host.member]["rank"]}",phase="serving"}} 1' in said
    assert 'gb10_port_mtu_bytes{device="enp1s0f0np0"} 9000' in said
    assert ("gb10_breaker_open" in said) == (host.member == "t1")
    leg = plan["members"][host.member]["legs"][0]["address"]
    assert host.run(f"curl -sf http://{leg}:29620/metrics").rc != 0


def test_units_beside_the_rank_may_do_little(host: Host) -> None:
    for unit in ("gb10-guard@lab.service", "gb10-exporter@lab.service"):
        assert "OK" in host.check_output(f"systemd-analyze security --no-pager {unit}").splitlines()[-1]


def test_only_the_key_opens_the_endpoint(hosts: dict[str, Host], plan: dict[str, Any]) -> None:
    def status(arguments: str) -> str:
        return hosts["t2"].check_output(f"curl -s -o /dev/null -w '%{{http_code}}' {arguments} {plan['service']['url']}/v1/models")

    assert status("") == "401"
    assert status("-H 'Authorization: Bearer wrong'") == "401"
    key = hosts["t1"].check_output(f"cat {KEY_FILE}")
    assert status(f"-H 'Authorization: Bearer {key}'") == "200"


def test_the_key_is_only_where_it_must_be(hosts: dict[str, Host]) -> None:
    key = hosts["t1"].check_output(f"cat {KEY_FILE}")
    assert len(key) >= 32
    assert hosts["t1"].file(KEY_FILE).mode == 0o600
    for host in hosts.values():
        shown = host.check_output(f"ps -ww -eo args; systemctl cat {UNIT}; systemctl show {UNIT}; journalctl -u {UNIT} --no-pager")
        assert key not in shown
    for name in ("t2", "t3"):
        assert not hosts[name].file(KEY_FILE).exists


def test_status_says_so(playbook: Any) -> None:
    done = playbook("status")
    assert done.returncode == 0, done.stdout
    assert "group lab: serving smollm2-135m-instruct" in done.stdout
    assert "->" not in done.stdout


def test_logs_show_each_rank(playbook: Any) -> None:
    done = playbook("logs", "-e", "lines=400")
    assert done.returncode == 0, done.stdout
    for member in ("t1", "t2", "t3"):
        assert f"{member} gb10-rank" in done.stdout
    assert "gb10: serving" in done.stdout
