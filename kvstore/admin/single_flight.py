"""Concurrent equal requests share one execution, so that many dashboards do not multiply the queries to nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Results of executions in flight, by key. Bound to one event loop. Nothing is kept after an execution has ended."""

    def __init__(self) -> None:
        self._flights: dict[K, asyncio.Task[T]] = {}

    async def run(self, key: K, execute: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Execute, or join the execution in flight for this key.

        An execution continues if its caller is cancelled, because other callers may wait for it; ``execute`` must have a timeout.

        Returns:
            The result, and whether it was shared.
        """
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            flight = self._flights[key] = asyncio.ensure_future(_coroutine(execute))
            flight.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(flight), shared

    def forget(self) -> None:
        """Let no later request join an execution in flight: its result may predate a change."""
        self._flights.clear()

    def _ended(self, key: K, flight: asyncio.Task[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # every caller may have disconnected: the error is dropped


async def _coroutine(execute: Callable[[], Awaitable[T]]) -> T:
    return await execute()
