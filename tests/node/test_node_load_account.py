"""Why a load was slow: the reason names what took the time, also where that is none of the parts that are waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.process_stall import BEAT_S, MISSED_S, Pulse
from kvstore.node.loads import peer_waits as asked
from kvstore.node.loads.loader import Part
from kvstore.node.loads.peer_waits import asking
from kvstore.node.loads.timings import LoadAccounts
from kvstore.observe.counters import Counters
from kvstore.observe.slow_loads import LoadRecord, RecentLoads

HOME = NodeId("n")


@contextmanager
def copied(load: Load) -> Iterator[None]:
    """While inside, what is asked is asked for this load."""
    before = asked._current.set(load.account.peers)
    try:
        yield
    finally:
        asked._current.reset(before)


class Load:
    """One load, told by what happens one after the other."""

    def __init__(self, *, first_layer: int = 0, draining: bool = False) -> None:
        self.clock, self.recent, self.counters = ManualClock(), RecentLoads(), Counters()
        self.pulse = Pulse(self.clock)
        self.pulse.beat()
        accounts = LoadAccounts(HOME, 9.0, self.counters, self.recent, self.clock, self.pulse.stood_still)
        self.account = accounts.open(4, 4096, first_layer=first_layer, draining=draining)

    def pass_s(self, seconds: float) -> None:
        """Time in which the process runs."""
        for _ in range(round(seconds / BEAT_S)):
            self.clock.advance(BEAT_S)
            self.pulse.beat()

    def part(self, tier: Tier = Tier.DRAM, node: str = HOME) -> float:
        self.account.part(Part(0, [Outcome.HIT] * 4, [None] * 4, tier, NodeId(node)))
        return self.clock.now_s()

    def end(self) -> LoadRecord:
        self.account.close()
        (record,) = self.recent.slowest()
        return record


def test_time_before_a_part_is_that_parts() -> None:
    load = Load()
    load.pass_s(1.0)
    load.account.told(load.part(Tier.NVME))
    load.pass_s(0.2)
    assert load.end().reason == "waited 1.000 of 1.200 s for this node's volumes"


def test_time_that_nobody_measured_is_not_said_to_be_the_drams() -> None:
    load = Load()
    load.account.told(load.part())
    load.pass_s(0.5)
    record = load.end()
    assert record.reason == "0.500 of 0.500 s not attributed to a tier, peer or engine"
    assert record.parts["other_s"] == pytest.approx(0.5)


def test_reason_peer_silent_names_the_node() -> None:
    load = Load()
    with copied(load), asking(NodeId("host-2")):  # it never answers: the engine leaves at its deadline
        load.pass_s(10.0)
        record = load.end()
    assert record.reason == "waited 10.000 of 10.000 s for node host-2, which did not answer"


def test_reason_peer_timed_out_names_it_with_the_misses() -> None:
    load = Load()
    with copied(load), asking(NodeId("host-2")) as answered:
        load.pass_s(2.0)
        answered([Outcome.HIT, Outcome.TIMEOUT])
    load.account.part(Part(0, [Outcome.TIMEOUT] * 4, [None] * 4, Tier.NVME, HOME))
    record = load.end()
    assert record.reason == "waited 2.000 of 2.000 s for node host-2, which did not answer; not brought: 4 timeout"


def test_reason_peer_answered_is_not_blamed() -> None:
    load = Load()
    with copied(load), asking(NodeId("host-2")) as answered:
        load.pass_s(0.2)
        answered([Outcome.HIT, Outcome.MISS])
    load.pass_s(0.5)
    assert load.end().reason == "0.700 of 0.700 s not attributed to a tier, peer or engine"


def test_reason_peer_lost_at_once_is_not_blamed() -> None:
    load = Load()
    with copied(load), suppress(Unavailable), asking(NodeId("host-2")):
        load.pass_s(0.1)
        raise Unavailable("connection refused")
    load.pass_s(5.0)
    assert load.end().reason == "5.100 of 5.100 s not attributed to a tier, peer or engine"


def test_the_last_part_on_its_way_to_the_engine_is_the_engines() -> None:
    load = Load()
    load.part()
    load.pass_s(0.5)
    assert load.end().reason == "waited 0.500 of 0.500 s for the engine and the way to it"


@pytest.mark.parametrize("noted", [True, False], ids=["the pulse came first", "the load ended first"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_process_that_stood_still_is_the_reason_wherever_it_did(where: str, noted: bool) -> None:
    load = Load()
    if where == "after":
        load.part()
    load.clock.advance(1.5)
    if noted:
        load.pulse.beat()
    if where == "before":
        load.account.told(load.part(node="another"))
    record = load.end()
    assert record.reason.startswith(f"waited {1.5 - BEAT_S:.3f} of 1.500 s for this node to run")
    assert record.parts["stood_still_s"] == pytest.approx(1.5 - BEAT_S)


def test_a_standstill_outside_of_a_load_is_not_its_reason() -> None:
    load = Load()
    load.pass_s(1.0)
    began_s = load.clock.now_s()
    load.clock.advance(1.5)
    load.pulse.beat()
    ended_s = load.clock.now_s()
    assert load.pulse.stood_still(0.0, began_s) == 0
    assert load.pulse.stood_still(ended_s, ended_s + MISSED_S) == 0
    assert load.pulse.stood_still(began_s, ended_s) == pytest.approx(1.5 - BEAT_S)


def test_a_pulse_of_a_process_that_runs_ends_when_told() -> None:
    before = threading.active_count()
    pulse = Pulse(MonotonicClock(), beat_s=0.001)
    pulse.start()
    pulse.stop(10.0)
    assert threading.active_count() == before


def missed(load: Load) -> dict[str, int]:
    """Blocks that the load did not get, by reason."""
    prefix, suffix = "node_load_missed_", "_blocks_total"
    found = load.counters.snapshot().items()
    return {name[len(prefix) : -len(suffix)]: count for name, count in found if name.startswith(prefix)}


def test_load_account_misses_counted_by_reason() -> None:
    load = Load()
    outcomes = [Outcome.HIT, Outcome.MISS, Outcome.TIMEOUT, Outcome.TIMEOUT]
    load.account.part(Part(0, outcomes, [None] * 4, Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"miss": 1, "timeout": 2}
    assert load.counters.get("node_load_blocks_total") == 4
    assert load.counters.get("node_loaded_dram_bytes_total") == 4096


def test_load_account_caller_gone_counts_abandoned() -> None:
    load = Load()
    load.account.part(Part(0, [Outcome.HIT], [None], Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"abandoned": 3}


def test_load_account_draining_is_no_failure() -> None:
    load = Load(draining=True)
    load.account.part(Part(0, [Outcome.UNAVAILABLE] * 4, [None] * 4, Tier.DRAM, HOME))
    load.end()
    assert missed(load) == {"draining": 4}


@pytest.mark.parametrize("first_layer", [0, 2])
def test_load_account_layer_groups_count_blocks_once(first_layer: int) -> None:
    load = Load(first_layer=first_layer)
    for layer in range(first_layer, 6, 2):
        load.account.part(Part(0, [Outcome.HIT] * 4, [None] * 4, Tier.NVME, NodeId("another"), layer, 2))
    load.end()
    assert missed(load) == {}
    assert load.counters.get("node_loaded_peer_bytes_total") == 4 * 4096
