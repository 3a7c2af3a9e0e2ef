"""Batches of commands to a Valkey Cluster: each command goes to the shard of its hash slot, one round trip per batch.

1. A shard that does not answer within the budget of a batch, whose connection is lost, or that says that it cannot reach the
   majority, is *away*: batches no longer wait for it, and its commands come back as ``UNANSWERED``. A background task probes
   it, and ends that after three quick answers.
   A shard that answers, but later than the budget of a lookup, is *slow*: only batches with a longer budget ask it. So changes
   go on. If no shard of a lookup's batch answers within the budget, nothing could be found, and perhaps this host is only busy.
   Then the batch waits ``PATIENCE`` times as long, also for slow shards if all of its shards are slow or away.
2. The topology is read again while a shard is away, after a redirection, and every few seconds, first from shards that are not
   away: one without the majority knows no promotion. So a promoted replica takes over as soon as the cluster names it.
3. Redirections (``MOVED``, ``ASK``) are followed within the batch, and within its budget.
4. The owner of the client is told (``on_moved``) which slots may have other contents than before: their primary changed, or was
   connected again after its connection was lost.

Lanes, each a connection per shard: publishing may wait for replicas (``WAIT``), which blocks its connection, and replies with
block events are large.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum, IntEnum
from functools import partial
from typing import Final, TypeAlias, cast

import hiredis

from kvstore.core.errors import KVStoreError, Unavailable, Unsupported
from kvstore.index.counts import Count, Observe, observe_nothing
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.connection import Reply, ValkeyConnection, connect, pack, refusal, silence
from kvstore.index.valkey.keys import SLOTS
from kvstore.index.valkey.topology import EMPTY, NO_SHARD, Topology, known_address, parse_cluster_slots
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

CONNECT_S: Final = 1.0
"""Deadline of one attempt to connect."""
PROBE_S: Final = 0.1
"""Pause between two probes of a shard that is away."""
REFRESH_S: Final = 5.0
"""Interval at which the topology is read when nothing happens."""
PATIENCE: Final = 5
"""Budgets that a lookup waits if no shard answers."""
GOOD_PROBES: Final = 3
"""Consecutive probes within the budget after which a shard is no longer away."""
MAX_REDIRECTIONS: Final = 4
RETRY_S: Final = 0.02
TRY_S: Final = 1.0
"""Time after which a shard that owes a reply to a change counts as away."""
WRITTEN_OFF_S: Final = 3.0
"""Time after which changes no longer wait for a shard that is away: longer than a replica usually takes to replace its primary.
A change that waits is late; one that does not is missing until nodes compare the range, after the shard is back."""
HUNG_S: Final = 10.0
"""Time after which a connection without an answer to a probe is replaced."""
_TRANSIENT: Final = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN", "READONLY", "UNBLOCKED", "NOREPLICAS"})
"""Codes of errors that end by themselves, or with the next topology."""
_DOWN: Final = "CLUSTERDOWN The cluster is down"
"""Error of a server that cannot reach the majority. Others of this code are about single slots, or about changes."""
_ASKING: Final = pack("ASKING")


class NoAnswer(Enum):
    """Type of ``UNANSWERED``."""

    UNANSWERED = 0


UNANSWERED: Final = NoAnswer.UNANSWERED
"""In place of a reply: the command's shard did not answer in time. It may or may not have run."""
Answer: TypeAlias = "Reply | NoAnswer"
Command: TypeAlias = "tuple[int, bytes]"
"""A hash slot and an encoded command."""


class Lane(IntEnum):
    """Connections of a shard, by purpose."""

    READS = 0
    WRITES = 1
    EVENTS = 2


_BATCH_SECONDS: Final = {
    Lane.READS: metadata_metrics.INDEX_BATCH_SECONDS["reads"],
    Lane.WRITES: metadata_metrics.INDEX_BATCH_SECONDS["writes"],
}


