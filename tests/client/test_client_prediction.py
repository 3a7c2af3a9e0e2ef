"""Predicted load times of a client: its own loads in, seconds out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.load.accounting import STORAGE_LINKS, LoadPredictor, bytes_by_source, nearest_segments, sources_of
from kvclient.results import LoadResult, Lookup, NodeRef, Run
from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier, VolumeId
from kvstore.recompute.decisions import Segment
from kvstore.recompute.load_estimate import LoadEstimates, LoadLine

BLOCK = 1 << 20


def run(start: int, count: int, node: str = "a", tier: Tier = Tier.DRAM) -> Run:
    return Run(start, count, NodeRef(NodeId(node), "c", "d"), tier, VolumeId(f"{node}-{tier.name}"))


def lookup(*runs: Run) -> Lookup:
    hit = max(one.end for one in runs)
    return Lookup([BlockKey(bytes(16))] * hit, hit, runs)


def result(blocks: int, seconds: float, **more: object) -> LoadResult:
    sizes = {"bytes_by_tier": {Tier.DRAM: blocks * BLOCK}, "bytes_by_node": {"a": blocks * BLOCK}}
    return LoadResult(
        np.full(blocks, Outcome.HIT, np.uint8), bytes_by_path={"local": blocks * BLOCK}, seconds=seconds, **{**sizes, **more}
    )


def test_prediction_is_none_until_the_source_was_loaded() -> None:
    predictor = LoadPredictor(BLOCK)
    assert predictor.predict(lookup(run(0, 4)), "a") is None
    for blocks in (1, 2, 8, 16):
        predictor.record(result(blocks, blocks * 1e-3))
    assert predictor.predict(lookup(run(0, 4)), "a") == pytest.approx(4e-3, rel=0.05)
    assert predictor.predict(lookup(run(0, 4, "b")), "a") is None
    assert predictor.predict(lookup(run(0, 4), run(4, 4, tier=Tier.NVME)), "a") is None


def test_prediction_ignores_loads_that_failed() -> None:
    predictor = LoadPredictor(BLOCK)
    predictor.record(result(4, 4e-3))
    predictor.record(result(4, 1e-9, error=Unavailable("away")))
    missed = result(4, 1e-9)
    missed.outcomes[2] = Outcome.MISS
    predictor.record(missed)
    assert predictor.predict(lookup(run(0, 4)), "a") == pytest.approx(4e-3, rel=0.05)


def test_prediction_slow_link_is_learnt_by_one_load() -> None:
    predictor = LoadPredictor(BLOCK)
    for blocks in (1, 2, 8, 16):
        predictor.record(result(blocks, blocks * 1e-3))
    predictor.record(result(8, 0.8))
    assert predictor.predict(lookup(run(0, 8)), "a") == pytest.approx(0.8, rel=0.05)


def test_segments_take_the_nearest_tier() -> None:
    runs = [run(0, 10, tier=Tier.NVME), run(0, 4), run(6, 2, "b")]
    dram, nvme, other = ("a", Tier.DRAM), ("a", Tier.NVME), ("b", Tier.DRAM)
    expected = [Segment(dram, 4), Segment(nvme, 2), Segment(other, 2), Segment(nvme, 2)]
    found = nearest_segments(runs, 0, 10, LoadEstimates(), "a")
    assert found == expected
    assert bytes_by_source(found, 5, 10) == {dram: 40, nvme: 10}
    assert nearest_segments(runs, 2, 5, LoadEstimates(), "a") == [Segment(dram, 2), Segment(nvme, 1)]
    assert nearest_segments(runs, 2, 11, LoadEstimates(), "a") is None


def test_segments_take_the_cheapest_of_equally_near_nodes() -> None:
    known = LoadEstimates()
    known.record({("b", Tier.DRAM): 1000}, 1.0)
    runs = [run(0, 4), run(0, 4, "b"), run(0, 4, "c")]
    assert nearest_segments(runs, 0, 4, known, "a") == [Segment(("b", Tier.DRAM), 4)]
    known.record({("c", Tier.DRAM): 1000}, 0.1)
    assert nearest_segments(runs, 0, 4, known, "a") == [Segment(("c", Tier.DRAM), 4)]


def test_sources_of_several_tiers_and_nodes_add_up() -> None:
    made = result(4, 1.0, bytes_by_tier={Tier.NVME: BLOCK, Tier.DRAM: 3 * BLOCK}, bytes_by_node={"a": 2 * BLOCK, "b": 2 * BLOCK})
    sources = sources_of(made)
    assert sum(sources.values()) == 4 * BLOCK
    assert list(sources)[-1] == ("b", Tier.NVME)


def test_sources_of_other_hosts_storage_are_one() -> None:
    far = result(4, 1.0, bytes_by_tier={Tier.NVME: 4 * BLOCK}, bytes_by_node={"b": 3 * BLOCK, "c": BLOCK})
    far.bytes_by_path = {"decode": 4 * BLOCK}
    assert sources_of(far) == {STORAGE_LINKS: 4 * BLOCK}
    runs = [run(0, 4, "b", Tier.NVME), run(2, 2, tier=Tier.NVME)]
    assert nearest_segments(runs, 0, 2, LoadEstimates(), "a") == [Segment(STORAGE_LINKS, 2)]
    assert nearest_segments(runs[1:], 2, 4, LoadEstimates(), "a") == [Segment(("a", Tier.NVME), 2)]


def segments_by_block(runs: Sequence[Run], start: int, stop: int, known: LoadEstimates) -> list[Segment] | None:
    """The simple version: every run is asked for every block."""
    sources = []
    for block in range(start, stop):
        near = [one for one in runs if one.start <= block < one.end]
        if not near:
            return None

        def order(one: Run) -> tuple[int, float]:
            line = known.line((one.node_id, one.tier))
            return one.distance, float("inf") if line is None else line.per_byte_s

        best = min(near, key=order)
        sources.append((best.node_id, best.tier))
    cuts = [0, *(at for at in range(1, len(sources)) if sources[at] != sources[at - 1]), len(sources)]
    return [Segment(sources[first], last - first) for first, last in pairwise(cuts) if last > first]


RUNS = st.builds(run, st.integers(0, 20), st.integers(0, 8), st.sampled_from("abc"), st.sampled_from([Tier.DRAM, Tier.HBM]))


@given(
    st.lists(RUNS, max_size=12), st.integers(0, 20), st.integers(0, 20), st.dictionaries(st.sampled_from("abc"), st.floats(1, 9))
)
def test_segments_equal_those_of_the_simple_version(runs: list[Run], start: int, count: int, seconds: dict[str, float]) -> None:
    known = LoadEstimates()
    for node, taken in seconds.items():
        known.record({(node, Tier.DRAM): 1000}, taken)
    for more in (runs, [*runs, run(0, 40, "d", Tier.HBM)]):
        found = nearest_segments(more, start, start + count, known, "a")
        assert found == segments_by_block(more, start, start + count, known)


def test_segments_ask_each_run_a_bounded_number_of_times() -> None:
    asked = 0

    class Counting(LoadEstimates):
        def line(self, source: Hashable) -> LoadLine | None:
            nonlocal asked
            asked += 1
            return super().line(source)

    runs = [run(at, 1000, node) for at in range(1000) for node in "ab"]
    assert nearest_segments(runs, 0, 1000, Counting(), "a") == [Segment(("a", Tier.DRAM), 1000)]
    assert asked <= len(runs)
