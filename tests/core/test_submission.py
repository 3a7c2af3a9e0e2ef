"""Work that a thread pool refuses never runs, also not in another thread of the pool."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.core.errors import Unavailable
from kvstore.process.threads.submission import LazyThreadPool, submit


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may start the first thread of a pool, and no other."""
    start = threading.Thread.start

    def limited_start(thread: threading.Thread) -> None:
        if thread.name == "pool_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)


@pytest.mark.usefixtures("one_thread")
def test_submit_without_thread_never_runs_the_work() -> None:
    begun: list[int] = []
    go = threading.Event()
    with ThreadPoolExecutor(2, "pool") as pool:
        first = submit(pool, go.wait, 10.0)
        with pytest.raises(Unavailable):
            submit(pool, begun.append, 1)
        go.set()
        assert first.result()
        submit(pool, begun.append, 2).result()
    assert begun == [2]


@pytest.mark.usefixtures("one_thread")
def test_client_threads_without_thread_refuse_the_work() -> None:
    begun: list[int] = []
    go = threading.Event()
    pool = LazyThreadPool(2, "pool")
    first = pool.submit(go.wait, 10.0)
    with pytest.raises(Unavailable):
        pool.submit(begun.append, 1)
    go.set()
    assert first.result()
    pool.close()
    assert not begun


def test_submit_passes_results_and_errors() -> None:
    with ThreadPoolExecutor(1, "pool") as pool:
        assert submit(pool, int, "7").result() == 7
        with pytest.raises(ValueError, match="invalid literal"):
            submit(pool, int, "x").result()
    with pytest.raises(Unavailable):
        submit(pool, int, "7")


def test_submit_work_cancelled_by_shutdown_is_done() -> None:
    begun: list[int] = []
    go = threading.Event()
    pool = ThreadPoolExecutor(1, "pool")
    first, second = submit(pool, go.wait, 10.0), submit(pool, begun.append, 1)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go.set()
    assert first.result()
    assert not begun


def test_submit_cancelled_work_does_not_run() -> None:
    begun: list[int] = []
    go = threading.Event()
    with ThreadPoolExecutor(1, "pool") as pool:
        submit(pool, go.wait, 10.0)
        assert submit(pool, begun.append, 1).cancel()
        go.set()
    assert not begun
