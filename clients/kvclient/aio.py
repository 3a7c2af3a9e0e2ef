"""The client for asyncio: the same calls, run in the client's background threads.

Cancellation is safe for memory: when an ``await`` has raised ``CancelledError``, nothing touches the buffer any more. The work is
cancelled and awaited before the error is raised, which takes as long as one piece of copying or one read from a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from kvclient.call.execution import PreparedCall, Result
from kvclient.call.handle import left_with_grace_s
from kvclient.client import Keys, KVClient
from kvclient.load.paths import Paths
from kvclient.load.read_ahead import ReadAhead
from kvclient.options import ClientOptions, Verify
from kvclient.results import HeadLookup, LoadResult, Lookup, StoreResult
from kvstore.core.keys import Tokens
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.process.tls import TlsConfig

R = TypeVar("R", bound=Result)


class AsyncKVClient:
    """``KVClient`` for asyncio. Made by ``connect``, or around an existing client. An async context manager.

    Example::

        async with await AsyncKVClient.connect("127.0.0.1:7400", spec) as client:
            result = await client.load(client.keys(tokens), buffer)
    """

    def __init__(self, client: KVClient) -> None:
        self.blocking = client
        """The blocking client, for use in threads."""
        self.hints = client.hints
        """See ``KVClient.hints``, whose calls do not wait."""

    @classmethod
    async def connect(
        cls,
        metadata: str | None,
        spec: CacheSpec,
        *,
        node: str | None = "auto",
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
    ) -> Self:
        """See ``KVClient.connect``.

        Example: ``client = await AsyncKVClient.connect("127.0.0.1:7400", spec)``
        """
        connect = partial(KVClient.connect, metadata, spec, node=node, tls=tls, options=options)
        opening = asyncio.ensure_future(asyncio.to_thread(connect))
        try:
            return cls(await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    def keys(
        self, tokens: Tokens, extras: Mapping[int, bytes] | None = None, parent: BlockKey | None = None, first_block: int = 0
    ) -> list[BlockKey]:
        """See ``KVClient.keys``; does not wait.

        Example: ``keys = client.keys(tokens)``
        """
        return self.blocking.keys(tokens, extras, parent, first_block)

    async def lookup(self, keys: Keys, *, deadline_s: float | None = None) -> Lookup:
        """See ``KVClient.lookup``.

        Example: ``lookup = await client.lookup(keys)``
        """
        return await self._run(self.blocking.lookup_call(keys, deadline_s))

    async def lookup_heads(self, keys: Keys, *, deadline_s: float | None = None) -> HeadLookup:
        """See ``KVClient.lookup_heads``.

        Example: ``found = await client.lookup_heads(page_keys)``
        """
        return await self._run(self.blocking.lookup_heads_call(keys, deadline_s))

    async def load(
        self,
        what: Lookup | HeadLookup | Keys,
        buffer: object,
        *,
        deadline_s: float | None = None,
        verify: Verify | None = None,
        parent: BlockKey | None = None,
        depth: int = 0,
        paths: Paths | None = None,
    ) -> LoadResult:
        """See ``KVClient.load``.

        Example: ``result = await client.load(lookup, buffer)``
        """
        return await self._run(self.blocking.load_call(what, buffer, deadline_s, verify, parent, depth, paths))

    def read_ahead(self, lookup: Lookup, *, deadline_s: float | None = None, paths: Paths | None = None) -> ReadAhead | None:
        """See ``KVClient.read_ahead``; does not wait.

        Args:
            lookup: its first ``hit_blocks`` blocks are read ahead.
            deadline_s: how long nodes hold them at most, in seconds from now; None: the option ``default_deadline_s``.
            paths: as for ``load``.

        Raises:
            InvalidArgument: ``deadline_s`` or ``paths`` has another type, or the seconds are out of range.

        Example: ``ahead = client.read_ahead(lookup)``
        """
        return self.blocking.read_ahead(lookup, deadline_s=deadline_s, paths=paths)

    async def store(
        self,
        keys: Keys,
        buffer: object,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        deadline_s: float | None = None,
        durable: bool = False,
        wait_visible: bool = False,
    ) -> StoreResult:
        """See ``KVClient.store``.

        Example: ``await client.store(keys, buffer)``
        """
        return await self._run(
            self.blocking.store_call(keys, buffer, parent, depth, deadline_s, durable=durable, wait_visible=wait_visible)
        )

    async def flush(self, timeout_s: float = 10.0) -> bool:
        """See ``KVClient.flush``.

        Example: ``await client.flush(30.0)``
        """
        return await asyncio.to_thread(self.blocking.flush, timeout_s)

    def stats(self) -> dict[str, int]:
        """See ``KVClient.stats``.

        Example: ``client.stats()["client_loads_total"]``
        """
        return self.blocking.stats()

    async def close(self) -> None:
        """See ``KVClient.close``."""
        await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: PreparedCall[R]) -> R:
        """Wait for a call in a thread. A cancellation cancels the call, waits for its end, and is then raised."""
        running = asyncio.wrap_future(self.blocking.runner.start(call))
        try:
            ended, _ = await asyncio.wait((running,), timeout=left_with_grace_s(call.scope))
            if not ended:
                call.scope.cancel()  # a call that still waits for a thread ends at once
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            call.scope.cancel()
            while not running.done():
                try:
                    await asyncio.wait((running,))
                except asyncio.CancelledError:
                    continue  # cancelled again; the buffer must be free first, and the wait is bounded
            if not running.cancelled():
                running.exception()  # retrieved here, or asyncio logs it as never retrieved
            raise


def _close_unwanted(opening: asyncio.Future[KVClient]) -> None:
    """Close a client whose ``connect`` was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.get_loop().run_in_executor(None, opening.result().close)
