# Copyright: gb10.cluster contributors
# SPDX-License-Identifier: Apache-2.0
"""The rank supervisor: ExecStart of gb10-rank@GROUP. One life is one attempt of the whole group.

Every rank ends with a status of its own kind: 0 asked to stop, 1 this rank failed, 75 the group ended because of
another rank, 69 nothing is started because the group keeps failing. systemd starts it again after 1 and 75, up to the unit's
start limit, and it then waits for all the others: so a lost member stops the group everywhere, and its return starts the
group everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Mapping

from gb10_core import _start

from gb10_node import canary, evidence, health, start_checks
from gb10_node.config import Peer, RankConfig
from gb10_node.coordination import LINE_LIMIT, GroupEnd, Link, LinkLost, Message
from gb10_node.engine import RankContainer, Stuck
from gb10_node.evidence import FAILED_RUN, FAILED_START, HANG, Evidence, event_name
from gb10_node.guard import LOADING
from gb10_node.memory import MemoryReader
from gb10_node.recovery import Book, Failure, judge
from gb10_node.start_checks import Checked
from gb10_node.state import State, notify
from gb10_node.tasks import beside, first_of

STATUS_STOPPED, STATUS_FAILED, STATUS_BREAKER_OPEN, STATUS_GROUP_ENDED = 0, 1, 69, 75
RETRY_S = 1.0
SETTLE_S = 1.0
"""A container that runs after this long stands: wrong arguments end it earlier. On a busy member the engine takes longer until it runs at all."""
HEARD_S = 5.0
"""Time between two looks at whether the engine has logged anything."""
LINES_S = 30.0
"""A line that the plan wants and that has not come so long after the first token does not come."""
MEMORY_LINE_S = 10.0
"""Time between two lines on a member's memory while the model loads."""
WARM_UP_S, WARM_UP_TOKEN = 240.0, 100
"""Time for one prompt of the warm-up (MiaAI-Lab's two-Spark kit), and the token that the first one repeats: a low number, which every vocabulary
has. Each has its own, or the prefix cache would compute it."""
CAUSE_S = 10.0
"""An engine refuses a token a moment before the rank that took it down has ended, whose own reason says more."""
ANSWER_LIMIT_S = 3600.0
"""A canary's token may wait behind long prefills; whether the group is dead is decided by the silence."""


async def supervise(config: RankConfig) -> int:
    """Run this rank until the group ends; returns the unit's exit status."""
    state = State(config)
    if config.is_head and (verdict := judge(Book(config.failures).read(), config.recovery.backoff_s, time.time())).is_open:
        state.stay_down(
            f"the group keeps failing, the last time because {verdict.reason}: see its log, then run playbook gb10.cluster.start"
        )
        return STATUS_BREAKER_OPEN
    supervisor = Head(config, state) if config.is_head else Worker(config, state)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)

    def kill() -> None:
        """The memory guard's last resort: no grace for the container."""
        supervisor.container.grace_s = 0
        stopped.set()

    loop.add_signal_handler(signal.SIGQUIT, kill)
    notify("READY=1")
    try:
        await first_of(supervisor.run(), stopped.wait())
        end = supervisor.own_end("was stopped", stopped=True)
    except GroupEnd as group_end:
        end = group_end
    # Not later: a container may take its time to stop, and whoever starts the group meanwhile waits for what comes after.
    ended_at = time.time()
    notify("STOPPING=1")
    # Said at once: who asks while the container stops must not hear that the group serves.
    state.enter("stopping", "" if stopped.is_set() else end.reason)
    await supervisor.end(end)
    if stopped.is_set():
        state.enter("stopped")
        return STATUS_STOPPED
    state.fail(end.reason, end.culprit, end.log, ended_at, str(config.evidence / end.event) if end.event else "", end.stopped)
    if config.is_head and end.counts:
        try:
            Book(config.failures).add(Failure(ended_at, end.reason))
        except OSError as error:  # a full disk: the next start waits for nothing, but for the others
            print(f"gb10: this failure is not counted ({error})", flush=True)
    return STATUS_FAILED if end.culprit == config.me.member else STATUS_GROUP_ENDED


