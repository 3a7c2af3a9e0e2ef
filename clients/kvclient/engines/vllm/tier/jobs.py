"""Loads and stores of chunks in threads. Each ends by its deadline, which begins when the job is submitted."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvclient import KVStoreError, Lookup, Paths, Unavailable
from kvclient.engines.vllm.tier.chunks import Chunk, ChunkStore
from kvclient.engines.vllm.tier.counters import TierCounters
from kvstore.process.threads.submission import submit


@dataclass(frozen=True, slots=True)
class JobPart:
    """The chunks of one group in a job.

    Attributes:
        store: the group's namespace.
        chunks: its chunks.
        chain: vLLM's hashes of the request's leading chunks.
        found: the last lookup of this chain, if there was one.
        paths: hosts whose storage links a load may use; None: as the options say.
    """

    store: ChunkStore
    chunks: Sequence[Chunk]
    chain: Sequence[bytes]
    found: Lookup | None
    paths: Paths | None = None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended.

    Attributes:
        job_id: vLLM's number.
        loads: whether it was a load.
        keys: of all its chunks.
        arrived: keys among them that were loaded, or that the store holds.
        seconds: since the job was submitted.
        nbytes: bytes that were moved.
    """

    job_id: int
    loads: bool
    keys: tuple[bytes, ...]
    arrived: tuple[bytes, ...] = ()
    seconds: float = 0.0
    nbytes: int = 0


class ChunkJobs:
    """Threads for loads, and as many for stores, so that a load never waits for stores.

    Args:
        workers: threads of each kind.
        counters: counts failures.
        wake: called when a job has ended.
    """

    def __init__(self, workers: int, counters: TierCounters, wake: Callable[[], None]) -> None:
        self._counters = counters
        self._wake = wake
        self._running: dict[Future[None], EndedJob] = {}
        """By future: the job as it ends if it never begins."""
        self._ended: queue.SimpleQueue[EndedJob] = queue.SimpleQueue()
        self._pools = {
            loads: ThreadPoolExecutor(workers, f"kvstore-tier-{'load' if loads else 'store'}") for loads in (True, False)
        }

    @property
    def busy(self) -> bool:
        """Whether jobs are running."""
        return any(not future.done() for future in self._running)

    def submit(self, job: EndedJob, parts: Sequence[JobPart], deadline_s: float) -> None:
        """Start a job. ``job`` is its result if nothing arrives."""
        try:
            future = submit(self._pools[job.loads], self._run, job, parts, time.monotonic() + deadline_s)
        except Unavailable as error:
            self._count_missing(job, len(job.keys), error)
            self._ended.put(job)
        else:
            self._running[future] = job

    def refuse(self, job: EndedJob) -> None:
        """End a job without work."""
        self._ended.put(job)

    def _run(self, job: EndedJob, parts: Sequence[JobPart], end_s: float) -> None:
        began_s = time.monotonic()
        arrived: list[bytes] = []
        nbytes = 0
        cause: object = None
        try:
            for part in parts:
                if job.loads:
                    good, sizes, why = part.store.load(part.chunks, part.chain, part.found, end_s, part.paths)
                    size = sizes.total()
                    for path, moved in sizes.items():
                        self._counters.add(f"load_{path}_path_bytes", moved)
                else:
                    good, size, why = part.store.store(part.chunks, part.chain, end_s)
                arrived += good
                nbytes += size
                cause = why or cause
        except KVStoreError as error:
            cause = error
        except Exception as error:  # noqa: BLE001  # the edge of the thread: the job must end
            self._counters.bug("load" if job.loads else "store", error)
            cause = repr(error)
        finally:
            self._ended.put(EndedJob(job.job_id, job.loads, job.keys, tuple(arrived), time.monotonic() - began_s, nbytes))
            if missing := len(job.keys) - len(arrived):
                if cause is None:
                    cause = "the deadline passed" if time.monotonic() >= end_s else "the tier has no namespace for them"
                self._count_missing(job, missing, cause)
            self._wake()

    def _count_missing(self, job: EndedJob, missing: int, cause: object) -> None:
        if job.loads:
            self._counters.failed("load_missing_chunks", missing, "chunks not loaded", cause)
        else:
            self._counters.failed("store_missing_chunks", missing, "chunks not stored", cause)

    def ended(self) -> Iterator[EndedJob]:
        """Return each job that has ended, once."""
        for future in [future for future in self._running if future.done()]:
            del self._running[future]
        while True:
            try:
                yield self._ended.get_nowait()
            except queue.Empty:
                return

    def drain(self) -> None:
        """Cancel the jobs that have not begun, and wait for the others. Each has a deadline."""
        for future, job in list(self._running.items()):
            if future.cancel():
                del self._running[future]
                self._count_missing(job, len(job.keys), "the tier was drained before the job began")
                self._ended.put(job)
        wait(self._running)

    def shutdown(self) -> None:
        """End all jobs and threads."""
        self.drain()
        for pool in self._pools.values():
            pool.shutdown()
