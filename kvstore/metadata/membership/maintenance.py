"""Background work of a server process: share heartbeats, hide silent nodes, forget long silent nodes, sweep the index.

Heartbeats are shared in a thread of their own. A change of records may wait for seconds for a lost shard, and other servers would
hide all nodes whose heartbeats wait behind it.

The watch of nodes goes on while a write waits: a process that is stopped inside a write of LMDB blocks all other writers of its
host until it continues. After ``WRITE_LIMIT_S`` of such a wait, nodes that are silent here for their time to live are hidden.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.core.errors import KVStoreError
from kvstore.index.contract import PrefixIndex, ServerRole
from kvstore.metadata.indexing.index_mutations import forget_node
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.metadata.membership.pause import PauseWatch
from kvstore.metadata.roles.roles import Roles
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

_TICKS_PER_TTL: Final = 8
_SLOW_SHARES_PER_TTL: Final = 4
WRITE_LIMIT_S: Final = 5.0
"""Until then, no node is hidden: other servers may be unable to write, too. An index of several hosts ends each write earlier."""
_LAST_SHARE_S: Final = 1.0
"""Limit for the last write of heartbeats at the stop."""
_MIN_TICK_S: Final = 0.01
_MAX_TICK_S: Final = 0.5
_SWEEP_ENTRIES: Final = 1_024
"""Records per job of the index thread: a few milliseconds, for which a publish may wait."""
_SWEEP_PAUSE_S: Final = 0.01


class Maintenance:
    """Background tasks of one server process.

    Args:
        index: the index.
        nodes: registrations and liveness.
        thread: thread that changes the index. Heartbeats are not shared in it.
        counters: counters of this process.
        ttl_s: silence after which a node is hidden.
        forget_s: silence after which a node is forgotten.
        roles: roles of this process: one of several processes forgets nodes and sweeps the index.
        on_tick: functions to call at each tick.
        pauses: notices pauses of this process; None: a test moves the clock of the nodes.
    """

    def __init__(
        self,
        index: PrefixIndex,
        nodes: NodeTable,
        thread: IndexThread,
        counters: Counters,
        *,
        ttl_s: float,
        forget_s: float,
        roles: Roles,
        on_tick: Sequence[Callable[[], None]],
        pauses: PauseWatch | None = None,
    ) -> None:
        self._index = index
        self._nodes = nodes
        self._thread = thread
        self._share_thread = IndexThread("metadata-heartbeats")
        self._counters = counters
        self._tick_s = min(max(ttl_s / _TICKS_PER_TTL, _MIN_TICK_S), _MAX_TICK_S)
        self._slow_share_s = ttl_s / _SLOW_SHARES_PER_TTL
        self._forget_s = forget_s
        self._roles = roles
        self._on_tick = on_tick
        self._pauses = pauses
        self._tasks: list[asyncio.Task[None]] = []
        self._sharing: asyncio.Task[None] | None = None
        self._sharing_since_s = 0.0

    def start(self) -> None:
        """Start the tasks on the running event loop."""
        if self._pauses is not None:
            self._tasks.append(asyncio.create_task(self._pauses.run(), name="metadata-watch-pauses"))
        self._tasks.append(asyncio.create_task(self._watch_nodes(), name="metadata-watch-nodes"))
        self._tasks.append(asyncio.create_task(self._sweep(), name="metadata-sweep"))

    async def stop(self) -> None:
        """Stop the tasks, and store the heartbeats that only this process has seen."""
        tasks = [*self._tasks, self._sharing] if self._sharing is not None else self._tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(KVStoreError, TimeoutError):  # the index cannot be changed: nodes will send further heartbeats
            async with asyncio.timeout(_LAST_SHARE_S):
                await self._share()
        await self._share_thread.close()

    def _run_ticks(self) -> None:
        """Make all calls of a tick. A call that fails is counted and logged, and the others run."""
        for call in self._on_tick:
            try:
                call()
            except KVStoreError as error:  # the disk is full, or the index does not answer: the next tick tries again
                self._counters.add(metadata_metrics.MAINTENANCE_FAILURES)
                limited.warning("maintenance step failed: %s (error=%s)", getattr(call, "__qualname__", call), error)
            except Exception:  # process edge: without these calls, plans and engines of dead clients would stay
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception(
                    "maintenance step failed: %s, unexpected error, trying again", getattr(call, "__qualname__", call)
                )

    async def _watch_nodes(self) -> None:
        while True:
            try:
                try:
                    await self._share_for_a_while()
                finally:  # silent nodes are hidden even if nothing can be written
                    if self._pauses is not None:
                        self._pauses.check()
                    self._nodes.tick()
            except KVStoreError as error:
                # the disk is full, or the index does not answer: lookups continue with the last view, the next tick tries again
                self._counters.add(metadata_metrics.MAINTENANCE_FAILURES)
                limited.warning("heartbeats not exchanged with the index: %s", error)
            except Exception:  # process edge: without this task, dead nodes would never be hidden
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("node watch failed: unexpected error, trying again")
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # an error above may have replaced the cancellation
                return
            self._run_ticks()
            await asyncio.sleep(self._tick_s)

    async def _forget(self) -> None:
        for boot in self._nodes.forgettable(self._forget_s):
            await self._thread.run(forget_node, self._index, boot.node_id, boot.boot_id)
            if boot.is_cache:
                logger.info("engine cache forgotten: %s (silent_for_s=%.0f)", boot.node_id, boot.silence_s)
            else:
                logger.warning("node forgotten with all its blocks: %s (silent_for_s=%.0f)", boot.node_id, boot.silence_s)
                self._counters.add(metadata_metrics.NODES_FORGOTTEN)

    async def _share_for_a_while(self) -> None:
        """Share heartbeats, and return after a while even if the write still waits: the next call continues the wait.

        Raises:
            KVStoreError: they could not be written.
        """
        if self._sharing is None:
            self._sharing, self._sharing_since_s = asyncio.create_task(self._share()), time.monotonic()
        sharing = self._sharing
        await asyncio.wait([sharing], timeout=self._slow_share_s)
        waited_s = time.monotonic() - self._sharing_since_s
        if waited_s > self._slow_share_s and (sharing.done() or waited_s < WRITE_LIMIT_S):
            self._nodes.index_was_away()  # no read finds this out
        if sharing.done():
            self._sharing = None
            sharing.result()

    async def _share(self) -> None:
        changes = self._nodes.take_unshared()
        if changes:
            try:
                await self._share_thread.run(changes.write, self._index)
            except KVStoreError:
                self._nodes.write_failed(changes)
                raise
        if (orphaned := self._nodes.orphaned_beats) and self._roles.holds(ServerRole.SWEEP):
            await self._share_thread.run(self._index.put_beats, dict.fromkeys(orphaned))

    async def _sweep(self) -> None:
        while True:
            pause_s = self._tick_s
            try:
                if self._roles.holds(ServerRole.SWEEP):
                    await self._forget()
                    if self._index.stats().dead_volume_epochs:
                        done = await self._thread.run(self._index.sweep, _SWEEP_ENTRIES)
                        self._counters.add(metadata_metrics.SWEEPS)
                        pause_s = self._tick_s if done else _SWEEP_PAUSE_S
            except KVStoreError as error:
                self._counters.add(metadata_metrics.MAINTENANCE_FAILURES)
                limited.warning("silent nodes not forgotten, or index not swept: %s", error)
            except Exception:  # process edge: without this task, entries of lost volumes would stay in the index
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("index sweep failed: unexpected error, trying again")
            await asyncio.sleep(pause_s)
