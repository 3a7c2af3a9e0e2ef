"""The findings that a node reports, and how long it reports them."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.limits import MAX_REASON
from kvstore.core.types import NodeId
from kvstore.health import codes
from kvstore.node.base.process_stall import ProcessStallDetector
from kvstore.node.base.slow_sources import MIN_LOADS, SlowSources
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.publish.health import BEHIND_S, MIN_STALLS, QUARANTINE_REPORT_S, STALLED_S, HealthReporter
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FORGET_S, SETTLE_S, FailureTracker
from kvstore.tiers.contract import DurableVolume
from support.wait import wait_until


class HealthCase:
    """A reporter for one volume whose failures a test sets."""

    def __init__(self) -> None:
        self.clock, self.storage_node, self.waiting = ManualClock(), FailureTracker(), 0
        volume = SimpleNamespace(volume_id="n/nvme0", read_only=None)
        self.volume = NodeVolume(cast("DurableVolume", volume))
        table = cast("BlockTable", SimpleNamespace(node_volumes=[self.volume]))
        log = cast("ReplicaChangeLog", SimpleNamespace(waiting=lambda: self.waiting))
        self.sources = SlowSources(NodeId("n"), self.clock)
        self.stalls = ProcessStallDetector(self.clock)
        self.health = HealthReporter(table, log, self.clock, self.storage_node, sources=self.sources, stalls=self.stalls)


def facts_of(case: HealthCase) -> list[str]:
    """Facts of all findings."""
    return [one.facts for one in case.health.findings()]


@pytest.fixture
def case() -> HealthCase:
    return HealthCase()


def test_health_without_failures_reports_nothing(case: HealthCase) -> None:
    assert facts_of(case) == []
    assert case.health.why_not_writable(case.volume) == ""
    assert case.health.publish_failing_s() == 0


def test_health_corrupt_blocks_are_reported_for_ten_minutes(case: HealthCase) -> None:
    case.volume.quarantined = 3
    assert facts_of(case) == ["3 blocks on volume n/nvme0 were found corrupt in the last 1 min."]
    case.clock.advance(QUARANTINE_REPORT_S - 1)
    case.volume.quarantined = 4
    assert facts_of(case) == ["4 blocks on volume n/nvme0 were found corrupt in the last 10 min."]
    case.clock.advance(QUARANTINE_REPORT_S - 1)
    assert facts_of(case) == ["4 blocks on volume n/nvme0 were found corrupt in the last 20 min."]
    case.clock.advance(QUARANTINE_REPORT_S + 1)
    assert facts_of(case) == []
    case.volume.quarantined = 5
    assert facts_of(case)[0].startswith("1 blocks"), "a new series"


def test_health_publish_failure_is_reported_until_caught_up(case: HealthCase) -> None:
    case.waiting = 70_000
    case.health.publish_failed("no space on disk for the index")
    case.clock.advance(3.0)
    case.health.publish_acknowledged()  # one small batch was accepted
    (facts,) = facts_of(case)
    assert facts == "The index has accepted no changes of node n for 3 s (70,000 wait): no space on disk for the index"
    assert case.health.publish_failing_s() == 3.0
    case.waiting = 0
    case.health.publish_caught_up()
    assert facts_of(case) == []


def test_health_publish_unacknowledged_is_behind(case: HealthCase) -> None:
    case.clock.advance(1000.0)
    assert facts_of(case) == [], "nothing waited"
    case.health.publish_caught_up()
    case.waiting = 1
    case.clock.advance(BEHIND_S)
    assert facts_of(case) == []
    case.clock.advance(1.0)
    assert "no acknowledgement" in facts_of(case)[0]
    case.health.publish_acknowledged()
    assert facts_of(case) == []


def test_health_failing_writes_are_reported_until_they_succeed(case: HealthCase) -> None:
    case.volume.failing.failed(case.clock.now_s(), OSError(28, "No space left on device" * 100))
    assert "No space left on device" in case.health.why_not_writable(case.volume)
    assert len(case.health.why_not_writable(case.volume)) <= MAX_REASON
    case.clock.advance(SETTLE_S)
    case.volume.failing.succeeded(case.clock.now_s())
    assert case.health.why_not_writable(case.volume) == ""
    case.storage_node.failed(case.clock.now_s(), "no answer")
    assert facts_of(case) == ["The storage node does not accept blocks: no answer"]
    case.clock.advance(FORGET_S)
    assert facts_of(case) == []


def test_health_stalled_volume_is_reported_until_it_answers(case: HealthCase) -> None:
    release = threading.Event()
    case.volume.volume.answered_s = -math.inf  # type: ignore[misc]
    case.volume.set_guard(Counters(), stall_s=0.05)
    with pytest.raises(VolumeStalled):
        case.volume.guard.read(lambda: release.wait(30.0), ignore)
    (facts,) = facts_of(case)
    assert facts == "Volume n/nvme0 has not answered I/O for 0 s."
    release.set()
    wait_until(lambda: not case.volume.guard.abandoned)
    assert facts_of(case) == []
    assert case.health.why_not_writable(case.volume) == ""


def test_health_late_copies_are_reported(case: HealthCase) -> None:
    case.health.why_copies_late = lambda: "8 durable blocks wait for a second copy."
    (found,) = case.health.findings()
    assert (found.code, found.subject) == (codes.SECOND_COPIES_LATE, "")
    assert found.facts == "8 durable blocks wait for a second copy."


def test_health_slow_peer_is_named_as_the_subject(case: HealthCase) -> None:
    for _ in range(MIN_LOADS):
        case.sources.record(NodeId("host-2"), 1.8, 0)
    (found,) = case.health.findings()
    assert (found.code, found.subject) == (codes.NODE_SLOW, "host-2")
    assert found.facts == "Loads at node n wait for node host-2: 3 slow loads in the last minute, the longest 1.8 s."
    case.clock.advance(60.0)
    assert facts_of(case) == []


def test_health_slow_volumes_are_those_of_the_node(case: HealthCase) -> None:
    for _ in range(MIN_LOADS):
        case.sources.record(NodeId("n"), 1.8, 0)
    (found,) = case.health.findings()
    assert (found.code, found.subject) == (codes.VOLUME_SLOW, "")
    assert found.facts == "Loads at node n wait for its volumes: 3 slow loads in the last minute, the longest 1.8 s."


def test_health_stalled_process_blames_no_other_node(case: HealthCase) -> None:
    for _ in range(MIN_LOADS):
        case.sources.record(NodeId("host-2"), 1.8, 0)
    for _ in range(MIN_STALLS):
        case.stalls.wake()
        case.clock.advance(STALLED_S / MIN_STALLS + 0.5)
    case.stalls.wake()
    (found,) = case.health.findings()
    assert (found.code, found.subject) == (codes.NODE_SLOW, "")
    assert found.facts == "The process of node n did not run for 11 s of the last minute."
