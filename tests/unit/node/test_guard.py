# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory guard: its decisions over generated and reported memory traces, and the service over files of a procfs and a real process."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from gb10_node import guard as rules
from gb10_node.guard import Guard
from gb10_node.guard_service import Watch, watch
from gb10_node.memory import Memory, MemoryReader
from hypothesis import given
from hypothesis import strategies as st

GIB = 1024
FLOORS = {"floor_mib": 1536, "flush_floor_mib": 4096, "load_cached_mib": 40960}
POLL = 2.0
EASY = Memory(free=20 * GIB, available=40 * GIB, cached=20 * GIB)


def run(guard: Guard, looks: Iterable[tuple[str, Memory]], start: float = 0.0) -> list[str]:
    """The actions over looks that are one poll apart; a drop is written with its reason."""
    steps = [guard.step(start + POLL * number, phase, memory) for number, (phase, memory) in enumerate(looks)]
    return [f"drop {reason}" if action == "drop" else action for action, reason in steps]


def serving(*available_gib: float, free: float | None = None, pressure: float = 0.0) -> list[tuple[str, Memory]]:
    """Looks at a serving group with no cache that is worth dropping."""
    return [("serving", Memory(int((a if free is None else free) * GIB), int(a * GIB), 100, pressure)) for a in available_gib]


def test_a_start_begins_with_an_empty_page_cache() -> None:
    looks = [("waiting", EASY), ("starting", EASY), ("starting", EASY), ("loading", EASY)]
    assert run(Guard(**FLOORS), looks) == ["", "drop before the start", "", ""]


def test_while_weights_are_read_the_cache_is_dropped_at_most_every_five_seconds() -> None:
    full = Memory(2 * GIB, 115 * GIB, 113 * GIB)
    assert run(Guard(**FLOORS), [("loading", full)] * 5) == ["drop while loading", "", "", "drop while loading", ""]


def test_the_cache_of_a_member_that_neither_loads_nor_serves_is_its_own() -> None:
    full = Memory(2 * GIB, 115 * GIB, 113 * GIB)
    assert not any(run(Guard(**FLOORS), [(phase, full) for phase in ("absent", "waiting", "stopped", "failed") for dummy in range(9)]))


def test_a_serving_group_gets_its_free_memory_back_from_the_cache() -> None:
    low = Memory(3 * GIB, 9 * GIB, 6 * GIB)
    assert run(Guard(**FLOORS), [("serving", low)]) == ["drop while serving"]
    assert run(Guard(**FLOORS), [("serving", Memory(3 * GIB, 3 * GIB, rules.FLUSH_WORTH_MIB))]) == [""]


def test_little_free_but_enough_available_memory_is_a_healthy_server() -> None:
    """MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark#54: this trace had its server killed."""
    trace = zip((1.35, 1.31, 1.22, 1.28, 1.40), (7.1, 7.0, 7.0, 6.9, 7.0), strict=True)
    looks = [("serving", Memory(int(f * GIB), int(a * GIB), 100)) for f, a in trace]
    assert not any(run(Guard(**FLOORS), looks * 10))


def test_the_floor_ends_the_group_after_a_last_drop() -> None:
    looks = serving(1.1, 0.9, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5, pressure=35.0)
    assert run(Guard(**FLOORS), looks) == ["", "", "", "", "", "drop at the floor", "end", ""]


def test_the_end_says_which_limit_it_was() -> None:
    for looks, words in (
        (serving(*[0.5] * 8, free=0.3, pressure=35.0), f"below the floor of {FLOORS['floor_mib']} MiB available"),
        (serving(*[3.0] * 8, free=1.0, pressure=35.0), f"below {FLOORS['flush_floor_mib']} MiB free, with at least 25 % of the time lost"),
    ):
        guard = Guard(**FLOORS)
        told = [guard.step(2.0 * number, *look) for number, look in enumerate(looks)]
        assert [reason for action, reason in told if action == "end" and words in reason], told


