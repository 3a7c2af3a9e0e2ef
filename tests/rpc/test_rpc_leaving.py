"""A signal begins a graceful shutdown; a repeated one ends the process. Duplicates from a process group do not."""

from __future__ import annotations

import asyncio
import os
import signal

from kvstore.core.clock import ManualClock
from kvstore.process.graceful_shutdown import REPEAT_S, GracefulShutdown, SignalCounter


def test_signal_repeated_ends_immediately() -> None:
    clock = ManualClock()
    signals = SignalCounter(clock.now_s)
    assert not signals.is_repeated(signal.SIGINT)
    clock.advance(REPEAT_S * 5)
    assert not signals.is_repeated(signal.SIGTERM), "SIGINT to the group, SIGTERM from the parent"
    clock.advance(REPEAT_S / 2)
    assert not signals.is_repeated(signal.SIGTERM), "duplicate of one signal"
    clock.advance(REPEAT_S / 2)
    assert signals.is_repeated(signal.SIGTERM)
    assert signals.is_repeated(signal.SIGINT)


async def test_shutdown_hanging_process_is_ended() -> None:
    begun, ended = asyncio.Event(), asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    shutdown = GracefulShutdown(-2.99, begun.set, lambda code: loop.call_soon_threadsafe(ended.put_nowait, code))
    shutdown.listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await begun.wait()
        assert await ended.get() == 0, "its deadline has passed"
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
