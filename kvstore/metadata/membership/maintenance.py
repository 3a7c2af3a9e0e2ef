"""What a server process does by itself: share heartbeats, notice silent nodes, forget those silent for long, sweep the index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.core.errors import KVStoreError
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.indexing.index_mutations import forget_node
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

_TICKS_PER_TTL: Final = 8
_MIN_TICK_S: Final = 0.01
_MAX_TICK_S: Final = 0.5
_SWEEP_ENTRIES: Final = 1_024
"""Records looked at in one job of the index thread: a few milliseconds, behind which a publish may wait."""
_SWEEP_PAUSE_S: Final = 0.01


class Maintenance:
    """Two background tasks of one server process.

    Args:
        index: the index.
        nodes: who is alive.
        thread: changes the index.
        counters: events of this process.
        ttl_s: silence after which a node is hidden.
        forget_s: silence after which a node is forgotten.
        sweeps: whether this process forgets and sweeps; one of several workers does.
        also: called at each tick, one after the other.
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
        sweeps: bool,
        also: Sequence[Callable[[], None]],
    ) -> None:
        self._index = index
        self._nodes = nodes
        self._thread = thread
        self._counters = counters
        self._tick_s = min(max(ttl_s / _TICKS_PER_TTL, _MIN_TICK_S), _MAX_TICK_S)
        self._forget_s = forget_s
        self._sweeps = sweeps
        self._also = also
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins; on the event loop that serves."""
        self._tasks.append(asyncio.create_task(self._watch_nodes(), name="metadata-watch-nodes"))
        if self._sweeps:
            self._tasks.append(asyncio.create_task(self._sweep(), name="metadata-sweep"))

    async def stop(self) -> None:
        """Ends both; what only this process knows of nodes is kept for the next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(KVStoreError):  # the index takes nothing: nodes will say it again
            await self._thread.run(self._share, self._nodes.unshared_beats())

    async def _watch_nodes(self) -> None:
        while True:
            try:
                try:
                    await self._thread.run(self._share, self._nodes.unshared_beats())
                finally:
                    self._nodes.exchange_beats()  # who is silent is hidden also where nothing can be written
                for due in self._also:
                    due()
                if self._sweeps:
                    await self._forget()
            except KVStoreError as error:
                # a full disk, an index that does not answer: lookups go on with what is known, the next tick tries again
                self._counters.add("metadata_maintenance_failures_total")
                limited.warning("cannot exchange heartbeats with the index: %s", error)
            await asyncio.sleep(self._tick_s)

    async def _forget(self) -> None:
        for node_id, boot_id in self._nodes.long_silent(self._forget_s):
            logger.warning("node %s was silent for %.0f s: forgotten, with all that it published", node_id, self._forget_s)
            self._counters.add("metadata_nodes_forgotten_total")
            await self._thread.run(forget_node, self._index, node_id, boot_id)

    def _share(self, notes: list[tuple[str, bytes]]) -> None:
        for name, value in notes:
            self._index.put_note(name, value, announce=False)

    async def _sweep(self) -> None:
        while True:
            pause_s = self._tick_s
            try:
                if self._index.stats().dead_volume_epochs:
                    done = await self._thread.run(self._index.sweep, _SWEEP_ENTRIES)
                    self._counters.add("metadata_sweeps_total")
                    pause_s = self._tick_s if done else _SWEEP_PAUSE_S
            except KVStoreError as error:
                self._counters.add("metadata_maintenance_failures_total")
                limited.warning("cannot sweep the index: %s", error)
            await asyncio.sleep(pause_s)
