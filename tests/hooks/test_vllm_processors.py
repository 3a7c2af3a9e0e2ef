"""Threads of the connector run beside the engine's computation."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

import pytest

from kvclient.engines.vllm.worker.cpu_affinity import unbound


def allowed() -> set[int]:
    """Where a thread that is started now may run."""
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return seen[0]


def worker(pipe: Connection) -> None:
    """As an engine's: bound to one processor."""
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, one)
    with unbound():
        inside = allowed()
    pipe.send((one, inside, allowed(), os.sched_getaffinity(0)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_a_bound_worker_starts_threads_that_are_not() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        one, inside, behind, main = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
    assert (inside, behind, main) == (os.sched_getaffinity(0), one, one)


def test_whoever_bound_the_whole_process_is_heeded() -> None:
    """Not what vLLM started as its worker: nobody knows better than itself where it may run."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        with unbound():
            assert allowed() == {min(own)}
    finally:
        os.sched_setaffinity(0, own)
