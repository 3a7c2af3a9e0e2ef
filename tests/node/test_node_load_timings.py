"""The reason of a slow load names what took the time, and the counts of a load add up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context

import pytest

from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.process_stall import INTERVAL_S, TOLERANCE_S, ProcessStallDetector
from kvstore.node.base.slow_sources import MIN_LOADS, SLOW_BYTES_PER_S, SlowSource, SlowSources
from kvstore.node.loads.runs import LoadedRun
from kvstore.node.loads.timings import LoadTimings, waiting_for
from kvstore.observe.counters import Counters
from kvstore.observe.slow_loads import LoadRecord, RecentLoads
from kvstore.transport.contract import ReadControl

HOME = NodeId("n")
SLOW_S = 9.0


class Load:
    """One load whose events a test reports one after the other."""

    def __init__(self, *, first_layer: int = 0, draining: bool = False) -> None:
        self.clock, self.recent, self.counters = ManualClock(), RecentLoads(), Counters()
        self.sources = SlowSources(HOME, self.clock)
        self.timings = LoadTimings(HOME, SLOW_S, self.counters, self.recent, self.sources, self.clock)
        self.timer = self.timings.begin(4, 4096, first_layer=first_layer, draining=draining)

    def ready(self, tier: Tier = Tier.DRAM, node: str = HOME) -> float:
        self.timer.ready(LoadedRun(0, [Outcome.HIT] * 4, [None] * 4, tier, NodeId(node)))
        return self.clock.now_s()

    def end(self) -> LoadRecord:
        self.timer.close()
        (record,) = self.recent.slowest()
        return record

    @contextmanager
    def waiting_for(self, node: str) -> Iterator[Callable[[Iterable[Outcome]], None]]:
        """Inside, this load waits for a node."""
        context = copy_context()
        context.run(self.timer.peers.record_in_context)
        with ExitStack() as stack:
            yield context.run(stack.enter_context, waiting_for(NodeId(node), ReadControl()))


def test_received_bytes_are_those_of_the_load() -> None:
    load, first, second = Load(), ReadControl(), ReadControl()
    waits = load.timer.peers
    with waits.record(NodeId("host-2"), first) as answered:
        first.add_bytes(5)
        with suppress(Unavailable), waits.record(NodeId("host-3"), second):
            second.add_bytes(3)
            assert waits.received_bytes == 8
            raise Unavailable("connection refused")
        answered([Outcome.HIT])
    assert waits.received_bytes == 8


def test_reason_time_before_a_part_belongs_to_its_tier() -> None:
    load = Load()
    load.clock.advance(1.0)
    load.timer.delivered(load.ready(Tier.NVME))
    load.clock.advance(0.2)
    assert load.end().reason == "83 % of the time reading from this node's volumes"


def test_reason_mounted_volume_is_not_this_nodes() -> None:
    load = Load()
    for _ in range(MIN_LOADS):
        timer = load.timings.begin(4, 4096)
        load.clock.advance(SLOW_S + 1)
        timer.ready(LoadedRun(0, [Outcome.HIT] * 4, [None] * 4, Tier.NVME, HOME, mounted=True))
        timer.close()
    assert load.recent.slowest()[0].reason == "100 % of the time reading from mounted volumes"
    assert load.sources.found() == []


def test_reason_unmeasured_time_is_not_attributed() -> None:
    load = Load()
    load.timer.delivered(load.ready())
    load.clock.advance(0.5)
    record = load.end()
    assert record.reason == "100 % of the time outside of tiers, nodes and the engine"
    assert record.parts["other_s"] == pytest.approx(0.5)


def test_reason_peer_silent_names_the_node() -> None:
    load = Load()
    with load.waiting_for("host-2"):  # it never answers: the engine leaves at its deadline
        load.clock.advance(10.0)
        record = load.end()
    assert record.reason == "100 % of the time waiting for node host-2, which did not answer"
    assert record.action == "Check node host-2: its process, its host, and the network to it."


def test_reason_peer_timed_out_names_it_with_the_misses() -> None:
    load = Load()
    with load.waiting_for("host-2") as answered:
        load.clock.advance(2.0)
        answered([Outcome.HIT, Outcome.TIMEOUT])
    load.timer.ready(LoadedRun(0, [Outcome.TIMEOUT] * 4, [None] * 4, Tier.NVME, HOME))
    record = load.end()
    assert record.reason == "100 % of the time waiting for node host-2, which did not answer; not loaded: 4 timeout"


def test_reason_peer_answered_is_not_blamed() -> None:
    load = Load()
    with load.waiting_for("host-2") as answered:
        load.clock.advance(0.2)
        answered([Outcome.HIT, Outcome.MISS])
    load.clock.advance(0.5)
    assert load.end().reason == "100 % of the time outside of tiers, nodes and the engine"


def test_reason_peer_lost_at_once_is_not_blamed() -> None:
    load = Load()
    with suppress(Unavailable), load.waiting_for("host-2"):
        load.clock.advance(0.1)
        raise Unavailable("connection refused")
    load.clock.advance(5.0)
    assert load.end().reason == "100 % of the time outside of tiers, nodes and the engine"


def test_reason_delivery_of_the_last_part_is_the_engines() -> None:
    load = Load()
    load.ready()
    load.clock.advance(0.5)
    assert load.end().reason == "100 % of the time delivering to the engine"


def test_reason_slow_peer_is_named_with_an_action() -> None:
    load = Load()
    load.clock.advance(0.9)
    load.timer.delivered(load.ready(node="host-2"))
    load.clock.advance(0.1)
    record = load.end()
    assert record.reason == "90 % of the time reading from node host-2"
    assert record.action.startswith("Node host-2 or the network to it is slow: ")


def test_reason_several_peers_names_the_slowest() -> None:
    load = Load()
    for node, seconds in (("host-2", 0.1), ("host-3", 0.7), ("host-2", 0.1)):
        load.clock.advance(seconds)
        load.timer.delivered(load.ready(node=node))
    load.clock.advance(0.1)
    record = load.end()
    assert record.reason == "90 % of the time reading from 2 other nodes, 70 % from node host-3"
    assert record.action.startswith("Node host-3 or the network to it is slow: ")


def test_reason_evenly_slow_peers_blames_the_network() -> None:
    load = Load()
    for number in range(2, 5):
        load.clock.advance(0.3)
        load.timer.delivered(load.ready(node=f"host-{number}"))
    record = load.end()
    assert record.reason == "100 % of the time reading from 3 other nodes, 33 % from node host-2"
    assert record.action.startswith("The network limits: ")


def test_reason_fast_load_needs_no_action() -> None:
    load = Load()
    load.clock.advance(0.01)
    load.ready(Tier.NVME)
    record = load.end()
    assert (record.reason, record.action) == ("fast: no cause to look for", "")


@pytest.mark.parametrize(("tier", "node"), [(Tier.DRAM, "host-2"), (Tier.NVME, HOME)])
def test_slow_load_records_its_source(tier: Tier, node: str) -> None:
    load = Load()
    for _ in range(MIN_LOADS):
        assert load.sources.found() == []
        load.timer = load.timings.begin(4, 4096)
        load.clock.advance(SLOW_S + 1)
        load.ready(tier, node)
        load.timer.close()
    assert load.sources.found() == [SlowSource(NodeId(node), MIN_LOADS, SLOW_S + 1)]
    load.clock.advance(60.0)
    assert load.sources.found() == []


def test_large_load_is_not_a_slow_source() -> None:
    sources = SlowSources(HOME, ManualClock())
    for _ in range(MIN_LOADS):
        sources.record(NodeId("host-2"), 10.0, 10 * SLOW_BYTES_PER_S)
    assert sources.found() == []


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
    assert detector.recent_s() == [pytest.approx(1.5 - INTERVAL_S)]
    clock.advance(60.0)
    assert detector.recent_s() == []


def test_process_stall_detector_thread_ends() -> None:
    before = set(threading.enumerate())
    detector = ProcessStallDetector(MonotonicClock(), interval_s=0.001)
    detector.start()
    detector.stop(10.0)
    assert before.issuperset(threading.enumerate())
