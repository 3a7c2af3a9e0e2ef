"""Probes detect a server that stops answering, and a slow server is not reported as hung."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Unavailable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport import liveness
from kvstore.transport.liveness import (
    GRACE_S,
    IDLE_S,
    LATE_S,
    SILENCE_S,
    TICK_S,
    LivenessMonitor,
    ServerLiveness,
    ServerState,
    WatchedServer,
)
from support.wait import wait_until

WAIT_S = 20.0


# ---- the state of one server
def tick_for(server: ServerLiveness, begin_s: float, seconds: float, oldest_s: float | None) -> list[float]:
    """Tick on time; return the times at which the server became hung."""
    steps = round(seconds / TICK_S)
    return [at for at in (begin_s + step * TICK_S for step in range(1, steps + 1)) if server.tick(at, oldest_s).hung]


def test_liveness_young_wait_sends_no_probe() -> None:
    server = ServerLiveness()
    assert not server.tick(10.0, 10.0).probe
    assert not server.tick(10.0 + GRACE_S * 0.9, 10.0).probe
    assert server.state is ServerState.ALIVE


def test_liveness_unanswered_probe_makes_hung_once() -> None:
    server = ServerLiveness()
    hung = tick_for(server, 0.0, 5.0, 0.0)
    assert len(hung) == 1
    assert hung[0] <= GRACE_S + SILENCE_S + 2 * TICK_S


def test_liveness_answered_probes_keep_slow_server_alive() -> None:
    server = ServerLiveness()
    for step in range(1, 400):
        if server.tick(step * TICK_S, 0.0).probe:
            server.probe_ended(step * TICK_S, answered=True)
    assert server.state is ServerState.ALIVE


def test_liveness_failed_probe_is_sent_again() -> None:
    server = ServerLiveness()
    assert server.tick(GRACE_S, 0.0).probe
    server.probe_ended(GRACE_S, answered=False)
    assert server.state is ServerState.SUSPECT
    assert server.tick(GRACE_S + TICK_S, 0.0).probe


def test_liveness_hung_server_recovers_after_one_answer() -> None:
    server = ServerLiveness()
    tick_for(server, 0.0, 3.0, 0.0)
    assert server.state is ServerState.HUNG
    assert not server.tick(3.1, None).probe, "one probe is already under way"
    assert server.probe_ended(3.2, answered=True).recovered
    assert server.state is ServerState.ALIVE
    assert not server.tick(3.25, 0.0).probe, "an answer starts a new grace period, however old the wait is"


def test_liveness_late_tick_is_not_silence() -> None:
    server = ServerLiveness()
    assert server.tick(GRACE_S, 0.0).probe
    assert not server.tick(GRACE_S + 60.0, 0.0).hung, "this process was stopped for a minute"
    assert server.state is ServerState.SUSPECT
    assert tick_for(server, GRACE_S + 60.0, SILENCE_S + TICK_S, 0.0), "later silence counts"


@given(st.lists(st.tuples(st.sampled_from(["tick", "wait", "leave", "answer", "fail"]), st.floats(0.001, LATE_S)), max_size=120))
def test_liveness_hung_only_after_unanswered_silence(events: list[tuple[str, float]]) -> None:
    """A server is hung only if a probe was unanswered for the whole silence. There is one probe at a time."""
    server, now_s = ServerLiveness(), 0.0
    oldest_s: float | None = None
    probing = False
    answered_s = 0.0
    for event, passed_s in events:
        now_s += passed_s
        if event == "wait" and oldest_s is None:
            oldest_s = now_s
        elif event == "leave":
            oldest_s = None
        elif event in ("answer", "fail") and probing:
            probing = False
            server.probe_ended(now_s, answered=event == "answer")
            if event == "answer":
                answered_s = now_s
                assert server.state is ServerState.ALIVE
        elif event == "tick":
            before = server.state
            decision = server.tick(now_s, oldest_s)
            if decision.probe:
                assert not probing, "two probes at once"
                probing = True
            assert decision.hung == (before is not ServerState.HUNG and server.state is ServerState.HUNG)
            if decision.hung:
                assert now_s - answered_s >= SILENCE_S
        if server.state is not ServerState.ALIVE:
            assert probing or event == "fail" or not server.settled


# ---- many servers, with a thread
class Probes:
    """Fake servers: each answers probes, or leaves them pending until ``resume``."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.sent: list[str] = []
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Callable[[bool], None]]] = []

    def __call__(self, address: str, timeout_s: float, ended: Callable[[bool], None]) -> None:
        with self._lock:
            self.sent.append(address)
            if address in self.silent:
                self._pending.append((address, ended))
                return
        ended(True)

    def resume(self, address: str) -> None:
        self.silent.discard(address)
        self.end_pending(address, answered=True)

    def end_pending(self, address: str, *, answered: bool) -> None:
        with self._lock:
            ready = [ended for name, ended in self._pending if name == address]
            self._pending = [one for one in self._pending if one[0] != address]
        for ended in ready:
            ended(answered)


