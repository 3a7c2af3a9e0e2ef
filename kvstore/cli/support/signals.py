"""SIGTERM and SIGHUP as orderly exits: without a handler they end Python at once, and nothing is cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def orderly_exit() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP end the program as an exception does: with 128 + their number, after cleaning up.

    Later signals are ignored, or they would interrupt the cleaning up. Main thread only.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # what nohup had ignored stays so
    earlier = {number: signal.signal(number, on_signal) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
