"""Threads of the connector run beside the engine's computation."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

import pytest

from kvclient.engines.vllm.worker.cpu_affinity import unbound


def allowed() -> set[int]:
    """Processors on which a new thread may run."""
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return seen[0]


def worker(pipe: Connection) -> None:
    """Bind this process to one processor, like the worker of an engine."""
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, one)
    with unbound():
        inside = allowed()
    pipe.send((one, inside, allowed(), os.sched_getaffinity(0)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_threads_of_bound_worker_are_unbound() -> None:
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


def test_threads_of_bound_process_stay_bound() -> None:
    """vLLM did not start this process as its worker, so its own binding is kept."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        with unbound():
            assert allowed() == {min(own)}
    finally:
        os.sched_setaffinity(0, own)