@pytest.fixture
def probes() -> Probes:
    return Probes()


@pytest.fixture
def monitor(probes: Probes) -> Iterator[LivenessMonitor]:
    monitor = LivenessMonitor(probes, Counters())
    yield monitor
    monitor.close()


def wait_until_cancelled(server: WatchedServer) -> None:
    cancelled = threading.Event()
    with server.waiting(cancelled.set):
        assert cancelled.wait(WAIT_S)
        raise RuntimeError("error of the cancelled call")


def test_monitor_hung_server_cancels_and_refuses_waits(monitor: LivenessMonitor, probes: Probes) -> None:
    probes.silent.add("a")
    server = monitor.server("a")
    with pytest.raises(Unavailable, match="stopped answering"):
        wait_until_cancelled(server)
    assert server.hung
    with pytest.raises(Unavailable), server.waiting(lambda: None):
        pytest.fail("entered")
    probes.resume("a")
    assert not server.hung
    with server.waiting(lambda: None):
        pass


def test_monitor_hung_server_nobody_calls_is_forgotten(
    monitor: LivenessMonitor, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "FORGET_S", 0.5)
    monkeypatch.setattr(liveness, "IDLE_S", 0.1)
    probes.silent.add("a")
    server = monitor.server("a")
    with pytest.raises(Unavailable):
        wait_until_cancelled(server)
    wait_until(lambda: not server.hung, "the server was forgotten")
    probes.end_pending("a", answered=False)
    wait_until(lambda: not monitor.awake, "no probe is sent any more")
    with pytest.raises(Unavailable):  # a new call finds out again
        wait_until_cancelled(server)


def test_monitor_hung_server_leaves_others_alive(monitor: LivenessMonitor, probes: Probes) -> None:
    probes.silent.add("a")
    with monitor.server("b").waiting(lambda: pytest.fail("cancelled")), pytest.raises(Unavailable):
        wait_until_cancelled(monitor.server("a"))
    assert not monitor.server("b").hung


def test_monitor_without_waits_pauses_and_resumes(
    monitor: LivenessMonitor, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "IDLE_S", 4 * TICK_S)
    server = monitor.server("a")
    with server.waiting(lambda: None):
        wait_until(lambda: len(probes.sent) >= 2)
    wait_until(lambda: server not in monitor.awake)
    sent = len(probes.sent)
    time.sleep(2 * TICK_S)
    assert len(probes.sent) == sent
    probes.silent.add("a")
    with pytest.raises(Unavailable):
        wait_until_cancelled(server)
    assert IDLE_S > 0


def test_monitor_without_thread_checks_from_next_wait(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    counters = Counters()
    monitor = LivenessMonitor(probes, counters)
    probes.silent.update(("a", "b"))
    first, cancelled = monitor.server("a"), threading.Event()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        earlier = first.waiting(cancelled.set).__enter__()
    assert counters.get(transport_metrics.PEER_WAITS_UNCHECKED) == 1
    with pytest.raises(Unavailable):
        wait_until_cancelled(monitor.server("b"))
    assert cancelled.wait(WAIT_S), "the earlier wait is checked too"
    first.end_wait(earlier)
    monitor.close()


def test_monitor_without_thread_closes(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed = threading.Event()
    monitor = LivenessMonitor(probes, Counters(), closed.set)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with monitor.server("a").waiting(lambda: None):
        pass
    monitor.close()
    assert closed.is_set()


def test_wait_own_error_passes_unchanged(monitor: LivenessMonitor) -> None:
    with pytest.raises(KeyError), monitor.server("a").waiting(lambda: None):
        raise KeyError("the caller's own")
