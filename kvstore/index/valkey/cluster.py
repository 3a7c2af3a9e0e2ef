"""Batches of commands to a Valkey Cluster: each command goes to the shard of its hash slot, one round trip per batch.

1. A shard that does not answer within the budget of a batch, or whose connection is lost, is *away*: batches no longer wait
   for it, and its commands come back as ``UNANSWERED``. A background task probes it, and ends that after three quick answers.
2. The topology is read again while a shard is away, after a redirection, and every few seconds. So a promoted replica takes
   over as soon as the cluster names it.
3. Redirections (``MOVED``, ``ASK``) are followed within the batch.

Two lanes, each a connection per shard: publishing may wait for replicas (``WAIT``), which blocks its connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, IntEnum
from functools import partial
from typing import Final, TypeAlias, cast

import hiredis

from kvstore.core.errors import KVStoreError, Unavailable, Unsupported
from kvstore.index.counts import Count
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.connection import Reply, ValkeyConnection, connect, pack, refusal
from kvstore.index.valkey.topology import EMPTY, NO_SHARD, Topology, parse_cluster_slots
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
GOOD_PROBES: Final = 3
"""Consecutive probes within the budget after which a shard is no longer away."""
MAX_REDIRECTIONS: Final = 4
RETRY_S: Final = 0.02
TRY_S: Final = 1.0
"""Time after which a shard that owes a reply to a change counts as away."""
_TRANSIENT: Final = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN", "READONLY", "UNBLOCKED", "NOREPLICAS"})
"""Codes of errors that end by themselves, or with the next topology."""
_ASKING: Final = pack("ASKING")


class Unanswered(Enum):
    """Type of ``UNANSWERED``."""

    UNANSWERED = 0


UNANSWERED: Final = Unanswered.UNANSWERED
"""In place of a reply: the command's shard did not answer in time. It may or may not have run."""
Answer: TypeAlias = "Reply | Unanswered"
Command: TypeAlias = "tuple[int, bytes]"
"""A hash slot and an encoded command."""


class Lane(IntEnum):
    """Connections of a shard, by purpose."""

    READS = 0
    WRITES = 1


class ShardPrimary:
    """The primary of one shard as this process sees it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.up = False
        self.away_since_s = time.monotonic()
        self.connections: list[ValkeyConnection | None] = [None, None]

    def connection(self, lane: Lane) -> ValkeyConnection | None:
        """The open connection of a lane; None: there is none."""
        found = self.connections[lane]
        return found if found is not None and found.is_open else None

    def close(self) -> None:
        """Close the connections."""
        self.up = False
        for connection in self.connections:
            if connection is not None:
                connection.close()


class _Batch:
    """Replies to one batch, shard by shard."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.pending: set[ShardPrimary] = set()
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

    def expire(self) -> None:
        """Stop waiting."""
        if not self.finished.done():
            self.finished.set_result(None)


