"""One small value in Valkey that all metadata servers share, changed by compare-and-set."""

from __future__ import annotations

import time
from typing import Final

import hiredis

from kvstore.core.errors import CapacityExceeded, Unavailable
from kvstore.index.valkey.cluster import Lane, ValkeyClient
from kvstore.index.valkey.connection import pack

CALL_S: Final = 5.0
"""Deadline of one call."""
REPLICATION_MS: Final = 1_000
"""Time that a change waits for a replica."""
_REPLACE: Final = """
local now = redis.call('GET', KEYS[1])
if now == ARGV[2] then return 1 end
if (now or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class SharedValue:
    """The value of one key. Use on the cluster's event loop.

    Args:
        cluster: the cluster.
        name: the key.
        slot: its hash slot.
    """

    def __init__(self, cluster: ValkeyClient, name: bytes, slot: int) -> None:
        self._cluster = cluster
        self._name = name
        self._slot = slot

    async def read(self) -> bytes | None:
        """The value; None: there is none.

        Raises:
            Unavailable: the shard does not answer.
        """
        (value,) = await self._cluster.run_until([(self._slot, pack("GET", self._name))], time.monotonic() + CALL_S, Lane.READS)
        if isinstance(value, bytes) or value is None:
            return value
        raise Unavailable("Valkey rejected a read", reply=str(value)[:200])

    async def replace(self, before: bytes | None, after: bytes) -> bool:
        """Replace the value if it is ``before`` (None: absent), and wait for a replica if the shard has one.

        Returns:
            Whether the value is ``after`` now.

        Raises:
            CapacityExceeded: Valkey is full.
            Unavailable: the shard does not answer; the value may have been replaced.
        """
        command = pack("EVAL", _REPLACE, 1, self._name, before or b"", after)
        (reply,) = await self._cluster.run_until([(self._slot, command)], time.monotonic() + CALL_S)
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("OOM"):
                raise CapacityExceeded("Valkey is full: raise its maxmemory or add shards", reply=str(reply))
            raise Unavailable("Valkey rejected a change", reply=str(reply)[:200])
        if reply == 1:
            await self._cluster.replicate({self._slot}, REPLICATION_MS)
        return reply == 1
