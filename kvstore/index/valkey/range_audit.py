"""Reads and writes the markers of ranges (``range_states``), so that a lost shard makes records unknown instead of absent.

A server reads all markers at its start, those of a shard whose primary changed or was connected again at once, and one of each
shard every second. So a shard that an operator emptied is found within seconds, too.

Changes of a shard that is away are not made. Nodes compare their ranges after it is back.

``read_ranges`` reads the records of ranges.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.index_backend import IndexBackend
from kvstore.core.limits import DIGEST_RANGES
from kvstore.index.counts import Count
from kvstore.index.valkey.cluster import Answer, Command, Lane, ValkeyClient
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.keys import RANGE_SLOTS, TAGS
from kvstore.index.valkey.range_states import RangeState, RangeStates, complete_marker, new_token, repair_marker
from kvstore.index.valkey.records import list_commands, listed_names, read_names_command
from kvstore.index.valkey.small_state import SmallStateStore
from kvstore.index.valkey.topology import EMPTY, Topology
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

AUDIT_S: Final = 1.0
"""Interval of the routine."""
RETRY_S: Final = 0.05
"""Pause before markers of a shard that is away are read again."""
READ_S: Final = 1.0
FOUNDING_S: Final = 2.0
"""Time in which the server that began an epoch writes all markers. Until then, missing ones are not a loss."""
AGAIN_S: Final = 0.02
"""Pause before ranges that were not listed are listed again."""
_PART: Final = 1_024
_NAMES: Final = 256
"""Records of a range that one command reads."""
_READS: Final = 128
"""Such commands that are sent at once."""
_CLAIM: Final = """#!lua flags=allow-oom
local now = redis.call('GET', KEYS[1])
if now and string.sub(now, 1, 16) == ARGV[1] then return now end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""
"""Begin a repair, unless another server did or the range is complete. ARGV: epoch, marker with a token."""
_FINISH: Final = """#!lua flags=allow-oom
local now = redis.call('GET', KEYS[1])
if now ~= ARGV[1] then return now end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""
"""End a repair, unless the marker is another one by now. ARGV: marker with a token, marker of a complete range."""

_RANGES_OF_SLOT: Final[dict[int, list[int]]] = {}
for _range, _slot in enumerate(RANGE_SLOTS):
    _RANGES_OF_SLOT.setdefault(_slot, []).append(_range)


def _always() -> bool:
    return True


class RangeAudit:
    """Keeps the states of ranges. All methods belong to the cluster's event loop.

    Args:
        cluster: the cluster.
        small: the small state, which has the epoch.
        count: counts events.
        writes: whether this server begins and ends repairs. All servers may: each repair has one token.
    """

    def __init__(self, cluster: ValkeyClient, small: SmallStateStore, count: Count, writes: Callable[[], bool] = _always) -> None:
        self._cluster = cluster
        self._small = small
        self._count = count
        self._writes = writes
        self.states = RangeStates()
        self._epoch = b""
        self._epoch_s = 0.0
        self._founded = b""
        self._reported: frozenset[int] = frozenset()
        self._moved_since: set[int] = set()
        self._missed: set[int] = set()
        self._wake = asyncio.Event()
        self._turn = 0
        self._by_shard: tuple[Topology, list[list[int]]] = EMPTY, []
        """Ranges of each shard in a topology."""

    def moved(self, slots: Iterable[int]) -> None:
        """Slots may have other contents: read the markers of their ranges before absence counts."""
        ranges = [number for slot in slots for number in _RANGES_OF_SLOT.get(slot, ())]
        self._moved_since.update(ranges)
        self.states.moved(ranges)
        self._wake.set()

    def missed(self, ranges: Iterable[int]) -> None:
        """Some records of ranges were not changed: nodes compare these ranges as soon as their shards answer."""
        self._missed.update(ranges)

    def report(self, tokens: Collection[int]) -> None:
        """All living nodes have done these checks."""
        if tokens != self._reported:
            self._reported = frozenset(tokens)
            self._wake.set()

    @property
    def markers(self) -> int:
        """Number of markers in the index."""
        counts = self.states.counts()
        return counts[RangeState.GOOD] + counts[RangeState.SUSPECT] + counts[RangeState.REPAIRING]

    def with_ranges(self, backend: IndexBackend) -> IndexBackend:
        """Add the numbers of lost and of suspect ranges to a description of the servers."""
        counts = self.states.counts()
        lost = counts[RangeState.LOST] + counts[RangeState.REPAIRING]
        return replace(backend, lost_ranges=lost, suspect_ranges=counts[RangeState.MOVED] + counts[RangeState.SUSPECT])

    async def run(self) -> None:
        """Keep the states, until cancelled."""
        while True:
            waits = RETRY_S if self._unread() else AUDIT_S
            try:
                async with asyncio.timeout(waits):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.step()
            except KVStoreError as error:
                limited.warning("markers of ranges not read: %s", error)
            except Exception:  # task edge: without this task, lost ranges would stay unknown
                self._count(metadata_metrics.BACKGROUND_BUGS, 1)
                logger.exception("audit of ranges failed: unexpected error, trying again")
                await asyncio.sleep(RETRY_S)

    async def step(self) -> None:
        """Read the markers that are due, begin repairs of lost ranges, and end finished repairs."""
        epoch = self._small.state.epoch
        if not epoch:
            return
        if epoch != self._epoch:
            self._epoch, self.states, self._epoch_s = epoch, RangeStates(), time.monotonic()
        self.states.tick(time.monotonic())
        if self._small.founded == epoch != self._founded:
            self._founded = epoch
            await self._set_all(epoch)
        self._begin_suspicions()
        under_repair = [number for check in self.states.checks() if check.lost for number in check.ranges]
        await self._read(sorted({*self._unread(), *under_repair, *self.states.lost(), *self._sample()}))
        if neighbours := self._neighbours_of_lost():
            await self._read(neighbours)
        if self._writes():
            if time.monotonic() - self._epoch_s > FOUNDING_S:
                await self._begin_repairs()
            await self._end_repairs()

    # ---- parts
    def _unread(self) -> list[int]:
        """Ranges whose markers must be read, and whose shards may answer."""
        return [number for number in self.states.unread() if not self._cluster.is_written_off(RANGE_SLOTS[number])]

    def _begin_suspicions(self) -> None:
        """Let nodes compare the ranges with missed changes whose shards are back."""
        unread = set(self.states.unread())
        self._missed |= unread - set(self._unread())  # this server may have missed changes before it was restarted
        back = [number for number in self._missed - unread if not self._cluster.is_written_off(RANGE_SLOTS[number])]
        self._missed.difference_update(back)
        self.states.moved(back)

    def _sample(self) -> list[int]:
        """The next range of each shard."""
        topology = self._cluster.topology
        if self._by_shard[0] is not topology:
            by_shard: dict[int, list[int]] = {}
            for number, slot in enumerate(RANGE_SLOTS):
                by_shard.setdefault(topology.of_slot[slot], []).append(number)
            self._by_shard = topology, list(by_shard.values())
        self._turn += 1
        return [ranges[self._turn % len(ranges)] for ranges in self._by_shard[1]]

    def _neighbours_of_lost(self) -> list[int]:
        """Ranges on shards that lost a range: the shard was emptied, so these are lost, too."""
        of_slot = self._cluster.topology.of_slot
        shards = {of_slot[RANGE_SLOTS[number]] for number in self.states.lost()}
        return [
            number
            for number in range(DIGEST_RANGES)
            if of_slot[RANGE_SLOTS[number]] in shards and self.states.state(number) is not RangeState.LOST
        ]

    async def _read(self, ranges: Sequence[int]) -> None:
        await self._ask(ranges, [(RANGE_SLOTS[number], pack("GET", TAGS[number])) for number in ranges], Lane.READS)

    async def _set_all(self, epoch: bytes) -> None:
        """Begin an epoch: all ranges are complete, because all nodes send their inventories."""
        commands = [(slot, pack("SET", tag, complete_marker(epoch))) for slot, tag in zip(RANGE_SLOTS, TAGS, strict=True)]
        for at in range(0, len(commands), _PART):
            await self._cluster.run(commands[at : at + _PART], budget_s=READ_S, lane=Lane.WRITES)

    async def _begin_repairs(self) -> None:
        lost = self.states.lost()
        if not lost:
            return
        marker = repair_marker(self._epoch, new_token())
        logger.warning("index ranges lost: %d of %d; asking all nodes for their blocks", len(lost), DIGEST_RANGES)
        self._count(metadata_metrics.RANGES_LOST, len(lost))
        commands = [(RANGE_SLOTS[at], pack("EVAL", _CLAIM, 1, TAGS[at], self._epoch, marker)) for at in lost]
        await self._ask(lost, commands, Lane.WRITES)

    async def _end_repairs(self) -> None:
        for repair, ranges, reported in self.states.finished(self._reported, time.monotonic()):
            marker, complete = repair_marker(self._epoch, repair), complete_marker(self._epoch)
            commands = [(RANGE_SLOTS[at], pack("EVAL", _FINISH, 1, TAGS[at], marker, complete)) for at in ranges]
            await self._ask(ranges, commands, Lane.WRITES)
            why = "all living nodes sent their blocks" if reported else "time is up"
            logger.info("index ranges repaired: %d (%s)", len(ranges), why)

    async def _ask(self, ranges: Sequence[int], commands: Sequence[Command], lane: Lane) -> None:
        """Run one command per range whose reply is its marker. Replies about ranges that moved since the request are dropped."""
        epoch, states = self._epoch, self.states
        for at in range(0, len(commands), _PART):
            self._moved_since.clear()
            answers = await self._cluster.run(commands[at : at + _PART], budget_s=READ_S, lane=lane)
            found = {
                number: answer
                for number, answer in zip(ranges[at : at + _PART], answers, strict=True)
                if number not in self._moved_since and _is_marker(answer)
            }
            states.read(found, epoch, time.monotonic())  # type: ignore[arg-type]  # checked above


async def read_ranges(cluster: ValkeyClient, ranges: Sequence[int], timeout_s: float) -> tuple[list[bytes], list[Reply]]:
    """Read the records of ranges. Returns arguments for ``records_of``.

    Raises:
        Unavailable: some ranges cannot be read in time, or their shard is away.
    """
    deadline_s = time.monotonic() + timeout_s
    listed = await _names_in_ranges(cluster, ranges, deadline_s)
    commands = [
        read_names_command(RANGE_SLOTS[number], of[at : at + _NAMES])
        for number, of in zip(ranges, listed, strict=True)
        for at in range(0, len(of), _NAMES)
    ]
    replies: list[Reply] = []
    for at in range(0, len(commands), _READS):
        replies += await cluster.run_until(commands[at : at + _READS], deadline_s, Lane.READS)
    return list(chain.from_iterable(listed)), replies


async def _names_in_ranges(cluster: ValkeyClient, ranges: Sequence[int], deadline_s: float) -> list[list[bytes]]:
    """List the names of the records of each range, in any order."""
    found: dict[int, list[bytes]] = {}
    while left := [at for at in ranges if at not in found]:
        answers = await cluster.run(list_commands(left), budget_s=READ_S, follow=False)
        listed = [listed_names(*of) for of in zip(left, answers[::2], answers[1::2], strict=True)]
        found |= {at: names for at, names in zip(left, listed, strict=True) if names is not None}
        if len(found) < len(ranges):
            is_written_off = any(cluster.is_written_off(RANGE_SLOTS[at]) for at in ranges if at not in found)
            if is_written_off or time.monotonic() > deadline_s:
                raise Unavailable("Valkey did not list all ranges", missing=len(ranges) - len(found))
            await asyncio.sleep(AGAIN_S)
    return [found[at] for at in ranges]


def _is_marker(answer: Answer) -> bool:
    return answer is None or isinstance(answer, bytes)
