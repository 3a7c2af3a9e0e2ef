"""Orderly exit on SIGTERM and SIGHUP. Without a handler, they end Python at once without cleanup."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def orderly_exit() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise SystemExit with 128 + their number, so that cleanup runs.

    Later signals are ignored, because they would interrupt the cleanup. Main thread only.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # a signal ignored by nohup stays ignored
    earlier = {number: signal.signal(number, on_signal) for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
