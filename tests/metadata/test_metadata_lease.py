"""Tests of the lease core: two servers never hold one lease, whatever happens to servers, answers and clocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.metadata.roles.lease import Lease, LeaseChange, Renewal

TTL_S = 3.0
MARGIN_S = 0.3
DRIFT = 0.04
"""Clocks run faster or slower by up to 4 %, which the margin covers for both clocks together."""


def test_lease_is_valid_from_before_its_renewal_was_sent() -> None:
    lease = Lease(TTL_S, MARGIN_S)
    assert not lease.is_valid(0.0)
    renewal = lease.renewal_sent(10.0)
    assert lease.renewal_granted(renewal, 12.0) == [LeaseChange.TAKEN]
    assert lease.is_valid(12.69)
    assert not lease.is_valid(12.71)
    assert lease.tick(12.69) == []
    assert lease.tick(12.71) == [LeaseChange.LOST]
    assert lease.tick(13.0) == []


def test_lease_granted_after_a_pause_is_not_valid() -> None:
    lease = Lease(TTL_S, MARGIN_S)
    renewal = lease.renewal_sent(10.0)
    assert lease.renewal_granted(renewal, 20.0) == []
    assert not lease.is_valid(20.0)


def test_lease_renewed_after_it_ended_is_lost_in_between() -> None:
    lease = Lease(TTL_S, MARGIN_S)
    lease.renewal_granted(lease.renewal_sent(10.0), 10.0)
    assert lease.renewal_granted(lease.renewal_sent(15.0), 15.1) == [LeaseChange.LOST, LeaseChange.TAKEN]


def test_lease_refused_ends_at_once() -> None:
    lease = Lease(TTL_S, MARGIN_S)
    first, second = lease.renewal_sent(10.0), lease.renewal_sent(11.0)
    lease.renewal_granted(second, 11.0)
    assert lease.renewal_refused(first, 11.1) == [], "an older answer than the last one"
    assert lease.is_valid(11.1)
    assert lease.renewal_refused(lease.renewal_sent(11.2), 11.3) == [LeaseChange.LOST]
    assert not lease.is_valid(11.3)


def test_lease_released_ignores_answers_to_earlier_renewals() -> None:
    lease = Lease(TTL_S, MARGIN_S)
    lease.renewal_granted(lease.renewal_sent(10.0), 10.0)
    late = lease.renewal_sent(10.5)
    assert lease.released(10.6) == [LeaseChange.LOST]
    assert lease.renewal_granted(late, 10.7) == []
    assert not lease.is_valid(10.7)
    assert lease.renewal_granted(lease.renewal_sent(10.8), 10.9) == [LeaseChange.TAKEN]


@dataclass
class Server:
    """A server of the model. ``rate`` is the speed of its clock, ``offset_s`` its first value."""

    rate: float
    offset_s: float
    lease: Lease = field(default_factory=lambda: Lease(TTL_S, MARGIN_S))
    stopped: bool = False
    on_the_way: list[Renewal] = field(default_factory=list)
    """Renewals that the index has not received."""
    answers: list[tuple[Renewal, bool]] = field(default_factory=list)
    """Answers that the server has not received."""
    held: bool = False
    """Whether the lease is held, according to the changes."""

    def now_s(self, true_s: float) -> float:
        return self.offset_s + true_s * self.rate


class TwoServers(RuleBasedStateMachine):
    """Two servers and an index that keeps its promise. Messages are delayed, reordered and lost; servers stop and continue."""

    def __init__(self) -> None:
        super().__init__()
        self.true_s = 0.0
        self.holder: int | None = None
        self.ends_s = 0.0
        self.index_rate = 1.0
        self.servers: list[Server] = []

    @precondition(lambda self: not self.servers)
    @rule(
        rates=st.tuples(*[st.floats(1 - DRIFT, 1 + DRIFT)] * 3),
        offsets=st.tuples(*[st.floats(-1e6, 1e6)] * 2),
    )
    def begin(self, rates: tuple[float, float, float], offsets: tuple[float, float]) -> None:
        self.index_rate = rates[2]
        self.servers = [Server(rates[0], offsets[0]), Server(rates[1], offsets[1])]

    def of(self, number: int) -> Server:
        return self.servers[number]

    def note(self, server: Server, changes: list[LeaseChange]) -> None:
        for change in changes:
            assert server.held != (change is LeaseChange.TAKEN), "changes alternate"
            server.held = change is LeaseChange.TAKEN

    @precondition(lambda self: self.servers)
    @rule(seconds=st.one_of(st.floats(0.0, 1.0), st.floats(1.0, 20.0)))
    def time_passes(self, seconds: float) -> None:
        self.true_s += seconds

    @precondition(lambda self: self.servers)
    @rule(number=st.integers(0, 1))
    def stop_or_continue(self, number: int) -> None:
        server = self.of(number)
        server.stopped = not server.stopped

    @precondition(lambda self: self.servers)
    @rule(number=st.integers(0, 1), released=st.integers(0, 9))
    def send(self, number: int, released: int) -> None:
        server = self.of(number)
        if server.stopped:
            return
        now_s = server.now_s(self.true_s)
        if released == 0:
            self.note(server, server.lease.released(now_s))
            server.on_the_way.clear()  # the server waits for a renewal to end before it frees the lease
            server.answers.clear()
            if self.holder == number:
                self.holder = None
        server.on_the_way.append(server.lease.renewal_sent(now_s))

    @precondition(lambda self: self.servers)
    @rule(number=st.integers(0, 1), which=st.integers(0, 3), lost=st.booleans())
    def index_receives(self, number: int, which: int, *, lost: bool) -> None:
        server = self.of(number)
        if not server.on_the_way:
            return
        renewal = server.on_the_way.pop(which % len(server.on_the_way))
        if self.holder is None or self.true_s >= self.ends_s or self.holder == number:
            self.holder, self.ends_s = number, self.true_s + TTL_S / self.index_rate
        if not lost:
            server.answers.append((renewal, self.holder == number))

    @precondition(lambda self: self.servers)
    @rule(number=st.integers(0, 1), which=st.integers(0, 3))
    def server_receives(self, number: int, which: int) -> None:
        server = self.of(number)
        if server.stopped or not server.answers:
            return
        renewal, granted = server.answers.pop(which % len(server.answers))
        event = server.lease.renewal_granted if granted else server.lease.renewal_refused
        self.note(server, event(renewal, server.now_s(self.true_s)))

    @precondition(lambda self: self.servers)
    @rule(number=st.integers(0, 1))
    def tick(self, number: int) -> None:
        server = self.of(number)
        if not server.stopped:
            now_s = server.now_s(self.true_s)
            self.note(server, server.lease.tick(now_s))
            assert server.held == server.lease.is_valid(now_s)

    @invariant()
    def one_server_at_most_holds_the_lease(self) -> None:
        holding = [number for number, server in enumerate(self.servers) if server.lease.is_valid(server.now_s(self.true_s))]
        assert len(holding) <= 1
        assert all(self.holder == number and self.true_s < self.ends_s for number in holding)


TestTwoServers = TwoServers.TestCase