class Supervisor:
    """What both kinds of rank share: the container and its end."""

    def __init__(self, config: RankConfig, state: State) -> None:
        self.config, self.state = config, state
        self.container = RankContainer(config)
        self.links: dict[int, Link] = {}

    async def run(self) -> None:
        """One attempt; raises GroupEnd."""
        raise NotImplementedError

    def own_end(self, what: str, *, stopped: bool = False) -> GroupEnd:
        """The group ends because of this rank, which `what`, but did not fail."""
        return GroupEnd(f"{self.config.me} {what}", self.config.me.member, stopped=stopped)

    def own_failure(self, what: str, kind: str = "") -> GroupEnd:
        """The group ends because this rank failed: it `what`; `kind` is that of the evidence, where the phase does not say it."""
        kind = kind or (FAILED_RUN if self.state.data["phase"] == "serving" else FAILED_START)
        event = event_name(kind, time.time())
        return GroupEnd(f"{self.config.me} {what}", self.config.me.member, self.container.tail, event=event)

    async def end(self, end: GroupEnd) -> None:
        """Tell the others, keep evidence of a failure, and stop the container."""
        await asyncio.gather(*(link.close(end.message()) for link in self.links.values()), self._finish(end))

    async def _finish(self, end: GroupEnd) -> None:
        if end.event:
            what = Evidence(end.event, end.reason, end.culprit, self.container.log)
            try:
                await asyncio.to_thread(evidence.collect, self.config, what)
            except OSError as error:  # a full disk: the group ends all the same
                print(f"gb10: no evidence is kept ({error})", flush=True)
        await self.container.stop()

    async def _check(self) -> Checked:
        """Whether this member can start the rank; raises GroupEnd. Nothing has started yet, so to end this ends no running group."""
        self.state.enter("waiting", "for the checks of this member")
        try:
            await self.container.remove()
            checked = await start_checks.check(self.config)
        except (Stuck, start_checks.Refused) as refusal:
            raise self.own_failure(f"cannot start: {refusal}") from refusal
        self.state.checked(checked.report, checked.events)
        return checked

    async def _tell_memory(self) -> None:
        """A line on this member's memory from time to time, until the group serves: a load that runs out of it leaves no other trace."""
        with contextlib.suppress(OSError, ValueError):
            reader = MemoryReader(self.config.procfs)
            while True:
                await asyncio.sleep(MEMORY_LINE_S)
                if self.state.data["phase"] not in LOADING:
                    return
                print(f"gb10: {reader.read()}", flush=True)

    async def _run_container(self, found: Mapping[str, str], started: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the container, call `started` once it stands, raise GroupEnd when it exits."""
        await self.container.start(found)
        async with beside(self._tell_memory()):
            await self._stay(started)

    async def _runs(self, exited: asyncio.Task[int]) -> bool:
        """Wait until the container runs; False where it has exited. Raises GroupEnd where the engine never gets there."""
        patience = self.config.recovery.load_silence_s
        deadline = time.monotonic() + patience
        while not (await asyncio.wait({exited}, timeout=SETTLE_S))[0]:
            if await self.container.first_process():
                return not exited.done()
            if time.monotonic() > deadline:
                raise self.own_failure(
                    f"has no container after {patience:.0f} s: {self.config.engine} is stuck, see its log and whether the disk has room",
                    HANG,
                )
        return False

    async def _stay(self, started: Callable[[], Awaitable[None]] | None) -> None:
        exited = asyncio.create_task(self.container.wait())
        if started is not None and await self._runs(exited):
            await started()
        status = await exited
        cause = f": it went over its memory limit of {self.config.container.memory_mib} MiB" if await self.container.over_memory() else ""
        raise self.own_failure(f"exited with status {status}{cause}")


def _lost(peer: Peer, error: LinkLost) -> GroupEnd:
    return GroupEnd(f"{peer} {error}", peer.member)


class Worker(Supervisor):
    """A rank above 0: follows the head."""

    def __init__(self, config: RankConfig, state: State) -> None:
        super().__init__(config, state)
        self._go = asyncio.Event()

    async def run(self) -> None:
        link = await self._asked_by_head()
        self.links[0] = link
        await first_of(self._follow(link), self._work(link))

    async def _work(self, link: Link) -> None:
        """Check this member, and when all ranks have, run the container."""
        checked = await self._check()
        await self._tell(link, {"kind": "checked", "fingerprint": checked.fingerprint})
        self.state.enter("waiting", "for the checks of the other members")
        await self._go.wait()
        self.state.enter("starting")
        await first_of(
            self._run_container(checked.environment, lambda: self._running(link)), self._tell_heard(link), self._tell_unsaid(link)
        )

    async def _tell_heard(self, link: Link) -> None:
        """Tell the head while the engine logs: whether the group hangs is judged over all ranks."""
        told = self.container.heard_at
        while True:
            await asyncio.sleep(HEARD_S)
            if self.container.heard_at > told:
                told = self.container.heard_at
                await self._tell(link, {"kind": "heard"})

    async def _tell_unsaid(self, link: Link) -> None:
        """Tell the head what this rank still has to log, whenever it becomes less."""
        told = sorted(self.config.start.log_lines)
        while told:
            await asyncio.sleep(RETRY_S)
            if self.container.unsaid != told:
                told = self.container.unsaid
                await self._tell(link, {"kind": "unsaid", "names": told})
        await asyncio.Event().wait()  # what ends here ends the rank

    async def _asked_by_head(self) -> Link:
        """Join the head, for as long as it takes: until it says check, nothing is lost when the link is."""
        head, trouble = self.config.head, ""
        while True:
            self.state.enter("waiting", f"for {head} at {head.address}:{self.config.coordination_port}{trouble}")
            link = await self._connect()
            try:
                await link.send({"kind": "hello", "rank": self.config.rank, "digest": self.config.digest})
                answer = await link.receive()
                if answer["kind"] == "welcome":
                    self.state.enter("waiting", "for the other ranks")
                    answer = await link.receive()
                if answer["kind"] == "check":
                    return link
                trouble = f"; {answer.get('reason')}"
            except (LinkLost, ConnectionError) as error:
                trouble = f"; it {error}"
            await link.close()
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> Link:
        """A link to the head, from the address by which it knows this rank."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                connection = asyncio.open_connection(
                    self.config.head.address, self.config.coordination_port, limit=LINE_LIMIT, local_addr=(self.config.me.address, 0)
                )
                return Link(*await asyncio.wait_for(connection, self.config.heartbeat_s), self.config.heartbeat_s)
            await asyncio.sleep(RETRY_S)

    async def _running(self, link: Link) -> None:
        self.state.enter("loading", "the model")
        await self._tell(link, {"kind": "running"})

    async def _tell(self, link: Link, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # a lost link ends the group through _follow
            await link.send(message)

    async def _follow(self, link: Link) -> None:
        while True:
            try:
                message = await link.receive()
            except LinkLost as error:
                raise _lost(self.config.head, error) from error
            if message["kind"] == "end":
                raise GroupEnd.received(message)
            if message["kind"] == "start":
                self._go.set()
            if message["kind"] == "serving":
                self.state.clear_failure()
                self.state.enter("serving")


class Head(Supervisor):
    """Rank 0: waits for the workers, starts them, then itself; proves the group by a token."""

    def __init__(self, config: RankConfig, state: State) -> None:
        super().__init__(config, state)
        self._changed = asyncio.Condition()
        self._started = False
        self._checked: dict[int, dict[str, str]] = {}
        self._running: set[int] = set()
        self._heard_at = 0.0
        self._unsaid = {peer.rank: sorted(config.start.log_lines) for peer in config.ranks[1:]}
        self._ends: asyncio.Queue[GroupEnd] = asyncio.Queue()

    async def run(self) -> None:
        address, port = self.config.head.address, self.config.coordination_port
        try:
            server = await asyncio.start_server(self._accept, address, port, limit=LINE_LIMIT)
        except OSError as error:
            raise self.own_end(f"cannot listen on {address}:{port} ({error.strerror}): free the port") from error
        try:
            await first_of(self._watch(), self._attempt())
        finally:
            server.close()

    async def _watch(self) -> None:
        raise await self._ends.get()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self.config.heartbeat_s)
        try:
            hello = await link.receive()
            peer = next((p for p in self.config.ranks[1:] if (p.rank, p.address) == (hello.get("rank"), link.address)), None)
            if peer is None:
                return await link.close(_refusal(f"{link.address} is not rank {hello.get('rank')} in the head's plan"))
            if hello.get("digest") != self.config.digest:
                return await link.close(_refusal("its plan is not the head's: run the service role on all members"))
            if self._started or peer.rank in self.links:
                return await link.close(_refusal("the group runs with an earlier start of this rank"))
            await link.send({"kind": "welcome"})
        except (LinkLost, ConnectionError):
            return await link.close()
        await self._listen(peer, link)

    async def _listen(self, peer: Peer, link: Link) -> None:
        """Hear a worker until its link is lost: before the start it may come back, afterwards the group ends with it."""
        await self._note(lambda: self.links.update({peer.rank: link}))
        try:
            while True:
                message = await link.receive()
                if message["kind"] == "end":
                    await self._ends.put(GroupEnd.received(message))
                elif message["kind"] == "checked":
                    await self._note(lambda found=message["fingerprint"]: self._checked.update({peer.rank: found}))
                elif message["kind"] == "running":
                    await self._note(lambda: self._running.add(peer.rank))
                elif message["kind"] == "unsaid":
                    self._unsaid[peer.rank] = message["names"]
                elif message["kind"] == "heard":
                    self._heard_at = time.monotonic()
        except LinkLost as error:
            if self._started:
                await self._ends.put(_lost(peer, error))
            else:
                await self._note(lambda: self.links.pop(peer.rank))
                await link.close()

    async def _note(self, change: Callable[[], object]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()

    async def _attempt(self) -> None:
        workers = self.config.ranks[1:]
        await self._back_off()
        await self._until("waiting", "for", lambda: [p for p in workers if p.rank not in self.links])
        self._started = True
        await self._tell("check")
        checked = await self._check()
        await self._until("waiting", "for the checks of", lambda: [p for p in workers if p.rank not in self._checked])
        for peer in workers:
            if other := _start.difference(checked.fingerprint, self._checked[peer.rank]):
                raise GroupEnd(
                    f"{peer} would start with another value of {other} than the head: run playbook gb10.cluster.start, which writes both anew",
                    peer.member,
                    event=event_name(FAILED_START, time.time()),
                )
        await self._tell("start")
        await self._until("starting", "the container of", lambda: [p for p in workers if p.rank not in self._running])
        await first_of(self._prove(), self._run_container(checked.environment))

    async def _back_off(self) -> None:
        """Wait after failures, until they no longer count: a person who starts the group meanwhile takes the book away."""
        until = ""
        while (verdict := judge(Book(self.config.failures).read(), self.config.recovery.backoff_s, time.time())).wait_s > 0:
            until = until or time.strftime("%H:%M:%S", time.localtime(time.time() + verdict.wait_s))
            self.state.enter("waiting", f"until {until}, because {verdict.reason}")
            await asyncio.sleep(min(verdict.wait_s, RETRY_S))

    async def _until(self, phase: str, words: str, missing: Callable[[], list[Peer]]) -> None:
        async with self._changed:
            while absent := missing():
                self.state.enter(phase, f"{words} {', '.join(str(p) for p in absent)}")
                await self._changed.wait()

    async def _tell(self, kind: str) -> None:
        for link in self.links.values():
            with contextlib.suppress(ConnectionError):  # a lost link ends the group through _listen
                await link.send({"kind": kind})

    async def _prove(self) -> None:
        """Wait for the API, generate one token, say that the group serves, and stay."""
        self.state.enter("loading", "the model")
        began = time.monotonic()
        while not await asyncio.to_thread(health.healthy, self.config.api):
            now = time.monotonic()
            if now > began + self.config.start_s:
                raise self.own_failure(f"did not become healthy within {self.config.start_s:.0f} s")
            if (silent_s := now - max(began, self._heard_at, self.container.heard_at)) > self.config.recovery.load_silence_s:
                raise self.own_failure(f"waits for the model, and no rank has logged a line for {silent_s:.0f} s", HANG)
            await asyncio.sleep(RETRY_S)
        self.state.enter("loading", "the first token")
        if refusal := await asyncio.to_thread(self._token, health.TOKEN_TIMEOUT_S):
            raise self.own_failure(f"is healthy but does not compute: {refusal}")
        await self._warm_up(began + self.config.start_s)
        await self._until_said()
        await self._tell("serving")
        self.state.clear_failure()
        self.state.enter("serving")
        while True:
            await asyncio.sleep(self.config.recovery.canary_interval_s)
            await self._canary()

    async def _warm_up(self, until: float) -> None:
        """Compute each of the profile's prompt lengths once, so that no user waits for what is compiled at its first sight, within the start's time.

        What does not work here is told and ends nothing: the group has generated a token.
        """
        for number, length in enumerate(self.config.start.warm_up):
            if (left := until - time.monotonic()) <= 0:
                self.state.tell(
                    f"no time was left to warm up {length} tokens: set a longer serving.start_timeout_s or fewer serving.warm_up"
                )
                return
            self.state.enter("loading", f"{length} tokens, to warm up")
            if trouble := await asyncio.to_thread(self._token, min(left, WARM_UP_S), [WARM_UP_TOKEN + number] * length):
                self.state.tell(f"{length} tokens were not warmed up, {trouble}")

    async def _until_said(self) -> None:
        """Wait until every rank has logged what the plan wants; raises GroupEnd for one that does not, which serves with something else than planned."""
        deadline = time.monotonic() + LINES_S
        while True:
            unsaid = {0: self.container.unsaid} | self._unsaid
            if not (peer := next((peer for peer in self.config.ranks if unsaid[peer.rank]), None)):
                return
            name = unsaid[peer.rank][0]
            if time.monotonic() > deadline:
                raise GroupEnd(
                    f"{peer} has not logged what says {name!r}, a line with {self.config.start.log_lines[name]!r}: see why it is off, or take it "
                    "out of the profile",
                    peer.member,
                    () if peer.rank else self.container.tail,
                    event=event_name(FAILED_START, time.time()),
                )
            self.state.enter("loading", f"{peer} has to log what says {name!r}")
            await asyncio.sleep(RETRY_S)

    def _token(self, timeout_s: float, prompt: str | list[int] = "1") -> str | None:
        return health.one_token(self.config.api, self.config.served_model_name, self.config.api_key, timeout_s, prompt)

    async def _canary(self) -> None:
        """One token, however long it takes while the engine moves; raises GroupEnd when none comes."""
        started = time.monotonic()
        silence = canary.Silence(started)
        answer = asyncio.create_task(asyncio.to_thread(self._token, ANSWER_LIMIT_S))
        while not (await asyncio.wait({answer}, timeout=canary.SAMPLE_S))[0]:
            quiet_s = silence.look(time.monotonic(), await asyncio.to_thread(canary.read_figures, self.config.api))
            if quiet_s >= self.config.recovery.canary_silence_s:
                raise self.own_failure(f"no longer computes: no token and no movement for {quiet_s:.0f} s ({silence})", HANG)
        if trouble := answer.result():
            await asyncio.sleep(CAUSE_S)
            raise self.own_failure(f"no longer computes: {trouble}")
        self.state.canary(time.monotonic() - started)


def _refusal(reason: str) -> Message:
    return {"kind": "refuse", "reason": reason}
