"""One client process of a stress run. Its sessions wait for a command, do it, and report totals several times per second."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Final

from kvclient import KVClient
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey
from kvstore.replay.engine import ReplayTotals, RequestRunner
from kvstore.stress.limits import HostLimit, MemcpyLimit, SocketLimit
from kvstore.stress.plan import OperationKind, StressChains, StressPlan

_REPORT_S: Final = 0.2
_VISIBLE_S: Final = 5.0
_VISIBLE_POLL_S: Final = 0.02
_SAMPLE_EVERY: Final = 4
"""Operations per sample of the host's limit."""


class StressCommand(StrEnum):
    """Commands of the parent."""

    COLD = "cold"
    WARM = "warm"


def run_client(plan: StressPlan, pipes: Mapping[int, Connection]) -> None:
    """Serve the commands of the parent until it closes the pipes, in one thread per session. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sessions = [threading.Thread(target=_run_session, args=(plan, *one), daemon=True) for one in pipes.items()]
    for session in sessions:
        session.start()
    for session in sessions:
        session.join()


def _run_session(plan: StressPlan, number: int, pipe: Connection) -> None:
    with pipe:  # so that the parent notices the end of one session
        try:
            client = KVClient.connect(plan.metadata, plan.spec(), node=plan.node, tls=plan.tls, options=plan.options(number))
        except (KVStoreError, OSError) as error:
            pipe.send(("failed", str(error)))
            return
        with client:
            pipe.send(("ready", client.local_node or ""))
            try:
                _serve(plan, number, pipe, client)
            except (EOFError, BrokenPipeError):
                return  # the parent has ended


def _serve(plan: StressPlan, number: int, pipe: Connection, client: KVClient) -> None:
    tally = ReplayTotals()
    runner = RequestRunner(client, tally, plan.request_blocks)
    reporter = _Reporter(tally, pipe)
    work: dict[StressCommand, Callable[[], object]] = {
        StressCommand.COLD: lambda: _cold(plan, number, runner, reporter, client),
        StressCommand.WARM: lambda: _warm(plan, number, runner, reporter, local=client.local_node is not None),
    }
    while True:
        done = work[pipe.recv()]()
        reporter.report()
        pipe.send(("done", done))


def _cold(plan: StressPlan, number: int, runner: RequestRunner, reporter: _Reporter, client: KVClient) -> None:
    chains = StressChains(plan)
    for request in range(plan.requests):
        with reporter.operation(OperationKind.STORE):
            runner.store(chains.stored(number, request), 0)
    _wait_visible(client, chains.stored(number, plan.requests - 1))


def _wait_visible(client: KVClient, keys: list[BlockKey]) -> None:
    """Wait until lookups show the last request, or a few seconds: without a local node a store does not wait for it."""
    end_s = time.monotonic() + _VISIBLE_S
    while client.lookup(keys).hit_blocks < len(keys) and time.monotonic() < end_s:
        time.sleep(_VISIBLE_POLL_S)


def _warm(plan: StressPlan, number: int, runner: RequestRunner, reporter: _Reporter, *, local: bool) -> tuple[int, float]:
    """Run operations, with a sample of the host's limit after every few. Returns bytes and seconds of the samples.

    With a rate, samples would delay operations, so one is taken before the first operation.
    """
    limit: HostLimit = MemcpyLimit(plan.request_bytes) if local else SocketLimit(plan.request_bytes)
    samples = 0
    seconds = 0.0
    run: dict[OperationKind, Callable[[list[BlockKey]], object]] = {
        OperationKind.LOOKUP: runner.lookup,
        OperationKind.LOAD: runner.load,
        OperationKind.STORE: lambda keys: runner.store(keys, 0),
    }
    try:
        if plan.rate is not None:
            seconds, samples = limit.sample(), 1
        for done, (kind, keys, due_s) in enumerate(_started(plan, number)):
            with reporter.operation(kind, due_s):
                run[kind](keys)
            if plan.rate is None and done % _SAMPLE_EVERY == 0:
                seconds += limit.sample()
                samples += 1
    finally:
        limit.close()
    return samples * plan.request_bytes, seconds


def _started(plan: StressPlan, number: int) -> Iterator[tuple[OperationKind, list[BlockKey], float | None]]:
    """Yield each operation of the warm pass when it is to begin, with that time after the start; None without a rate."""
    start_s = time.monotonic()
    for at, (kind, keys) in enumerate(warm_operations(plan, number)):
        now_s, due_s = time.monotonic() - start_s, plan.due_s(number, at)
        if plan.duration_s is not None and max(now_s, due_s) >= plan.duration_s:
            return
        if plan.rate is None:
            yield kind, keys, None
            continue
        if now_s < due_s:
            time.sleep(due_s - now_s)
        yield kind, keys, due_s


def warm_operations(plan: StressPlan, number: int) -> Iterator[tuple[OperationKind, list[BlockKey]]]:
    """Operations of a session: one per stored request, or without end if the pass has a duration.

    Lookups and loads take the stored requests in turn. Each store has new blocks.
    """
    chains = StressChains(plan)
    kinds = plan.mix.kinds(plan.run + number)
    for at in itertools.count() if plan.duration_s is not None else range(plan.requests):
        kind = next(kinds)
        turn, request = divmod(at, plan.requests)
        yield kind, chains.fresh(number, at) if kind is OperationKind.STORE else chains.warm(number, request, turn)


class _Reporter:
    """Sends totals to the parent and resets them, so that they stay small."""

    def __init__(self, tally: ReplayTotals, pipe: Connection) -> None:
        self._tally = tally
        self._pipe = pipe
        self._next_s = time.monotonic() + _REPORT_S
        self._latencies: dict[OperationKind, list[float]] = {}
        self._failed = 0
        self._free_s = 0.0
        """When the session would be free for an operation with a due time, if it made and checked payloads in no time."""

    @contextmanager
    def operation(self, kind: OperationKind, due_s: float | None = None) -> Iterator[None]:
        """Count an operation, and report if it is time.

        Its latency is the time of its calls. With a due time, the wait for the calls of earlier operations is added. The
        session's own work is not: it is no latency of the store.
        """
        calls = (self._tally.lookup_s, self._tally.load_s, self._tally.store_s)
        before = [len(times) for times in calls]
        errors = self._tally.errors.total()
        yield
        spent_s = sum(sum(times[first:]) for times, first in zip(calls, before, strict=True))
        latency_s = spent_s
        if due_s is not None:
            self._free_s = max(self._free_s, due_s) + spent_s
            latency_s = self._free_s - due_s
        self._latencies.setdefault(kind, []).append(latency_s)
        self._tally.requests += 1
        self._failed += self._tally.errors.total() > errors
        if time.monotonic() >= self._next_s:
            self.report()

    def report(self) -> None:
        """Report."""
        self._pipe.send(("totals", (self._tally.take(), self._latencies, self._failed)))
        self._latencies = {}
        self._failed = 0
        self._next_s = time.monotonic() + _REPORT_S
