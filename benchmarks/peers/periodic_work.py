"""A process that uses a given share of one processor in short pieces, and touches nothing of the store."""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType
from typing import Self


class PeriodicWork:
    """The running process; a context manager that ends it.

    Args:
        rate: pieces of work per second.
        seconds: CPU seconds per piece.
    """

    def __init__(self, rate: float, seconds: float) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, str(rate), str(seconds)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


def work(rate: float, seconds: float) -> None:
    """Compute until the process is killed. Pieces that are late are done at once, as queued requests are."""
    due_s = time.perf_counter()
    while True:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass
        due_s += 1 / rate
        time.sleep(max(0.0, due_s - time.perf_counter()))


if __name__ == "__main__":
    work(float(sys.argv[1]), float(sys.argv[2]))