def test_pressure_with_little_free_memory_is_the_floor_as_well() -> None:
    assert run(Guard(**FLOORS), serving(*[3.0] * 8, free=1.0, pressure=35.0))[-2:] == ["end", ""]
    assert not any(run(Guard(**FLOORS), serving(*[30.0] * 8, free=20.0, pressure=90.0))), (
        "somebody else's control group is short, not the member"
    )


def test_a_dip_that_is_shorter_than_the_floor_s_time_is_a_prefill() -> None:
    assert not any(run(Guard(**FLOORS), serving(*[1.0, 1.0, 1.0, 1.0, 9.0] * 5)))


def test_a_last_drop_that_helped_ends_nothing() -> None:
    assert run(Guard(**FLOORS), serving(*[1.0] * 6, 9.0, *[1.0] * 6))[-1] == "drop at the floor"


def test_it_ends_a_group_once_and_is_armed_again_by_the_next_one_that_serves() -> None:
    guard = Guard(**FLOORS)
    assert run(guard, serving(*[0.5] * 60)).count("end") == 1
    again = [("stopped", EASY), ("starting", EASY), *serving(*[0.5] * 60)]
    assert run(guard, again, start=1000.0).count("end") == 1


PHASES = st.sampled_from(["absent", "waiting", "starting", "loading", "serving", "stopped"])
LOOKS = st.builds(
    lambda free, cached, pressure: Memory(free, free + cached, cached, pressure),
    st.integers(0, 8 * GIB), st.integers(0, 60 * GIB), st.floats(0, 100),
)  # fmt: skip


@given(st.lists(st.tuples(PHASES, LOOKS), max_size=60))
def test_over_any_trace(looks: list[tuple[str, Memory]]) -> None:
    guard = Guard(**FLOORS)
    actions = run(guard, looks)
    for number, action in enumerate(actions):
        phase = looks[number][0]
        if action == "end":
            assert phase == "serving"
            held = int(rules.FLOOR_S / POLL)
            below = [p == "serving" and guard._is_below(m) for p, m in looks[number - held : number + 1]]
            assert len(below) == held + 1
            assert all(below), "ends only what was below the floor all the time"
            assert actions[number - 1] == "drop at the floor"
        if action.startswith("drop while"):
            since = [n for n in range(number) if actions[n].startswith("drop")]
            assert not since or (number - since[-1]) * POLL >= rules.DROP_EVERY_S
        if phase in ("absent", "waiting", "stopped"):
            assert action == ""


# The service.


class Member:
    """A procfs as files, a run directory and a rank: a real process that ends on SIGTERM as the supervisor does."""

    def __init__(self, root: Path) -> None:
        self.procfs, self.run = root / "proc", root / "run"
        (self.procfs / "sys/vm").mkdir(parents=True)
        (self.procfs / "pressure").mkdir()
        (self.run / "lab").mkdir(parents=True)
        self.dropped = self.procfs / "sys/vm/drop_caches"
        self.dropped.write_text("")
        self.memory(40 * GIB, 1 * GIB)
        # The signal's own effect, also where the tests run in the background of a shell, which ignores it there.
        self.rank = subprocess.Popen(["env", "--default-signal=QUIT", "sleep", "60"])
        while Path(f"/proc/{self.rank.pid}/comm").read_text() != "sleep\n":
            pass
        (self.procfs / str(self.rank.pid)).mkdir()
        self.unit("gb10-rank@lab.service")

    def unit(self, name: str) -> None:
        (self.procfs / str(self.rank.pid) / "cgroup").write_text(f"0::/system.slice/system-gb10\\x2drank.slice/{name}\n")

    def memory(self, free: int, cached: int) -> None:
        lines = {"MemTotal": 121 * GIB, "MemFree": free, "MemAvailable": free + cached, "Buffers": 1, "Cached": cached, "SwapCached": 0}
        (self.procfs / "meminfo").write_text("".join(f"{name + ':':16}{mib << 10:>8} kB\n" for name, mib in lines.items()))
        (self.procfs / "pressure/memory").write_text(
            "some avg10=1.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=1\n"
        )

    def phase(self, phase: str) -> None:
        (self.run / "lab/new").write_text(json.dumps({"phase": phase, "pid": self.rank.pid}))
        (self.run / "lab/new").replace(self.run / "lab/state.json")

    def watch(self, at_floor: str = "stop") -> Watch:
        return Watch("lab", at_floor, Guard(**FLOORS), str(self.run), str(self.procfs))


