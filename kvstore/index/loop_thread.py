"""A private event loop in a thread, for callers without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from kvstore.core.errors import Unavailable

T = TypeVar("T")
_END_S: Final = 5.0
"""Time within which the thread ends."""


class LoopThread:
    """An event loop in a thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run work there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)
        self.loop.close()


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run work on the event loop of an index, from another thread, and wait for it.

    Raises:
        Unavailable: the loop is closed, or does not run.
    """
    try:
        waiting = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:  # the loop is closed
        work.close()
        raise Unavailable("the index is closed") from error
    try:
        return waiting.result(timeout_s)
    except concurrent.futures.CancelledError as error:
        raise Unavailable("the index is closed") from error
    except TimeoutError as error:
        if waiting.done():  # the work's own error
            raise
        waiting.cancel()
        raise Unavailable("the event loop of the index does not run") from error
