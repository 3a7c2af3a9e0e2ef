"""One client process of a stress run. It waits for a command, does it, and reports totals several times per second."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Final

from kvclient import KVClient
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey
from kvstore.replay.engine import ReplayTotals, RequestRunner
from kvstore.stress.limits import HostLimit, MemcpyLimit, SocketLimit
from kvstore.stress.plan import StressChains, StressPlan

_REPORT_S: Final = 0.2
_VISIBLE_S: Final = 5.0
_VISIBLE_POLL_S: Final = 0.02
_SAMPLE_EVERY: Final = 4
"""Loads per sample of the host's limit."""


class StressCommand(StrEnum):
    """Commands of the parent."""

    COLD = "cold"
    WARM = "warm"


def run_client(plan: StressPlan, number: int, pipe: Connection) -> None:
    """Serve the commands of the parent until it closes the pipe. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        runner.store(chains.stored(number, request), 0)
        reporter.counted()
    _wait_visible(client, chains.stored(number, plan.requests - 1))


def _wait_visible(client: KVClient, keys: list[BlockKey]) -> None:
    """Wait until lookups show the last request, or a few seconds: without a local node a store does not wait for it."""
    end_s = time.monotonic() + _VISIBLE_S
    while client.lookup(keys).hit_blocks < len(keys) and time.monotonic() < end_s:
        time.sleep(_VISIBLE_POLL_S)


def _warm(plan: StressPlan, number: int, runner: RequestRunner, reporter: _Reporter, *, local: bool) -> tuple[int, float]:
    """Load, with a sample of the host's limit after every few requests. Returns bytes and seconds of the samples."""
    limit: HostLimit = MemcpyLimit(plan.request_bytes) if local else SocketLimit(plan.request_bytes)
    samples = 0
    seconds = 0.0
    try:
        for done, keys in enumerate(_warm_requests(plan, number)):
            runner.load(keys)
            if done % _SAMPLE_EVERY == 0:
                seconds += limit.sample()
                samples += 1
            reporter.counted()
    finally:
        limit.close()
    return samples * plan.request_bytes, seconds


def _warm_requests(plan: StressPlan, number: int) -> Iterator[list[BlockKey]]:
    """Each stored request once, or again and again for the duration of the pass."""
    chains = StressChains(plan)
    end_s = None if plan.duration_s is None else time.monotonic() + plan.duration_s
    for turn in itertools.count():
        for request in range(plan.requests):
            yield chains.warm(number, request, turn)
            if end_s is not None and time.monotonic() >= end_s:
                return
        if end_s is None:
            return


class _Reporter:
    """Sends totals to the parent and resets them, so that they stay small."""

    def __init__(self, tally: ReplayTotals, pipe: Connection) -> None:
        self._tally = tally
        self._pipe = pipe
        self._next_s = time.monotonic() + _REPORT_S

    def counted(self) -> None:
        """Count a request, and report if it is time."""
        self._tally.requests += 1
        if time.monotonic() >= self._next_s:
            self.report()

    def report(self) -> None:
        """Report."""
        self._pipe.send(("totals", self._tally.take()))
        self._next_s = time.monotonic() + _REPORT_S