class ShardPrimary:
    """The primary of one shard as this process sees it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.up = False
        """Whether the shard answers within the budget of a lookup."""
        self.slow = False
        """Whether the shard answers, but later."""
        self.away_since_s = time.monotonic()
        self.connections: list[ValkeyConnection | None] = [None] * len(Lane)
        self.connecting = [asyncio.Lock() for _ in Lane]
        """Held while a lane is connected, so that callers who need it at the same time share one connection."""
        self.was_connected = False
        """Whether the shard was up before."""
        self.reconnected = False
        """Whether a connection is new since the shard was up: its server may have lost its contents."""
        self.closed = False

    def connection(self, lane: Lane) -> ValkeyConnection | None:
        """The open connection of a lane; None: there is none."""
        found = self.connections[lane]
        return found if found is not None and found.is_open else None

    def close(self) -> None:
        """Close the connections for good."""
        self.up, self.slow, self.closed = False, False, True
        self.drop_connections()

    def drop_connections(self) -> None:
        """Close the connections. Pending requests end without a reply."""
        for connection in self.connections:
            if connection is not None:
                connection.close()


class ShardBatch:
    """Replies to one batch, shard by shard."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.pending: set[ShardPrimary] = set()
        self.asked = 0
        """Number of shards that were asked."""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, shard: ShardPrimary, positions: Sequence[int], replies: list[Reply] | None) -> None:
        """Take the replies of one shard; None: its connection was lost."""
        if self.finished.done():
            return
        if replies is not None:
            for position, reply in zip(positions, replies, strict=True):
                self.answers[position] = reply
        self.pending.discard(shard)
        if not self.pending:
            self.finished.set_result(None)

    def expire(self, *, patient: bool = False) -> None:
        """Stop waiting.

        Args:
            patient: go on if no shard has answered.
        """
        if not self.finished.done() and not (patient and len(self.pending) == self.asked):
            self.finished.set_result(None)


