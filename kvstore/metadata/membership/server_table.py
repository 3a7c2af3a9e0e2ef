"""Which metadata servers serve the index: each writes a counter that grows, and reads those of the others.

A server is seen while its counter moved within the time to live, on the clock of the server that looks. No clocks of two hosts
are compared. While the records cannot be read, nothing is concluded from counters that stay the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import kvstore
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.index_backend import MetadataServerRecord
from kvstore.index.contract import PrefixIndex
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

TICK_S: Final = 1.0
_LEAST_TTL_S: Final = 3 * TICK_S
_STOP_S: Final = 1.0
FORGET_S: Final = 60.0
"""Time without a move after which the record of a server is deleted."""


class SeenServers:
    """Judges which servers are seen, right after their records were read. Pure; the time is that of any monotonic clock.

    Args:
        ttl_s: time without a move of its counter after which a server is no longer seen.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._moved_s: dict[str, float] = {}
        self._records: dict[str, MetadataServerRecord] = {}
        self._answering = True
        self.seen: Sequence[MetadataServerRecord] = ()
        """Servers that are seen, by address."""
        self.ended: Sequence[str] = ()
        """Ids of servers whose records may be deleted."""

    def failed(self) -> None:
        """The records could not be read, and perhaps not be written by others."""
        self._answering = False

    def read(self, records: Collection[MetadataServerRecord], now_s: float) -> None:
        """The records of all servers were read."""
        moved_s: dict[str, float] = {}
        for record in records:
            known = self._records.get(record.server_id)
            stays = self._answering and known is not None and known.counter == record.counter
            moved_s[record.server_id] = self._moved_s[record.server_id] if stays else now_s
        self._answering = True
        self._moved_s, self._records = moved_s, {record.server_id: record for record in records}
        seen = [record for record in records if now_s - moved_s[record.server_id] <= self._ttl_s]
        self.seen = sorted(seen, key=lambda record: (record.address, record.server_id))
        self.ended = [server_id for server_id, at_s in moved_s.items() if now_s - at_s > self._ttl_s + FORGET_S]


class ServerTable:
    """Tells other metadata servers that this one runs, and knows which others do. Use on one event loop.

    Args:
        index: the index that they share.
        server_id: id of this server process.
        clock: a monotonic clock of this host.
        ttl_s: time to live of a server.
        counters: counters of this process.
    """

    def __init__(self, index: PrefixIndex, server_id: str, clock: Clock, ttl_s: float, counters: Counters) -> None:
        self._index = index
        self._clock = clock
        self._counters = counters
        self._seen = SeenServers(max(ttl_s, _LEAST_TTL_S))
        self._mine = MetadataServerRecord(server_id, "", kvstore.__version__, time.time())
        self._task: asyncio.Task[None] | None = None

    @property
    def server_id(self) -> str:
        """Id of this server."""
        return self._mine.server_id

    def servers(self) -> Sequence[MetadataServerRecord]:
        """Servers that serve this index, by address; at least this one."""
        return self._seen.seen or [self._mine]

    def start(self, address: str) -> None:
        """Start on the running event loop.

        Args:
            address: the address at which others reach this server.
        """
        self._mine = replace(self._mine, address=address)
        self._task = asyncio.create_task(self._run(), name="metadata-servers")

    async def stop(self) -> None:
        """Stop, and delete the record of this server."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with suppress(KVStoreError, TimeoutError):  # the others notice it by its counter
            async with asyncio.timeout(_STOP_S):
                await self._index.exchange_servers(self._mine, [self.server_id])

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except KVStoreError as error:
                self._seen.failed()
                self._counters.add(metadata_metrics.SERVER_TABLE_FAILURES)
                limited.warning("records not exchanged with other metadata servers: %s", error)
            except Exception:  # process edge: without this task, other servers would take this one for ended
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("exchange with other metadata servers failed: unexpected error, trying again")
            await asyncio.sleep(TICK_S)

    async def refresh(self) -> None:
        """Write the record of this server, and read all.

        Raises:
            Unavailable: the index does not answer.
        """
        self._mine = replace(self._mine, counter=self._mine.counter + 1)
        records = await self._index.exchange_servers(self._mine, self._seen.ended)
        self._seen.read(records, self._clock.now_s())
