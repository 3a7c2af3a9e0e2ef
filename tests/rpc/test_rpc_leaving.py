"""A signal means: end in order. The same again means: at once; but not where parent and group were told by the same hand."""

from __future__ import annotations

import asyncio
import os
import signal

from kvstore.core.clock import ManualClock
from kvstore.process.graceful_shutdown import AGAIN_S, Leaving, Wishes


def test_the_same_signal_again_means_at_once() -> None:
    clock = ManualClock()
    wishes = Wishes(clock.now_s)
    assert not wishes.at_once(signal.SIGINT)
    clock.advance(AGAIN_S * 5)
    assert not wishes.at_once(signal.SIGTERM), "Ctrl-C told the group, and the parent passes it on in its own way"
    clock.advance(AGAIN_S / 2)
    assert not wishes.at_once(signal.SIGTERM), "told twice by the same hand"
    clock.advance(AGAIN_S / 2)
    assert wishes.at_once(signal.SIGTERM)
    assert wishes.at_once(signal.SIGINT)


async def test_a_process_leaves_once_told_and_is_ended_where_it_hangs() -> None:
    left, ended = asyncio.Event(), asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    leaving = Leaving(-2.99, left.set, lambda code: loop.call_soon_threadsafe(ended.put_nowait, code))
    leaving.listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await left.wait()
        assert await ended.get() == 0, "its deadline has passed"
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
