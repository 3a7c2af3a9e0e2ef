"""Tests of the prefix search: its answers for true and stale records, and its number of probes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.contract import PrefixHit, ReplicaRun, VolumeEpoch
from kvstore.index.prefix import MAX_DISCOVERY_PROBES, longest_prefix
from kvstore.index.record import Replicas

ONE, TWO, THREE = VolumeEpoch(1), VolumeEpoch(2), VolumeEpoch(3)


def search(records: list[Replicas], ends: tuple[int, ...] = ()) -> tuple[PrefixHit, list[int]]:
    """Search with guessed run ends; return the hit and the probed positions."""
    seen: list[int] = []

    def probe(position: int) -> Replicas:
        seen.append(position)
        return records[position]

    return longest_prefix(len(records), probe, ends), seen


def records_of(length: int, runs: list[tuple[int, int, VolumeEpoch]]) -> list[Replicas]:
    """Records with true claims for runs of (start, end, volume epoch)."""
    records: list[Replicas] = [{} for _ in range(length)]
    for start, end, volume_epoch in sorted(runs):
        for at in range(start, min(end, length)):
            before = records[at - 1].get(volume_epoch) if at else None
            records[at][volume_epoch] = at if before is None else before
    return records


@given(st.integers(0, 3_000), st.data())
def test_prefix_one_volume_needs_logarithmic_probes(length: int, data: st.DataObject) -> None:
    held = data.draw(st.integers(0, length))
    hit, seen = search(records_of(length, [(0, held, ONE)]))
    assert hit == PrefixHit(held, (ReplicaRun(0, held, ONE),) if held else ())
    assert len(seen) == len(set(seen))
    assert len(seen) <= 2 + math.ceil(math.log2(length + 1))


@given(st.integers(1, 500), st.lists(st.integers(0, 500), min_size=1, max_size=5))
def test_prefix_several_volumes_are_all_found(length: int, ends: list[int]) -> None:
    volume_epochs = [VolumeEpoch(number) for number in range(len(ends))]
    hit, seen = search(
        records_of(length, [(0, end, volume_epoch) for end, volume_epoch in zip(ends, volume_epochs, strict=True)])
    )
    clipped = {volume_epoch: min(end, length) for end, volume_epoch in zip(ends, volume_epochs, strict=True)}
    assert hit.blocks == max(clipped.values())
    assert set(hit.runs) == {ReplicaRun(0, end, volume_epoch) for volume_epoch, end in clipped.items() if end}
    assert len(seen) <= 3 + (1 + len(ends)) * math.ceil(math.log2(length + 1))


@given(st.integers(1, 3_000), st.integers(1, 3_000), st.lists(st.integers(0, 4_000), max_size=6))
def test_prefix_guesses_never_change_the_answer(length: int, end: int, guesses: list[int]) -> None:
    records = records_of(length, [(0, end, ONE), (0, end // 2, TWO)])
    hit, seen = search(records, tuple(guesses))
    held = min(end, length)
    assert hit.blocks == held
    assert set(hit.runs) == {
        ReplicaRun(0, count, volume_epoch) for volume_epoch, count in ((ONE, held), (TWO, min(end // 2, length))) if count
    }
    assert len(seen) == len(set(seen))
    assert len(seen) <= 3 + 2 * (math.ceil(math.log2(length + 1)) + math.ceil(math.log2(2 * len(guesses) + 1)) + 1)


def test_prefix_right_guesses_need_two_probes_each() -> None:
    hit, seen = search(records_of(1_640, [(0, 1_600, ONE), (0, 1_200, TWO)]), (1_200, 1_600))
    assert hit == PrefixHit(1_600, (ReplicaRun(0, 1_600, ONE), ReplicaRun(0, 1_200, TWO)))
    assert sorted(seen) == [0, 1_199, 1_200, 1_599, 1_600]


runs_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.sampled_from([ONE, TWO, THREE])), max_size=8)


@given(st.integers(1, 60), runs_lists)
def test_prefix_true_claims_make_true_runs(length: int, parts: list[tuple[int, int, VolumeEpoch]]) -> None:
    records = records_of(length, [(start, start + count, volume_epoch) for start, count, volume_epoch in parts])
    hit, _ = search(records)
    prefix = next((at for at, record in enumerate(records) if not record), length)
    assert hit.blocks >= prefix
    if not any(records[prefix:]):
        assert hit.blocks == prefix
    for run in hit.runs:
        assert all(run.volume_epoch in records[at] for at in range(run.start, run.start + run.count))
    assert {at for run in hit.runs for at in range(run.start, run.start + run.count)} == set(range(hit.blocks))


@given(
    st.lists(st.dictionaries(st.sampled_from([ONE, TWO, THREE]), st.integers(0, 60), max_size=3), min_size=1, max_size=60),
    st.lists(st.integers(0, 70), max_size=6),
)
def test_prefix_stale_claims_make_sound_answers(records: list[Replicas], guesses: list[int]) -> None:
    records = [{volume_epoch: min(start, at) for volume_epoch, start in record.items()} for at, record in enumerate(records)]
    hit, seen = search(records, tuple(guesses))
    assert len(seen) == len(set(seen))
    prefix = next((at for at, record in enumerate(records) if not record), len(records))
    assert hit.blocks >= prefix
    assert hit.blocks == len(records) or not records[hit.blocks]
    covered: set[int] = set()
    for run in hit.runs:
        blocks = range(run.start, run.start + run.count)
        assert run.volume_epoch in records[blocks[-1]]
        assert all(run.volume_epoch in records[at] for at in seen if at in blocks), "a run contradicts a probe"
        covered.update(blocks)
    assert covered == set(range(hit.blocks))


def test_prefix_discovery_probes_are_bounded() -> None:
    """One volume holds all blocks, and each block is also in a separate volume that ends there."""
    length = 60_000
    records: list[Replicas] = [{ONE: 0, VolumeEpoch(10 + at): at} for at in range(length)]
    hit, seen = search(records)
    assert hit.blocks == length
    assert ReplicaRun(0, length, ONE) in hit.runs
    assert len(seen) <= MAX_DISCOVERY_PROBES + 40
