"""Tests of the prefix search in rounds, and with unknown records: against a model that reads every known record."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import Unavailable
from kvstore.core.limits import MAX_LOOKUP_ENDS
from kvstore.index.contract import PrefixHit, ReplicaRun, VolumeEpoch
from kvstore.index.prefix import (
    MAX_DISCOVERY_PROBES,
    MAX_INTERVALS,
    MAX_SILENT,
    MAX_UNKNOWN,
    ROUND_WIDTH,
    PrefixSearch,
    longest_prefix,
)
from kvstore.index.record import Replicas

VOLUME_EPOCHS = [VolumeEpoch(number) for number in range(1, 5)]
ONE, TWO, THREE, _ = VOLUME_EPOCHS
LENGTH = 1_600
WIDTHS = [1, 2, 5, ROUND_WIDTH]

Run = tuple[int, int, VolumeEpoch]
"""First block, block after the last, holder."""


@dataclass
class Index:
    """Records of one chain on several shards, some of which do not answer."""

    records: list[Replicas]
    shards: list[int] = field(default_factory=list)
    away: frozenset[int] = frozenset()
    rounds: list[Sequence[int]] = field(default_factory=list)

    @staticmethod
    def of(length: int, runs: Iterable[Run], shards: int = 1, away: Iterable[int] = (), seed: int = 0) -> Index:
        """Make true records of runs; positions are on random shards."""
        records: list[Replicas] = [{} for _ in range(length)]
        for start, end, volume_epoch in sorted(runs):
            for at in range(start, min(end, length)):
                before = records[at - 1].get(volume_epoch) if at else None
                records[at][volume_epoch] = at if before is None else before
        return Index(records).on_shards(shards, away, seed)

    def on_shards(self, shards: int, away: Iterable[int], seed: int = 0) -> Index:
        """Put the records on random shards."""
        draw = random.Random(seed)
        self.shards = [draw.randrange(shards) for _ in self.records]
        self.away = frozenset(away)
        return self

    @property
    def known(self) -> dict[int, Replicas]:
        """Records of all shards that answer."""
        return {at: record for at, record in enumerate(self.records) if self.shards[at] not in self.away}

    @property
    def probed(self) -> list[int]:
        """All probed positions."""
        return [position for positions in self.rounds for position in positions]

    def search(self, ends: Sequence[int] = (), width: int = ROUND_WIDTH) -> PrefixHit:
        """Search in rounds; a shard that is away answers nothing."""
        self.rounds = []
        known = self.known
        if width == 1:
            return longest_prefix(len(self.records), self._probe, ends)
        search = PrefixSearch(len(self.records), ends, width=width)
        for positions in search:
            self.rounds.append(positions)
            search.found.update({position: known[position] for position in positions if position in known})
        return search.hit()

    def _probe(self, position: int) -> Replicas | None:
        self.rounds.append([position])
        return None if self.shards[position] in self.away else self.records[position]

    def prefix(self) -> int:
        """Number of leading blocks that are held."""
        return next((at for at, record in enumerate(self.records) if not record), len(self.records))

    def is_held(self, run: ReplicaRun) -> bool:
        """Whether a volume epoch holds all blocks of a run."""
        return all(run.volume_epoch in self.records[at] for at in range(run.start, run.start + run.count))


def claimed(known: dict[int, Replicas], block: int) -> set[VolumeEpoch]:
    """The volume epochs that some record claims to hold a block, with no record in between that contradicts."""
    claimants: set[VolumeEpoch] = set()
    for above in (position for position in known if position >= block):
        between = [known[position] for position in known if block <= position < above]
        for volume_epoch, start in known[above].items():
            if start <= block and all(volume_epoch in record for record in between):
                claimants.add(volume_epoch)
    return claimants


def claimed_blocks(known: dict[int, Replicas], length: int) -> int:
    """Number of leading blocks that records claim."""
    return next((block for block in range(length) if not claimed(known, block)), length)


def check_sound(index: Index, hit: PrefixHit) -> None:
    """Assert what is guaranteed for any records: all of the hit is claimed by records that were probed and are known."""
    known = {position: index.records[position] for position in index.probed if position in index.known}
    assert hit.blocks <= claimed_blocks(known, len(index.records))
    assert hit.unknown == 0 or set(index.probed) - set(known)
    covered: set[int] = set()
    for run in hit.runs:
        blocks = range(run.start, run.start + run.count)
        assert run.volume_epoch in known.get(blocks[-1], {}), "a run ends at a known record"
        assert all(run.volume_epoch in claimed(known, block) for block in (blocks[0], blocks[-1]))
        assert all(run.volume_epoch in known[at] for at in known if at in blocks), "a run contradicts a probe"
        covered.update(blocks)
    assert covered == set(range(hit.blocks)), "the runs cover the hit"
    if not hit.unknown and hit.blocks < len(index.records):
        assert not index.records[hit.blocks], "a hit ends before a missing block"


def check_rounds(index: Index, width: int) -> None:
    """Assert that rounds are bounded and that no position is probed twice."""
    assert len(index.probed) == len(set(index.probed))
    assert set(index.probed) <= set(range(len(index.records)))
    for number, positions in enumerate(index.rounds):
        assert (
            0 < len(positions) <= (1 if width == 1 else max(18, MAX_INTERVALS * width) if number == 0 else MAX_INTERVALS * width)
        )


widths = st.sampled_from(WIDTHS)
guesses = st.lists(st.integers(0, 70), max_size=6)
prefix_runs = st.lists(st.tuples(st.just(0), st.integers(0, 60), st.sampled_from(VOLUME_EPOCHS)), max_size=4)
any_runs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from(VOLUME_EPOCHS)).map(
        lambda run: (run[0], run[0] + run[1], run[2])
    ),
    max_size=8,
)


@st.composite
def closed_runs(draw: st.DrawFn) -> list[Run]:
    """Runs without a gap between them."""
    end, runs = 0, []
    for _ in range(draw(st.integers(0, 6))):
        start, end = draw(st.integers(0, end)), draw(st.integers(end, 60))
        runs.append((start, end, draw(st.sampled_from(VOLUME_EPOCHS))))
    return runs


@st.composite
def stale_indexes(draw: st.DrawFn) -> Index:
    """Any records with any claims, on some shards that may be away."""
    record = st.dictionaries(st.sampled_from(VOLUME_EPOCHS), st.integers(0, 60), max_size=3)
    records = draw(st.lists(record, min_size=1, max_size=60))
    records = [{holder: min(start, at) for holder, start in found.items()} for at, found in enumerate(records)]
    shards = draw(st.integers(1, 5))
    away = draw(st.sets(st.integers(0, shards - 1)))
    return Index(records).on_shards(shards, away, draw(st.integers(0, 99)))


# ---- all shards answer ----
@given(st.integers(1, 60), prefix_runs, guesses, widths)
def test_rounds_of_any_width_find_the_same_runs(length: int, runs: list[Run], ends: list[int], width: int) -> None:
    index = Index.of(length, runs)
    hit = index.search(ends, width)
    check_rounds(index, width)
    one_by_one = Index.of(length, runs).search((), 1)
    assert (hit.blocks, set(hit.runs), hit.unknown) == (one_by_one.blocks, set(one_by_one.runs), 0)
    longest = dict.fromkeys(VOLUME_EPOCHS, 0)
    for _, end, volume_epoch in runs:
        longest[volume_epoch] = max(longest[volume_epoch], min(end, length))
    assert set(hit.runs) == {ReplicaRun(0, end, volume_epoch) for volume_epoch, end in longest.items() if end}


@given(st.integers(1, 60), closed_runs(), guesses, widths)
def test_rounds_true_claims_without_gaps_make_exact_hits(length: int, runs: list[Run], ends: list[int], width: int) -> None:
    index = Index.of(length, runs)
    hit = index.search(ends, width)
    check_rounds(index, width)
    check_sound(index, hit)
    assert hit.blocks == index.prefix()
    assert all(index.is_held(run) for run in hit.runs)


@given(st.integers(1, 60), any_runs, guesses, widths)
def test_rounds_true_claims_with_gaps_make_true_runs(length: int, runs: list[Run], ends: list[int], width: int) -> None:
    index = Index.of(length, runs)
    hit = index.search(ends, width)
    check_rounds(index, width)
    check_sound(index, hit)
    assert hit.blocks >= index.prefix()
    assert all(index.is_held(run) for run in hit.runs)


long_runs = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 200), st.sampled_from(VOLUME_EPOCHS)).map(
        lambda run: (run[0], run[0] + run[1], run[2])
    ),
    min_size=3,
    max_size=12,
)


@given(long_runs, st.lists(st.integers(0, 600), max_size=4), widths)
def test_rounds_of_long_runs_end_hits_before_a_gap(runs: list[Run], ends: list[int], width: int) -> None:
    index = Index.of(600, [(0, 50, ONE), *runs])
    hit = index.search(ends, width)
    check_rounds(index, width)
    assert hit.blocks >= index.prefix()
    assert hit.blocks == 600 or not index.records[hit.blocks]
    assert all(index.is_held(run) for run in hit.runs)
    assert {at for run in hit.runs for at in range(run.start, run.start + run.count)} == set(range(hit.blocks))


def test_rounds_of_several_gaps_end_the_hit_at_the_lowest() -> None:
    index = Index.of(LENGTH, [(0, 190, ONE), (200, 590, TWO), (600, 990, THREE), (1_000, 1_500, ONE)])
    hit = index.search((150, 500, 900, 1_400))
    assert hit == PrefixHit(190, (ReplicaRun(0, 190, ONE),))


def test_rounds_below_a_gap_probe_nothing_above_it() -> None:
    index = Index.of(LENGTH, [(0, 800, ONE), (800, LENGTH, TWO)])
    assert set(index.search((1,)).runs) == {ReplicaRun(0, 800, ONE), ReplicaRun(800, 800, TWO)}
    assert max(index.rounds[1]) == 799


def test_rounds_discovery_is_bounded() -> None:
    index = Index.of(20_000, [])
    index.records = [{ONE: 0, VolumeEpoch(10 + at): at} for at in range(20_000)]
    hit = index.search()
    assert hit.blocks == 20_000
    assert ReplicaRun(0, 20_000, ONE) in hit.runs
    assert len(index.probed) <= MAX_DISCOVERY_PROBES + MAX_INTERVALS * ROUND_WIDTH + 18


def test_round_right_guesses_are_the_only_one() -> None:
    index = Index.of(1_640, [(0, 1_600, ONE), (0, 1_200, TWO)])
    hit = index.search((1_200, 1_600))
    assert set(hit.runs) == {ReplicaRun(0, 1_600, ONE), ReplicaRun(0, 1_200, TWO)}
    assert index.rounds == [[0, 1_199, 1_200, 1_599, 1_600, 1_639]]


@pytest.mark.parametrize("runs", range(1, MAX_LOOKUP_ENDS + 1))
def test_round_right_guesses_probe_twice_per_end(runs: int) -> None:
    ends = [LENGTH - 100 * (number + 1) for number in range(runs)]
    index = Index.of(LENGTH, [(0, end, VolumeEpoch(number + 1)) for number, end in enumerate(ends)])
    assert len(index.search(ends).runs) == runs
    [only] = index.rounds
    assert len(only) == 2 + 2 * runs


@given(st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_rounds_without_guesses_are_at_most_three(end: int, other: int) -> None:
    index = Index.of(LENGTH, [(0, end, ONE)])
    assert index.search().blocks == end
    assert len(index.rounds) <= 3
    assert len(index.probed) <= 38
    index = Index.of(LENGTH, [(0, end, ONE), (0, other, TWO)])
    assert len(index.search().runs) == (end > 0) + (other > 0)
    assert len(index.rounds) <= 3
    assert len(index.probed) <= 60


@given(st.integers(0, LENGTH), st.lists(st.integers(0, LENGTH), max_size=4))
def test_rounds_after_wrong_guesses_are_at_most_three(end: int, ends: list[int]) -> None:
    index = Index.of(LENGTH, [(0, end, ONE)])
    assert index.search(ends).blocks == end
    assert len(index.rounds) <= 1 + 3
    assert len(index.probed) <= len(index.rounds[0]) + 38


# ---- some shards are away ----
@given(stale_indexes(), guesses, widths)
def test_unknown_with_any_claims_makes_sound_answers(index: Index, ends: list[int], width: int) -> None:
    try:
        hit = index.search(ends, width)
    except Unavailable:
        assert not any(position in index.known for position in index.probed)
        return
    finally:
        check_rounds(index, width)
    check_sound(index, hit)


@given(st.integers(1, 60), closed_runs(), guesses, widths, st.integers(2, 6), st.integers(0, 1_000))
def test_unknown_hit_is_what_known_records_claim(
    length: int, runs: list[Run], ends: list[int], width: int, shards: int, seed: int
) -> None:
    index = Index.of(length, runs, shards, away=[0], seed=seed)
    try:
        hit = index.search(ends, width)
    except Unavailable:
        assert not any(position in index.known for position in index.probed)
        assert not index.known or len(index.probed) >= MAX_SILENT
        return
    check_rounds(index, width)
    check_sound(index, hit)
    assert hit.blocks == claimed_blocks(index.known, length)
    assert all(index.is_held(run) for run in hit.runs)
    assert hit.unknown <= len([position for position in index.probed if position not in index.known])
    assert hit.unknown or hit.blocks == index.prefix()


@given(
    st.lists(st.integers(1, LENGTH), min_size=1, max_size=3),
    st.lists(st.integers(0, LENGTH), max_size=4),
    widths,
    st.integers(2, 6),
    st.integers(0, 1_000),
)
def test_unknown_hit_ends_at_the_last_known_block(ends: list[int], wrong: list[int], width: int, shards: int, seed: int) -> None:
    runs = [(0, end, volume_epoch) for end, volume_epoch in zip(ends, VOLUME_EPOCHS, strict=False)]
    index = Index.of(LENGTH, runs, shards, away=[0], seed=seed)
    hit = index.search((*ends, *wrong), width)
    check_rounds(index, width)
    assert hit.blocks == max((at + 1 for at in index.known if at < max(ends)), default=0)
    assert all(index.is_held(run) for run in hit.runs)
    assert len(index.rounds) <= 10 or width < ROUND_WIDTH


@pytest.mark.parametrize("shards", [2, 3, 6])
@pytest.mark.parametrize("guess", [True, False])
def test_unknown_shard_costs_few_blocks_and_rounds(shards: int, guess: bool) -> None:
    """The end of the hit loses 1 / (shards - 1) blocks on average, and guesses save rounds also then."""
    lost, rounds, probes = [], [], []
    for seed in range(300):
        end = random.Random(seed).randrange(40, LENGTH)
        index = Index.of(LENGTH, [(0, end, ONE), (0, end * 3 // 4, TWO)], shards, away=[0], seed=seed)
        hit = index.search((end, end * 3 // 4) if guess else ())
        lost.append(end - hit.blocks)
        rounds.append(len(index.rounds))
        probes.append(len(index.probed))
        assert hit.runs[0].count == hit.blocks or hit.runs[-1].count == hit.blocks
    assert min(lost) >= 0
    assert mean(lost) == pytest.approx(1 / (shards - 1), rel=0.35)
    assert mean(rounds) <= (2.5 if guess else 4.5)
    assert mean(probes) <= (25 if guess else 90)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ends", [(), (700, 900)])
@pytest.mark.parametrize("length", [1, 5, LENGTH])
def test_unknown_everywhere_is_an_error_soon(length: int, ends: tuple[int, ...], width: int) -> None:
    index = Index.of(length, [(0, length, ONE)], shards=1, away=[0])
    with pytest.raises(Unavailable, match="no shard of the index answered"):
        index.search(ends, width)
    assert len(index.probed) == min(length, len(index.probed)) <= MAX_SILENT + 2 * ROUND_WIDTH
    assert width == 1 or len(index.rounds) <= MAX_SILENT


def test_unknown_head_of_an_absent_chain_is_a_miss() -> None:
    index = Index.of(LENGTH, [])
    index.shards[0], index.away = 1, frozenset([1])
    assert index.search() == PrefixHit(0, ())
    assert len(index.rounds) <= 2
    assert index.search(width=1) == PrefixHit(0, ())


def test_unknown_head_of_a_held_chain_costs_nothing() -> None:
    index = Index.of(LENGTH, [(0, 1_000, ONE)])
    index.shards[0], index.away = 1, frozenset([1])
    hit = index.search((1_000,))
    assert (hit, hit.unknown) == (PrefixHit(1_000, (ReplicaRun(0, 1_000, ONE),)), 1)
    assert len(index.rounds) == 1


def test_unknown_end_of_a_run_is_claimed_by_an_overlapping_run() -> None:
    index = Index.of(LENGTH, [(0, 900, ONE), (800, LENGTH, TWO)])
    index.shards[799], index.away = 1, frozenset([1])
    for width in WIDTHS:
        assert index.search(width=width).blocks == LENGTH


def test_unknown_end_of_a_run_without_overlap_ends_the_hit() -> None:
    index = Index.of(LENGTH, [(0, 800, ONE), (800, LENGTH, TWO)])
    index.shards[799], index.away = 1, frozenset([1])
    for width in WIDTHS:
        assert index.search(width=width) == PrefixHit(799, (ReplicaRun(0, 799, ONE),))


def test_unknown_records_beyond_the_limit_end_the_search() -> None:
    index = Index.of(60_000, [(0, 60_000, ONE)])
    index.shards = [int(0 < position < 60_000 - 1) for position in range(60_000)]
    index.away = frozenset([1])
    index.records[-1] = {TWO: 59_999}
    for width in WIDTHS:
        assert index.search(width=width) == PrefixHit(1, (ReplicaRun(0, 1, ONE),))
        assert len(index.probed) <= MAX_UNKNOWN + MAX_INTERVALS * width + 2