class ValkeyClient:
    """A client of one cluster. All methods belong to one event loop.

    Args:
        address: the cluster.
        budget_s: time that a batch of reads waits for a shard.
        count: counts events.
        on_moved: called with the slots whose primary changed.
    """

    def __init__(
        self,
        address: ValkeyAddress,
        *,
        budget_s: float,
        count: Count,
        on_moved: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._address = address
        self.budget_s = budget_s
        self._count = count
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
        await asyncio.gather(*(self._try_connect(shard) for shard in self._by_number))
        for shard in self._by_number:
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

    # ---- batches
    async def run(self, commands: Sequence[Command], *, budget_s: float | None = None, lane: Lane = Lane.READS) -> list[Answer]:
        """Run commands, all shards at once. Returns a reply for each, or ``UNANSWERED``. Errors of Valkey are replies.

        Args:
            commands: what to run; commands of one shard run in order.
            budget_s: time to wait for a shard; None: the configured budget.
            lane: connections to use.
        """
        answers: list[Answer] = [UNANSWERED] * len(commands)
        of_slot, positions_of = self.topology.of_slot, defaultdict[int, list[int]](list)
        for position, (slot, _) in enumerate(commands):
            positions_of[of_slot[slot]].append(position)
        sends = [
            (self._by_number[number], positions, b"".join([commands[position][1] for position in positions]))
            for number, positions in positions_of.items()
            if number != NO_SHARD
        ]
        await self._exchange(sends, answers, self.budget_s if budget_s is None else budget_s, lane)
        if any(isinstance(answer, hiredis.ReplyError) for answer in answers):
            await self._follow(commands, answers, self.budget_s if budget_s is None else budget_s, lane)
        unanswered = answers.count(UNANSWERED)
        if unanswered:
            self._count(metadata_metrics.SHARD_UNANSWERED, unanswered)
        return answers

    async def run_until(self, commands: Sequence[Command], deadline_s: float, lane: Lane = Lane.WRITES) -> list[Reply]:
        """Run commands until each has a reply. A command may run twice, so it must be idempotent.

        Raises:
            Unavailable: a shard does not answer until the deadline (``time.monotonic``).
        """
        answers = await self.run(commands, budget_s=min(max(deadline_s - time.monotonic(), 0.001), TRY_S), lane=lane)
        while left := [position for position, answer in enumerate(answers) if answer is UNANSWERED]:
            left_s = deadline_s - time.monotonic()
            if left_s <= RETRY_S:
                away = sorted({self._name_of(commands[position][0]) for position in left})
                raise Unavailable("Valkey does not answer", shards=", ".join(away))
            self._refresh.set()
            await asyncio.sleep(RETRY_S)
            again = await self.run([commands[position] for position in left], budget_s=min(left_s, TRY_S), lane=lane)
            for position, answer in zip(left, again, strict=True):
                answers[position] = answer
        return cast("list[Reply]", answers)

    async def on_each(self, packed: bytes, *, budget_s: float | None = None) -> dict[str, Answer]:
        """Run one command on each primary. Returns the answers by address."""
        answers: list[Answer] = [UNANSWERED] * len(self._by_number)
        sends = [(shard, [number], packed) for number, shard in enumerate(self._by_number)]
        await self._exchange(sends, answers, self.budget_s if budget_s is None else budget_s, Lane.READS)
        return {shard.address: answer for shard, answer in zip(self._by_number, answers, strict=True)}

    def away(self) -> list[str]:
        """Addresses of the primaries that are away."""
        return [shard.address for shard in self._by_number if not shard.up]

    async def _exchange(
        self, sends: Sequence[tuple[ShardPrimary, Sequence[int], bytes]], answers: list[Answer], budget_s: float, lane: Lane
    ) -> None:
        batch = _Batch(answers)
        for shard, positions, packed in sends:
            connection = shard.connection(lane) if shard.up else None
            if connection is None:
                self._probe_if_away(shard)
                continue
            batch.pending.add(shard)
            connection.send(packed, len(positions), partial(batch.received, shard, positions))
        if not batch.pending:
            return
        timer = asyncio.get_running_loop().call_later(budget_s, batch.expire)
        try:
            await batch.finished
        finally:
            timer.cancel()
        for shard in batch.pending if budget_s >= self.budget_s else ():
            self._mark_away(shard, f"no answer within {budget_s * 1000:.0f} ms")

    async def _follow(self, commands: Sequence[Command], answers: list[Answer], budget_s: float, lane: Lane) -> None:
        """Follow redirections and turn transient errors into ``UNANSWERED``.

        Raises:
            Unauthenticated, PermissionDenied: the cluster rejects this client's user.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + budget_s
        for position, first in enumerate(answers):
            answer: Answer = first
            for _ in range(MAX_REDIRECTIONS):
                if not isinstance(answer, hiredis.ReplyError):
                    break
                code, _, rest = str(answer).partition(" ")
                if code in _TRANSIENT:
                    answer = UNANSWERED
                    self._refresh.set()
                elif code in {"MOVED", "ASK"}:
                    self._count(metadata_metrics.SHARD_REDIRECTIONS, 1)
                    if code == "MOVED":
                        self._refresh.set()
                    asking = _ASKING if code == "ASK" else b""
                    left_s = deadline_s - loop.time()
                    answer = await self._ask_at(rest.split()[-1], asking + commands[position][1], bool(asking), left_s, lane)
                else:
                    rejected = refusal(answer, self._name_of(commands[position][0]))
                    if rejected is not None:
                        raise rejected
                    break
            answers[position] = answer

    async def _ask_at(self, address: str, packed: bytes, asking: bool, left_s: float, lane: Lane) -> Answer:
        """Run one command at the server that a redirection names."""
        shard = self._shard(address)
        try:
            async with asyncio.timeout(max(left_s, 0.001)):
                connection = shard.connection(lane) or await self._connect(shard, lane)
                return (await connection.ask(packed, 1 + asking))[-1]
        except (TimeoutError, KVStoreError):
            return UNANSWERED

    def _name_of(self, slot: int) -> str:
        number = self.topology.of_slot[slot]
        return f"slot {slot}" if number == NO_SHARD else self._by_number[number].address

    # ---- shards
    def _shard(self, address: str) -> ShardPrimary:
        return self._shards.setdefault(address, ShardPrimary(address))

    async def _connect(self, shard: ShardPrimary, lane: Lane) -> ValkeyConnection:
        opened = await connect(shard.address, self._address.credentials, self._address.tls, CONNECT_S)
        if self._closed:
            opened.close()
            raise Unavailable("the client of Valkey is closed")
        shard.connections[lane] = opened
        return opened

    async def _try_connect(self, shard: ShardPrimary) -> bool:
        """Connect all lanes that are not connected, and mark the shard as up. Returns whether it is."""
        try:
            for lane in Lane:
                if shard.connection(lane) is None:
                    await self._connect(shard, lane)
        except KVStoreError as error:
            limited.warning("Valkey unreachable: %s (%s)", shard.address, error)
            return False
        shard.up = True
        return True

    def _mark_away(self, shard: ShardPrimary, why: str) -> None:
        if shard.up:
            shard.up = False
            shard.away_since_s = time.monotonic()
            self._count(metadata_metrics.SHARDS_AWAY, 1)
            limited.warning("index shard away: %s (%s)", shard.address, why)
        self._probe_if_away(shard)

    def _probe_if_away(self, shard: ShardPrimary) -> None:
        """Probe a shard until it answers in time. One probe per shard runs at a time."""
        if shard.up and all(shard.connection(lane) for lane in Lane):
            return
        if shard.up:
            shard.up = False
            shard.away_since_s = time.monotonic()
            limited.warning("index shard away: %s (its connection was lost)", shard.address)
        self._refresh.set()
        if shard.address not in self._probed and not self._closed:
            self._probed.add(shard.address)
            self._spawn(self._probe(shard))

    async def _probe(self, shard: ShardPrimary) -> None:
        try:
            good = 0
            while good < GOOD_PROBES:
                await asyncio.sleep(PROBE_S if good == 0 else 0.0)
                if self._shards.get(shard.address) is not shard:
                    return
                good = good + 1 if await self._answers_in_time(shard) else 0
            if await self._try_connect(shard):
                logger.info("index shard back: %s (away_s=%.1f)", shard.address, time.monotonic() - shard.away_since_s)
        finally:
            self._probed.discard(shard.address)
        if not shard.up:
            self._probe_if_away(shard)

    async def _answers_in_time(self, shard: ShardPrimary) -> bool:
        """Whether a ping is answered within the budget. A late answer is waited for, so that probes do not pile up."""
        try:
            connection = shard.connection(Lane.READS) or await self._connect(shard, Lane.READS)
            began_s = time.monotonic()
            async with asyncio.timeout(CONNECT_S):
                await connection.ask(pack("PING"))
        except TimeoutError:
            return False
        except KVStoreError as error:
            limited.warning("Valkey unreachable: %s (%s)", shard.address, error)
            return False
        return time.monotonic() - began_s <= self.budget_s

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
            await asyncio.sleep(PROBE_S)

    async def _read_topology(self) -> Topology:
        """Read the topology from any server: those in use first, then the seeds."""
        known = [shard.address for shard in self._by_number if shard.up]
        replicas = [address for nodes in self.topology.shards for address in nodes.replicas]
        last: KVStoreError = Unavailable("no Valkey server answers", seeds=", ".join(self._address.seeds))
        for address in dict.fromkeys([*known, *self._address.seeds, *replicas]):
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await self._topology_of(address)
            except TimeoutError:
                continue
            except KVStoreError as error:
                last = error
        raise last

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
            raise Unavailable("the Valkey sent an invalid topology", address=address, cause=str(error)) from error
        if not topology.shards:
            raise Unavailable("the Valkey servers do not form a cluster yet", address=address)
        return topology

    def _adopt(self, topology: Topology) -> None:
        """Use a topology from now on; connect to new primaries, and drop servers that are none."""
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
        moved = [
            slot
            for slot, number in enumerate(topology.of_slot)
            if _primary(topology, number) != _primary(before, before.of_slot[slot])
        ]
        logger.info(
            "index topology changed: %d shards (slots_moved=%d, primaries=%s)", len(in_use), len(moved), ", ".join(sorted(in_use))
        )
        self._count(metadata_metrics.TOPOLOGY_CHANGES, 1)
        for shard in self._by_number:
            self._probe_if_away(shard)
        if moved and self._on_moved is not None:
            self._on_moved(moved)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _primary(topology: Topology, number: int) -> str | None:
    return None if number == NO_SHARD else topology.shards[number].primary
