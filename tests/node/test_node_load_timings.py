"""The reason of a slow load names what took the time, and the counts of a load add up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.process_stall import INTERVAL_S, TOLERANCE_S, ProcessStallDetector
from kvstore.node.loads import peer_waits
from kvstore.node.loads.peer_waits import waiting_for
from kvstore.node.loads.runs import LoadedRun
from kvstore.node.loads.timings import LoadTimings
from kvstore.observe.counters import Counters
from kvstore.observe.slow_loads import LoadRecord, RecentLoads

HOME = NodeId("n")


class Load:
    """One load whose events a test reports one after the other."""

    def __init__(self, *, first_layer: int = 0, draining: bool = False) -> None:
        self.clock, self.recent, self.counters = ManualClock(), RecentLoads(), Counters()
        timings = LoadTimings(HOME, 9.0, self.counters, self.recent, self.clock)
        self.timer = timings.begin(4, 4096, first_layer=first_layer, draining=draining)

    def ready(self, tier: Tier = Tier.DRAM, node: str = HOME) -> float:
        self.timer.ready(LoadedRun(0, [Outcome.HIT] * 4, [None] * 4, tier, NodeId(node)))
        return self.clock.now_s()

    def end(self) -> LoadRecord:
        self.timer.close()
        (record,) = self.recent.slowest()
        return record

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, reads of the current context belong to this load."""
        before = peer_waits._current.set(self.timer.peers)
        try:
            yield
        finally:
            peer_waits._current.reset(before)


def test_reason_time_before_a_part_belongs_to_its_tier() -> None:
    load = Load()
    load.clock.advance(1.0)
    load.timer.delivered(load.ready(Tier.NVME))
    load.clock.advance(0.2)
    assert load.end().reason == "waited 1.000 of 1.200 s for this node's volumes"


def test_reason_unmeasured_time_is_not_attributed() -> None:
    load = Load()
    load.timer.delivered(load.ready())
    load.clock.advance(0.5)
    record = load.end()
    assert record.reason == "0.500 of 0.500 s not attributed to a tier, peer or engine"
    assert record.parts["other_s"] == pytest.approx(0.5)


def test_reason_peer_silent_names_the_node() -> None:
    load = Load()
    with load.recording(), waiting_for(NodeId("host-2")):  # it never answers: the engine leaves at its deadline
        load.clock.advance(10.0)
        record = load.end()
    assert record.reason == "waited 10.000 of 10.000 s for node host-2, which did not answer"


def test_reason_peer_timed_out_names_it_with_the_misses() -> None:
    load = Load()
    with load.recording(), waiting_for(NodeId("host-2")) as answered:
        load.clock.advance(2.0)
        answered([Outcome.HIT, Outcome.TIMEOUT])
    load.timer.ready(LoadedRun(0, [Outcome.TIMEOUT] * 4, [None] * 4, Tier.NVME, HOME))
    record = load.end()
    assert record.reason == "waited 2.000 of 2.000 s for node host-2, which did not answer; not loaded: 4 timeout"


def test_reason_peer_answered_is_not_blamed() -> None:
    load = Load()
    with load.recording(), waiting_for(NodeId("host-2")) as answered:
        load.clock.advance(0.2)
        answered([Outcome.HIT, Outcome.MISS])
    load.clock.advance(0.5)
    assert load.end().reason == "0.700 of 0.700 s not attributed to a tier, peer or engine"


def test_reason_peer_lost_at_once_is_not_blamed() -> None:
    load = Load()
    with load.recording(), suppress(Unavailable), waiting_for(NodeId("host-2")):
        load.clock.advance(0.1)
        raise Unavailable("connection refused")
    load.clock.advance(5.0)
    assert load.end().reason == "5.100 of 5.100 s not attributed to a tier, peer or engine"


def test_reason_delivery_of_the_last_part_is_the_engines() -> None:
    load = Load()
    load.ready()
    load.clock.advance(0.5)
    assert load.end().reason == "waited 0.500 of 0.500 s for the engine and its connection"


def missed(load: Load) -> dict[str, int]:
    """Return missed blocks of the load by reason."""
    prefix, suffix = "node_load_missed_", "_blocks_total"
    found = load.counters.snapshot().items()
    return {name[len(prefix) : -len(suffix)]: count for name, count in found if name.startswith(prefix)}


def test_load_misses_are_counted_by_reason() -> None:
    load = Load()
    outcomes = [Outcome.HIT, Outcome.MISS, Outcome.TIMEOUT, Outcome.TIMEOUT]
    load.timer.ready(LoadedRun(0, outcomes, [None] * 4, Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"miss": 1, "timeout": 2}
    assert load.counters.get("node_load_blocks_total") == 4
    assert load.counters.get("node_loaded_dram_bytes_total") == 4096


def test_load_caller_gone_counts_abandoned() -> None:
    load = Load()
    load.timer.ready(LoadedRun(0, [Outcome.HIT], [None], Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"abandoned": 3}


def test_load_draining_counts_no_failure() -> None:
    load = Load(draining=True)
    load.timer.ready(LoadedRun(0, [Outcome.UNAVAILABLE] * 4, [None] * 4, Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"draining": 4}


@pytest.mark.parametrize("first_layer", [0, 2])
def test_load_layer_groups_count_blocks_once(first_layer: int) -> None:
    load = Load(first_layer=first_layer)
    for layer in range(first_layer, 6, 2):
        load.timer.ready(LoadedRun(0, [Outcome.HIT] * 4, [None] * 4, Tier.NVME, NodeId("another"), layer, 2))
    load.end()
    assert missed(load) == {}
    assert load.counters.get("node_loaded_peer_bytes_total") == 4 * 4096


def test_process_stall_adds_late_wake_ups() -> None:
    clock = ManualClock()
    detector = ProcessStallDetector(clock)
    for _ in range(20):
        clock.advance(INTERVAL_S + TOLERANCE_S / 2)
        detector.wake()
    assert detector.stalled_s == 0.0
    clock.advance(1.5)
    detector.wake()
    assert detector.stalled_s == pytest.approx(1.5 - INTERVAL_S)


def test_process_stall_detector_thread_ends() -> None:
    before = threading.active_count()
    detector = ProcessStallDetector(MonotonicClock(), interval_s=0.001)
    detector.start()
    detector.stop(10.0)
    assert threading.active_count() == before
