"""Questions to the other metadata servers of a shared index, for answers about all of them.

A server counts and plans for its own callers only. An operator asks any server, which asks the others the same question with the
operator's token, and adds up the answers (``server_sums``). A server that does not answer in time is left out, counted and
logged: its figures are missing from the sum.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import KVStoreError
from kvstore.metadata.membership.server_table import ServerTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import connect_aio
from kvstore.rpc.context import passed_on

limited = LimitedLog(logging.getLogger(__name__))

ASKED_BY: Final = "kv-asked-by"
"""Metadata key of a question of another metadata server: its id."""
ASK_S: Final = 1.0
"""Time that another server has for its answer."""
_CLOSE_S: Final = 0.1
M = TypeVar("M", bound=Message)
Context = Any
Metadata = list[tuple[str, str | bytes]]


class OtherServers:
    """Asks the other servers. Use on one event loop.

    Args:
        table: the servers that share the index.
        counters: counters of this process.
        tls: identity of this server towards the others; None: no TLS.
    """

    def __init__(self, table: ServerTable, counters: Counters, tls: TlsConfig | None) -> None:
        self.table: Final = table
        self._counters = counters
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def ask(self, method: str, request: Message, context: Context, kind: type[M]) -> list[M]:
        """Ask all other servers what the caller has asked this one.

        Args:
            method: full name of the RPC, with slashes.
            request: the request.
            context: context of the call; the others get its token.
            kind: type of the answer.

        Returns:
            Their answers. Empty if the caller is itself a metadata server that collects answers.
        """
        metadata = passed_on(context)
        if any(key == ASKED_BY for key, _ in metadata):
            return []
        others = {one.address for one in self.table.servers() if one.server_id != self.table.server_id and one.address}
        for address in self._channels.keys() - others:
            closing = asyncio.create_task(self._channels.pop(address).close(ASK_S))  # its calls end within this time
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        metadata.append((ASKED_BY, self.table.server_id))
        left_s = context.time_remaining()
        timeout_s = ASK_S if left_s is None else min(ASK_S, left_s / 2)
        found = await asyncio.gather(*[self._answer(one, method, request, metadata, timeout_s, kind) for one in sorted(others)])
        return [one for one in found if one is not None]

    async def _answer(
        self,
        address: str,
        method: str,
        request: Message,
        metadata: list[tuple[str, str | bytes]],
        timeout_s: float,
        kind: type[M],
    ) -> M | None:
        try:
            if address not in self._channels:
                self._channels[address] = connect_aio(address, tls=self._tls)
            call = self._channels[address].unary_unary(method, type(request).SerializeToString, kind.FromString)
            answer: M = await call(request, timeout=timeout_s, metadata=tuple(metadata))
        except (grpc.RpcError, grpc.aio.UsageError, DecodeError, KVStoreError) as error:
            self._counters.add(metadata_metrics.SERVERS_UNANSWERED)
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
            limited.warning("metadata server did not answer, sums lack its figures: %s (reason=%s)", address, reason)
            return None
        return answer

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*[channel.close(_CLOSE_S) for channel in channels], *self._closing)