@pytest.fixture
def member(tmp_path: Path) -> Iterable[Member]:
    made = Member(tmp_path)
    yield made
    made.rank.kill()
    made.rank.wait()


def starve(member: Member, watch: Watch) -> list[str]:
    member.phase("serving")
    member.memory(1 * GIB, 100)
    return [watch.once(2.0 * number) for number in range(10)]


def test_the_service_drops_the_cache_when_the_rank_starts(member: Member, capsys: pytest.CaptureFixture[str]) -> None:
    watch = member.watch()
    assert watch.once(0.0) == ""
    member.phase("starting")
    assert watch.once(2.0) == "drop"
    assert member.dropped.read_text() == "3"
    assert "page cache dropped: before the start; MemFree 40960 -> 40960 MiB, Cached 1024 -> 1024 MiB" in capsys.readouterr().out


def test_the_service_stops_the_rank_at_the_floor_and_says_why(member: Member) -> None:
    assert starve(member, member.watch()).count("end") == 1
    assert member.rank.wait(timeout=60) == -signal.SIGTERM
    record = json.loads((member.run / "lab/guard.json").read_text())
    assert record["action"] == "rank told to stop"
    assert record["low_water_mib"] == GIB + 100
    assert "below the floor of 1536 MiB" in record["reason"]


def test_what_it_did_is_told_until_the_group_loads_again(member: Member) -> None:
    """Also where the guard itself is not started anew with the rank, and where it is while the rank still waits for memory."""
    record, watch = member.run / "lab/guard.json", member.watch()
    starve(member, watch)
    for phase, watcher in (("stopped", watch), ("waiting", member.watch())):
        member.phase(phase)
        watcher.once(100.0)
        assert record.exists()
    member.phase("loading")
    watch.once(200.0)
    assert not record.exists()


def test_a_group_that_loads_between_two_looks_is_a_new_one_as_well(member: Member) -> None:
    watch = member.watch()
    starve(member, watch)
    member.memory(40 * GIB, 0)
    for number, phase in enumerate(("stopped", "serving")):
        member.phase(phase)
        watch.once(100.0 + number)
    assert not (member.run / "lab/guard.json").exists()


def test_to_log_leaves_the_rank_alone(member: Member) -> None:
    assert starve(member, member.watch("log")).count("end") == 1
    assert member.rank.poll() is None
    assert json.loads((member.run / "lab/guard.json").read_text())["action"] == "rank would be stopped"


def test_to_kill_leaves_the_rank_no_time(member: Member) -> None:
    starve(member, member.watch("kill"))
    assert member.rank.wait(timeout=60) == -signal.SIGQUIT


def test_a_number_that_has_come_to_mean_another_process_is_left_alone(member: Member) -> None:
    member.unit("ssh.service")
    assert not any(starve(member, member.watch()))
    assert member.rank.poll() is None


def test_what_is_no_procfs_is_said_to_be_none(member: Member) -> None:
    (member.procfs / "meminfo").write_text("nothing")
    with pytest.raises(ValueError, match="meminfo has no MemFree"):
        MemoryReader(str(member.procfs)).read()


def test_the_guard_is_small(tmp_path: Path) -> None:
    """As it is installed, on the real procfs. 15 MiB is the promise."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from plugins.lookup.node_package import package

    (tmp_path / "node.pyz").write_bytes(base64.b64decode(package()))
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/rank.json").write_text(json.dumps({"guard": {"at_floor": "log", **FLOORS}}))
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'node.pyz')!r}); from gb10_node.guard_service import watch; watch('lab', {str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while "watches group" not in process.stdout.readline():
                pass
            time.sleep(0.5)  # past its first look
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    assert int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) < 15 * 1024


def test_a_member_without_a_rank_has_no_guard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert watch("lab", str(tmp_path)) == 78
    assert "run the service role on this member" in capsys.readouterr().out
