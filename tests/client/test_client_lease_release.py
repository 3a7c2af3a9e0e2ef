"""Times at which released leases are sent: no load waits for their space, and many loads cost few calls."""

from __future__ import annotations

import logging
import math
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.nodes import lease_release
from kvclient.nodes.lease_release import LONGEST_S, QUIET_S, LeaseReleaser, ReleaseBatcher
from kvclient.options import ClientOptions
from kvproto.v1 import node_pb2
from kvstore.core.errors import NotFound, Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from support.wait import wait_until

MOST = 1000


@pytest.fixture
def times() -> ReleaseBatcher:
    return ReleaseBatcher(MOST)


def test_release_batcher_empty_is_never_due(times: ReleaseBatcher) -> None:
    assert times.left_s(5.0) == math.inf


def test_release_batcher_sends_after_a_quiet_moment(times: ReleaseBatcher) -> None:
    times.added(1.0, 1, urgent=False)
    assert times.left_s(1.0) == pytest.approx(QUIET_S)
    times.added(1.0 + QUIET_S / 2, 1, urgent=False)
    assert times.left_s(1.0 + QUIET_S) == pytest.approx(QUIET_S / 2)
    assert times.left_s(1.0 + 2 * QUIET_S) <= 0


def test_release_batcher_sends_large_leases_at_once(times: ReleaseBatcher) -> None:
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) > 0
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) <= 0
    times.sent()
    assert times.left_s(1.0) == math.inf
    times.added(1.0, MOST // 2, urgent=False)
    assert times.left_s(1.0) > 0


def test_release_batcher_urgent_lease_sends_all(times: ReleaseBatcher) -> None:
    times.added(1.0, 1, urgent=False)
    times.added(1.0, 0, urgent=True)
    assert times.left_s(1.0) <= 0


@pytest.mark.parametrize("seed", range(20))
def test_release_batcher_bounds_delay_and_calls(seed: int) -> None:
    draw = random.Random(seed)
    times = ReleaseBatcher(MOST)
    now_s, kept, calls, total = 0.0, list[tuple[float, int]](), 0, 0

    def until(end_s: float) -> None:
        """The thread that sends, as it sleeps and wakes."""
        nonlocal now_s, calls
        while now_s + max(0.0, left_s := times.left_s(now_s)) <= end_s:
            now_s += max(0.0, left_s)
            assert kept
            assert now_s - kept[0][0] <= LONGEST_S * 1.001
            kept.clear()
            times.sent()
            calls += 1
        now_s = end_s

    for _ in range(2000):
        until(now_s + draw.choice((0.0, 0.0001, 0.001, 0.004, 0.03)))
        nbytes = draw.randrange(1, 120)
        times.added(now_s, nbytes, urgent=False)
        kept.append((now_s, nbytes))
        total += nbytes
        until(now_s)
        assert sum(size for _, size in kept) < MOST
    ended_s = now_s
    until(now_s + QUIET_S * 1.001)
    assert not kept, "the load has nothing more to copy, and waits"
    assert calls <= total / MOST + ended_s / QUIET_S + 1


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("not an error of the store")])
def test_release_not_answered_is_sent_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failures = [error, error]
    aborts, leases = list[bytes](), list[int]()

    def call(method: str, request: Any, _timeout_s: float) -> None:
        if failures:
            raise failures.pop()
        if method == "Abort":
            aborts.append(request.operation_id)
        else:
            leases.extend(request.lease_ids)

    incidents = LimitedLog(logging.getLogger(__name__))
    releaser = releaser_of(monkeypatch, call, incidents)
    for number in range(3):
        releaser.abort(bytes([number]))
    releaser.release([1, 2, 3], urgent=True)
    wait_until(lambda: len(aborts) == len(leases) == 3, "all was given back")
    releaser.close()
    assert sorted(aborts) == [bytes([number]) for number in range(3)]
    assert sorted(leases) == [1, 2, 3]
    assert incidents.counters.snapshot()[client_metrics.RETURNS_FAILED] == 2


def test_release_refused_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def call(method: str, _request: Any, _timeout_s: float) -> None:
        calls.append(method)
        if method == "Abort":
            raise NotFound("the session is unknown")

    releaser = releaser_of(monkeypatch, call, LimitedLog(logging.getLogger(__name__)))
    releaser.abort(b"operation")
    wait_until(lambda: calls == ["Abort"], "the slots were given back")
    releaser.release([1], urgent=True)
    wait_until(lambda: calls[-1] == "Release", "the lease was released")
    releaser.close()
    assert calls == ["Abort", "Release"]


def test_release_without_thread_is_sent_by_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    leases, incidents = list[int](), LimitedLog(logging.getLogger(__name__))
    releaser = releaser_of(monkeypatch, lambda _, request, __: leases.extend(request.lease_ids), incidents)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        releaser.release([1], urgent=True)
    assert incidents.counters.get(client_metrics.RETURNS_FAILED) == 1
    releaser.release([2])
    wait_until(lambda: leases == [1, 2], "both leases were released")
    releaser.close()


def releaser_of(monkeypatch: pytest.MonkeyPatch, call: Any, incidents: LimitedLog) -> LeaseReleaser:
    """A releaser whose calls go to a function."""
    monkeypatch.setattr(lease_release, "call", call)
    stub: Any = SimpleNamespace(Abort="Abort", Release="Release")
    opened = node_pb2.OpenSessionResponse(session_id=b"session", arena_bytes=1 << 30)
    return LeaseReleaser(stub, opened, ClientOptions(), incidents)
