"""Observation of all servers of a cluster in the background, replicas included, over separate connections.

A round asks every server for two small replies. Lookups and publishing do not wait for it, and its results are read at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.cluster import ValkeyClient
from kvstore.index.valkey.connection import Reply, ValkeyConnection, connect, pack
from kvstore.index.valkey.keys import SLOTS
from kvstore.index.valkey.servers.info import DESCRIBE, ServerFacts, parse_cluster_shards, servers_of
from kvstore.index.valkey.topology import EMPTY, NO_SHARD, Topology
from kvstore.observe.limited_log import LimitedLog

limited = LimitedLog(logging.getLogger(__name__))

ROUND_S: Final = 3.0
ANSWER_S: Final = 1.0
"""Time within which a server answers; after it, the server counts as away."""
_AT_ONCE: Final = 16
_MAX_ASKED: Final = 4
"""Servers that one round asks for the servers of the cluster."""


class ServerWatch:
    """Keeps a description of all servers. All methods belong to the cluster's event loop.

    Args:
        address: the cluster.
        cluster: its client, which knows the topology and which primaries are away.
    """

    def __init__(self, address: ValkeyAddress, cluster: ValkeyClient) -> None:
        self._address = address
        self._cluster = cluster
        self._connections: dict[str, ValkeyConnection] = {}
        self._away_since_s: dict[str, float] = {}
        self._groups: Sequence[Sequence[str]] = ()
        self._described: dict[str, IndexServer] = {}
        self._lags: dict[str, dict[str, int]] = {}
        """Bytes that replicas have not confirmed, by primary and replica."""
        self._counted: tuple[Topology, Counter[int]] = EMPTY, Counter({NO_SHARD: SLOTS})
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Observe until the task is cancelled."""
        try:
            while True:
                await self.observe()
                await asyncio.sleep(ROUND_S)
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    async def observe(self) -> None:
        """Ask all servers once."""
        await self._find_servers()
        servers = self._servers()
        found = await asyncio.gather(*(self._facts_of(server.address) for server in servers))
        now_s = time.monotonic()
        for server, facts in zip(servers, found, strict=True):
            if facts is not None:
                self._described[server.address] = facts.describe(server.address)
                self._lags[server.address] = facts.lags()
                self._away_since_s.pop(server.address, None)
            else:
                self._away_since_s.setdefault(server.address, now_s)
        self._forget_others({server.address for server in servers})

    def backend(self) -> IndexBackend:
        """The servers as last observed; which primaries are away is known at once."""
        now_s, away_since_s, servers = time.monotonic(), self._away(), self._servers()
        answering = Counter(one.shard for one in servers if not one.primary and one.address not in away_since_s)
        lags: dict[str, int] = {}
        for one in servers:
            if one.primary and one.address not in away_since_s:
                lags |= self._lags.get(one.address, {})
        return IndexBackend(
            tuple(
                replace(
                    self._described.get(one.address, one),
                    primary=one.primary,
                    shard=one.shard,
                    slots=one.slots,
                    replicas=answering[one.shard] if one.primary else 0,
                    lag_bytes=None if one.primary else lags.get(one.address),
                    away_s=max(0.0, now_s - away_since_s[one.address]) if one.address in away_since_s else None,
                )
                for one in servers
            ),
            self._slots_of_shards()[NO_SHARD],
        )

    def _servers(self) -> list[IndexServer]:
        return servers_of(self._cluster.topology, self._slots_of_shards(), self._groups)

    def _slots_of_shards(self) -> Counter[int]:
        """Number of slots of each shard, counted once per topology."""
        topology = self._cluster.topology
        if self._counted[0] is not topology:
            self._counted = topology, Counter(topology.of_slot)
        return self._counted[1]

    def _away(self) -> dict[str, float]:
        """Since when each server is away."""
        primaries = {nodes.primary for nodes in self._cluster.topology.shards}
        replicas = {address: since_s for address, since_s in self._away_since_s.items() if address not in primaries}
        return replicas | self._cluster.away_since_s()

    async def _find_servers(self) -> None:
        """Ask some server which servers the cluster has. If none answers, the last known ones are used."""
        away = self._away()
        primaries = [nodes.primary for nodes in self._cluster.topology.shards]
        known = [*primaries, *self._described, *self._address.seeds]
        for address in [one for one in dict.fromkeys(known) if one not in away][:_MAX_ASKED]:
            try:
                (reply,) = await self._ask(address, [pack("CLUSTER", "SHARDS")])
                self._groups = parse_cluster_shards(reply, address.rpartition(":")[0])
            except (KVStoreError, ValueError) as error:
                limited.warning("index servers not listed: %s (%s)", address, error)
            else:
                return

    async def _facts_of(self, address: str) -> ServerFacts | None:
        try:
            return ServerFacts.of(await self._ask(address, DESCRIBE))
        except KVStoreError as error:
            limited.warning("index server away: %s (%s)", address, error)
            return None

    async def _ask(self, address: str, commands: Sequence[bytes]) -> list[Reply]:
        """Run commands at one server.

        Raises:
            Unavailable: it does not answer in time.
            Unauthenticated, PermissionDenied: it rejects the user.
        """
        async with self._places:
            connection = self._connections.get(address)
            try:
                async with asyncio.timeout(ANSWER_S):
                    if connection is None or not connection.is_open:
                        connection = await connect(address, self._address.credentials, self._address.tls, ANSWER_S)
                        self._connections[address] = connection
                    return await connection.ask(b"".join(commands), len(commands))
            except TimeoutError as error:
                if connection is not None:
                    connection.close()
                raise Unavailable("the server does not answer in time", address=address) from error

    def _forget_others(self, known: set[str]) -> None:
        """Forget servers that have left the cluster."""
        for address in self._connections.keys() - known:
            self._connections.pop(address).close()
        self._described = {address: one for address, one in self._described.items() if address in known}
        self._lags = {address: lags for address, lags in self._lags.items() if address in known}
        self._away_since_s = {address: since_s for address, since_s in self._away_since_s.items() if address in known}