class BudgetTimer:
    """Ends batches that take longer than a budget, with one timer of the event loop for all of them.

    A batch to which no shard has answered by then goes on for ``PATIENCE`` budgets in all.

    Args:
        budget_s: the budget.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._batches: deque[tuple[float, ShardBatch]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, batch: ShardBatch) -> None:
        """End a batch after the budget, unless it has ended by then."""
        loop = asyncio.get_running_loop()
        self._batches.append((loop.time() + self._budget_s, batch))
        if self._timer is None:
            self._timer = loop.call_at(self._batches[0][0], self._expire)

    def _expire(self) -> None:
        batches, self._timer = self._batches, None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while batches and (batches[0][0] <= now_s or batches[0][1].finished.done()):
            batch = batches.popleft()[1]
            batch.expire(patient=True)
            if not batch.finished.done():
                loop.call_later((PATIENCE - 1) * self._budget_s, batch.expire)
        if batches:
            self._timer = loop.call_at(batches[0][0], self._expire)

    def close(self) -> None:
        """End all batches."""
        if self._timer is not None:
            self._timer.cancel()
        while self._batches:
            self._batches.popleft()[1].expire()


class ValkeyClient:
    """A client of one cluster. All methods belong to one event loop.

    Args:
        address: the cluster.
        budget_s: time that a batch of reads waits for a shard.
        count: counts events.
        on_moved: called with the slots that may have other contents: their primary changed, or was connected again. Batches that
            run later find these contents.
        observe: receives the durations of batches.
    """

    def __init__(
        self,
        address: ValkeyAddress,
        *,
        budget_s: float,
        count: Count,
        observe: Observe = observe_nothing,
        on_moved: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._address = address
        self.budget_s = budget_s
        self._count = count
        self._observe = observe
        self._budgets = BudgetTimer(budget_s)
        self._on_moved = on_moved
        self.topology: Topology = EMPTY
        self._shards: dict[str, ShardPrimary] = {}
        self._by_number: list[ShardPrimary] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: set[str] = set()
        self._refresh = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Read the topology and connect to all primaries.

        Raises:
            Unavailable: no seed answers.
            Unauthenticated, PermissionDenied: the cluster rejects the credentials.
            Unsupported: the server is not part of a cluster.
        """
        self._adopt(await self._read_topology())
        for shard, connected in zip(
            self._by_number, await asyncio.gather(*map(self._connect_lanes, self._by_number)), strict=True
        ):
            shard.up = connected
            shard.was_connected = True  # one that is away now may have missed changes
            self._probe_if_away(shard)
        self._spawn(self._keep_topology())

    async def close(self) -> None:
        """Close all connections and end the background tasks."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for shard in self._shards.values():
            shard.close()
        self._budgets.close()

    # ---- batches
    async def run(
        self, commands: Sequence[Command], *, budget_s: float | None = None, lane: Lane = Lane.READS, follow: bool = True
    ) -> list[Answer]:
        """Run commands, all shards at once. Returns a reply for each, or ``UNANSWERED``. Errors of Valkey are replies.

        Args:
            commands: what to run; commands of one shard run in order.
            budget_s: time to wait for a shard; None: the configured budget.
            lane: connections to use.
            follow: follow redirections; else redirected commands are not answered.
        """
        began_s = time.monotonic()
        answers: list[Answer] = [UNANSWERED] * len(commands)
        of_slot = self.topology.of_slot
        positions_of: dict[int, list[int]] = {}
        for position, (slot, _) in enumerate(commands):
            positions_of.setdefault(of_slot[slot], []).append(position)
        sends = [
            (self._by_number[number], positions, b"".join([commands[position][1] for position in positions]))
            for number, positions in positions_of.items()
            if number != NO_SHARD
        ]
        await self._exchange(sends, answers, self.budget_s if budget_s is None else budget_s, lane)
        if hiredis.ReplyError in map(type, answers):
            follow_s = (self.budget_s if budget_s is None else budget_s) if follow else 0.0
            await self._follow(commands, answers, follow_s, lane)
        unanswered = answers.count(UNANSWERED)
        if unanswered:
            self._count(metadata_metrics.SHARD_UNANSWERED, unanswered)
        if (histogram := _BATCH_SECONDS.get(lane)) is not None:
            self._observe(histogram, time.monotonic() - began_s)
        return answers

    async def run_until(self, commands: Sequence[Command], deadline_s: float, lane: Lane = Lane.WRITES) -> list[Reply]:
        """Run commands until each has a reply. A command may run twice, so it must be idempotent.

        Raises:
            Unavailable: a shard does not answer until the deadline (``time.monotonic``).
        """
        return cast("list[Reply]", await self._repeat(commands, deadline_s, lane, skips_lost=False))

    async def run_without_lost(self, commands: Sequence[Command], deadline_s: float, lane: Lane = Lane.WRITES) -> list[Answer]:
        """As ``run_until``, but commands for shards that are written off stay unanswered (``is_written_off``)."""
        return await self._repeat(commands, deadline_s, lane, skips_lost=True)

    async def _repeat(self, commands: Sequence[Command], deadline_s: float, lane: Lane, *, skips_lost: bool) -> list[Answer]:
        answers = await self.run(commands, budget_s=min(max(deadline_s - time.monotonic(), 0.001), TRY_S), lane=lane)
        while left := [
            position
            for position, answer in enumerate(answers)
            if answer is UNANSWERED and not (skips_lost and self.is_written_off(commands[position][0]))
        ]:
            if self._closed:
                raise Unavailable("the client of Valkey is closed")
            left_s = deadline_s - time.monotonic()
            if left_s <= RETRY_S:
                away = sorted({self._name_of(commands[position][0]) for position in left})
                raise Unavailable("Valkey does not answer", shards=", ".join(away))
            self._refresh.set()
            await asyncio.sleep(RETRY_S)
            again = await self.run([commands[position] for position in left], budget_s=min(left_s, TRY_S), lane=lane)
            for position, answer in zip(left, again, strict=True):
                answers[position] = answer
        return answers

    async def on_each(self, packed: bytes, *, budget_s: float | None = None) -> dict[str, Answer]:
        """Run one command on each primary. Returns the answers by address."""
        answers: list[Answer] = [UNANSWERED] * len(self._by_number)
        sends = [(shard, [number], packed) for number, shard in enumerate(self._by_number)]
        await self._exchange(sends, answers, self.budget_s if budget_s is None else budget_s, Lane.READS)
        return {shard.address: answer for shard, answer in zip(self._by_number, answers, strict=True)}

    def has_replicas(self, slots: Iterable[int]) -> bool:
        """Whether one of the slots' shards has a replica."""
        return any(
            number != NO_SHARD and self.topology.shards[number].replicas
            for number in {self.topology.of_slot[slot] for slot in slots}
        )

    async def replicate(self, slots: Iterable[int], timeout_ms: int) -> None:
        """Wait until a replica of each shard, if it has one, has what was written to the slots; count the shards that lag."""
        topology = self.topology
        by_shard = {topology.of_slot[slot]: slot for slot in slots}
        waits = [
            (slot, pack("WAIT", 1, timeout_ms))
            for number, slot in by_shard.items()
            if number != NO_SHARD and topology.shards[number].replicas
        ]
        if not waits:
            return
        answers = await self.run(waits, budget_s=1.0 + timeout_ms / 1000, lane=Lane.WRITES)
        lagging = sum(not isinstance(answer, int) or answer < 1 for answer in answers)
        if lagging:
            self._count(metadata_metrics.INDEX_UNREPLICATED, lagging)

    def is_written_off(self, slot: int) -> bool:
        """Whether the shard of a slot has been away for so long that changes no longer wait for it."""
        number = self.topology.of_slot[slot]
        if number == NO_SHARD:
            return True
        shard = self._by_number[number]
        return not (shard.up or shard.slow) and time.monotonic() - shard.away_since_s > WRITTEN_OFF_S

    def primary_of(self, slot: int) -> str:
        """Address of the primary of a slot.

        Raises:
            Unavailable: no server has the slot.
        """
        if (primary := self.topology.primary_of(slot)) is None:
            raise Unavailable("no Valkey server has the slot", slot=slot)
        return primary

    async def open_connection(self, address: str) -> ValkeyConnection:
        """Open a connection for the caller alone, for commands that block. The same errors as ``connect``."""
        return await connect(address, self._address.credentials, self._address.tls, CONNECT_S)

    @property
    def reachable(self) -> bool:
        """Whether a primary answers, in time or late."""
        return any(shard.up or shard.slow for shard in self._by_number)

    def away(self) -> list[str]:
        """Addresses of the primaries that are away."""
        return list(self.away_since_s())

    def away_since_s(self) -> dict[str, float]:
        """Since when each primary that is away has been so (``time.monotonic``), by address."""
        return {shard.address: shard.away_since_s for shard in self._by_number if not shard.up}

    async def _exchange(
        self, sends: Sequence[tuple[ShardPrimary, Sequence[int], bytes]], answers: list[Answer], budget_s: float, lane: Lane
    ) -> None:
        batch = ShardBatch(answers)
        asks_slow = budget_s > self.budget_s or not any(shard.up for shard, _, _ in sends)
        for shard, positions, packed in sends:
            asked = (shard.up or (shard.slow and asks_slow)) and not shard.reconnected
            connection = shard.connection(lane) if asked else None
            if connection is None:
                self._probe_if_away(shard)
                continue
            try:
                connection.send(packed, len(positions), partial(batch.received, shard, positions))
            except KVStoreError as error:  # it was lost just now, or owes too many replies
                limited.warning("index shard not asked: %s (%s)", shard.address, error)
                continue
            batch.pending.add(shard)
        if not batch.pending:
            return
        batch.asked = len(batch.pending)
        if budget_s == self.budget_s:
            self._budgets.watch(batch)
            await batch.finished
        else:
            timer = asyncio.get_running_loop().call_later(budget_s, batch.expire)
            try:
                await batch.finished
            finally:
                timer.cancel()
        for shard in batch.pending if budget_s >= self.budget_s else ():
            shard.slow = budget_s < TRY_S
            self._mark_away(shard, f"no answer within {budget_s * 1000:.0f} ms")

    async def _follow(self, commands: Sequence[Command], answers: list[Answer], budget_s: float, lane: Lane) -> None:
        """Follow redirections and turn transient errors into ``UNANSWERED``. All commands of a batch are redirected at once.

        Raises:
            Unauthenticated, PermissionDenied: the cluster rejects this client's user.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + budget_s
        for _ in range(MAX_REDIRECTIONS):
            redirected = self._redirections(commands, answers)
            if not redirected:
                return
            self._count(metadata_metrics.SHARD_REDIRECTIONS, sum(map(len, redirected.values())))
            left_s = deadline_s - loop.time()
            if left_s > 0:
                asks = [self._ask_at(address, commands, answers, of, left_s, lane) for address, of in redirected.items()]
                await asyncio.gather(*asks)
                continue
            break
        for of in self._redirections(commands, answers).values():
            for position, _ in of:
                answers[position] = UNANSWERED

    def _redirections(self, commands: Sequence[Command], answers: list[Answer]) -> dict[str, list[tuple[int, bytes]]]:
        """The positions of redirected commands by new address, each with the bytes that are sent before the command."""
        redirected: dict[str, list[tuple[int, bytes]]] = {}
        for position, answer in enumerate(answers):
            if not isinstance(answer, hiredis.ReplyError):
                continue
            code, _, rest = str(answer).partition(" ")
            if code in _TRANSIENT:
                answers[position] = UNANSWERED
                self._refresh.set()
                if str(answer) == _DOWN and (number := self.topology.of_slot[commands[position][0]]) != NO_SHARD:
                    self._mark_away(self._by_number[number], "it cannot reach the majority of the cluster")
            elif code == "MOVED":
                self._refresh.set()
                redirected.setdefault(self._target(rest, commands[position][0]), []).append((position, b""))
            elif code == "ASK":
                redirected.setdefault(self._target(rest, commands[position][0]), []).append((position, _ASKING))
            elif rejected := refusal(answer, self._name_of(commands[position][0])):
                raise rejected
        return redirected

    def _target(self, redirection: str, slot: int) -> str:
        """Address to which a command is redirected: ``3999 10.0.0.1:6381``, without the host if the server does not know it."""
        return known_address(redirection.split()[-1], self._name_of(slot).rpartition(":")[0])

    async def _ask_at(
        self,
        address: str,
        commands: Sequence[Command],
        answers: list[Answer],
        redirected: Sequence[tuple[int, bytes]],
        left_s: float,
        lane: Lane,
    ) -> None:
        """Run commands at the server that their redirections name."""
        shard = self._shard(address)
        packed = b"".join([asking + commands[position][1] for position, asking in redirected])
        count = sum(1 + bool(asking) for _, asking in redirected)
        replies: list[Reply] = []
        try:
            async with asyncio.timeout(left_s):
                connection = shard.connection(lane) or await self._connect(shard, lane)
                replies = await connection.ask(packed, count)
        except (TimeoutError, KVStoreError):
            pass
        following = iter(replies)
        for position, asking in redirected:
            if asking:
                next(following, None)
            answers[position] = next(following, UNANSWERED)

    def _name_of(self, slot: int) -> str:
        return self.topology.primary_of(slot) or f"slot {slot}"

    # ---- shards
    def _shard(self, address: str) -> ShardPrimary:
        return self._shards.setdefault(address, ShardPrimary(address))

    async def _connect(self, shard: ShardPrimary, lane: Lane) -> ValkeyConnection:
        async with shard.connecting[lane]:
            if (found := shard.connection(lane)) is not None:
                return found
            opened = await connect(shard.address, self._address.credentials, self._address.tls, CONNECT_S)
            if self._closed or shard.closed:
                opened.close()
                raise Unavailable("the client of Valkey is closed")
            shard.connections[lane] = opened
            shard.reconnected = True
            return opened

    async def _connect_lanes(self, shard: ShardPrimary) -> bool:
        """Connect all lanes that are not connected. Returns whether all are."""
        try:
            for lane in Lane:
                if shard.connection(lane) is None:
                    await self._connect(shard, lane)
        except KVStoreError as error:
            limited.warning("Valkey unreachable: %s (%s)", shard.address, error)
            return False
        if shard.reconnected and shard.was_connected:
            self._tell_moved([slot for slot in range(SLOTS) if self.topology.primary_of(slot) == shard.address])
        shard.was_connected, shard.reconnected = True, False
        return True

    def _mark_away(self, shard: ShardPrimary, why: str) -> None:
        if shard.up:
            shard.up = False
            shard.away_since_s = time.monotonic()
            self._count(metadata_metrics.SHARDS_AWAY, 1)
            limited.warning("index shard %s: %s (%s)", "slow" if shard.slow else "away", shard.address, why)
        self._probe_if_away(shard)

    def _probe_if_away(self, shard: ShardPrimary) -> None:
        """Probe a shard until it answers in time. One probe per shard runs at a time."""
        if shard.up and not shard.reconnected and all(shard.connection(lane) for lane in Lane):
            return
        if shard.up:
            shard.up = shard.slow = False
            shard.away_since_s = time.monotonic()
            self._count(metadata_metrics.SHARDS_AWAY, 1)
            limited.warning("index shard away: %s (its connection was lost)", shard.address)
        self._refresh.set()
        if shard.address not in self._probed and not self._closed:
            self._probed.add(shard.address)
            self._spawn(self._probe(shard.address))

    async def _probe(self, address: str) -> None:
        good, pause_s = 0, 0.0
        try:
            while (shard := self._shards.get(address)) is not None:
                await asyncio.sleep(pause_s)
                try:
                    answered_s = await self._ask_probe(shard)
                    shard.slow = answered_s is not None and await self._connect_lanes(shard)
                    good = good + 1 if shard.slow and answered_s is not None and answered_s <= self.budget_s else 0
                except Exception:  # task edge: without a probe, the shard would stay away
                    good = 0
                    self._count(metadata_metrics.BACKGROUND_BUGS, 1)
                    logger.exception("probe failed: unexpected error, trying again")
                if good == GOOD_PROBES:
                    shard.up, shard.slow = True, False
                    logger.info("index shard back: %s (away_s=%.1f)", address, time.monotonic() - shard.away_since_s)
                    return
                pause_s = 0.0 if good else PROBE_S
        finally:
            self._probed.discard(address)

    async def _ask_probe(self, shard: ShardPrimary) -> float | None:
        """The time until a probe is answered; None: none came, or the server cannot reach the majority.

        A late answer is waited for, so probes do not pile up. A probe reads a key: a ping would not show the majority.
        """
        tag = self.topology.tag_at(shard.address)
        try:
            connection = shard.connection(Lane.READS) or await self._connect(shard, Lane.READS)
            began_s = time.monotonic()
            async with asyncio.timeout(CONNECT_S):
                (reply,) = await connection.ask(pack("PING") if tag is None else pack("EXISTS", tag))
        except TimeoutError:
            if time.monotonic() - shard.away_since_s > HUNG_S:
                shard.drop_connections()  # else probes without an answer would pile up on them
            return None
        except KVStoreError as error:
            limited.warning("Valkey unreachable: %s (%s)", shard.address, error)
            return None
        return None if isinstance(reply, hiredis.ReplyError) and str(reply) == _DOWN else time.monotonic() - began_s

    # ---- topology
    async def _keep_topology(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._refresh.wait()
            except TimeoutError:
                pass
            self._refresh.clear()
            try:
                self._adopt(await self._read_topology())
            except KVStoreError as error:
                limited.warning("Valkey unreachable: %s", error)
            except Exception:  # task edge: without this task, a promoted replica would never be asked
                self._count(metadata_metrics.BACKGROUND_BUGS, 1)
                logger.exception("topology not read: unexpected error, trying again")
            await asyncio.sleep(PROBE_S)

    async def _read_topology(self) -> Topology:
        """Read the topology from any server: those in use first, then the seeds."""
        known = [shard.address for shard in self._by_number if shard.up]
        replicas = [address for nodes in self.topology.shards for address in nodes.replicas]
        failures: dict[str, KVStoreError] = {}
        for address in dict.fromkeys([*known, *self._address.seeds, *replicas]):
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await self._topology_of(address)
            except TimeoutError:
                cause = silence(CONNECT_S, self._address.tls)
                failures[address] = Unavailable("no Valkey server answers", address=address, cause=cause)
            except KVStoreError as error:
                failures[address] = error
        others = [error for error in failures.values() if not isinstance(error, Unavailable)]
        if others or len(failures) == 1:
            raise (others or list(failures.values()))[0]
        causes = [f"{address}: {error.fields.get('cause', error)}" for address, error in failures.items()]
        raise Unavailable("no Valkey server answers", servers="; ".join(causes))

    async def _topology_of(self, address: str) -> Topology:
        shard = self._shards.get(address)
        connection = shard.connection(Lane.READS) if shard is not None and shard.up else None
        opened = None
        try:
            if connection is None:
                connection = opened = await connect(address, self._address.credentials, self._address.tls, CONNECT_S)
            (reply,) = await connection.ask(pack("CLUSTER", "SLOTS"))
        finally:
            if opened is not None:
                opened.close()
        if isinstance(reply, hiredis.ReplyError):
            if rejected := refusal(reply, address):
                raise rejected
            raise Unsupported(
                "the Valkey server is not part of a cluster: start it with --cluster-enabled yes",
                address=address,
                reply=str(reply),
            )
        try:
            topology = parse_cluster_slots(reply, address.rpartition(":")[0])
        except ValueError as error:
            raise Unavailable("Valkey sent an invalid topology", address=address, cause=str(error)) from error
        if not topology.shards:
            raise Unavailable("the Valkey servers do not form a cluster yet", address=address)
        return topology

    def _adopt(self, topology: Topology) -> None:
        """Use a topology from now on. Connect to new primaries, and disconnect servers that are no longer primaries."""
        before = self.topology
        if topology == before:
            return
        self.topology = topology
        self._by_number = [self._shard(nodes.primary) for nodes in topology.shards]
        in_use = {nodes.primary for nodes in topology.shards}
        for address in [address for address in self._shards if address not in in_use]:
            self._shards.pop(address).close()
        if before is EMPTY:
            return
        moved = [slot for slot in range(SLOTS) if topology.primary_of(slot) != before.primary_of(slot)]
        logger.info(
            "index topology changed: %d shards (slots_moved=%d, primaries=%s)", len(in_use), len(moved), ", ".join(sorted(in_use))
        )
        self._count(metadata_metrics.TOPOLOGY_CHANGES, 1)
        for shard in self._by_number:
            self._probe_if_away(shard)
        self._tell_moved(moved)

    def _tell_moved(self, slots: Sequence[int]) -> None:
        if slots and self._on_moved is not None:
            self._on_moved(slots)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
