"""The assignment rules against the paper's pseudo code, transcribed line by line; also quota and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.compute_budget import PromptChunk, fill_batch
from kvstore.dualpath.groups import DecodeGroups, Engine, EngineGroup, EngineKind, assign_decode, assign_prefill, decode_watermark
from kvstore.dualpath.pd_ratio import Bed, judge


@dataclass
class Numbers:
    """One engine with the pseudo code's fields."""

    tok: int
    seq: int
    free: int
    read: int


def literal_prefill(engines: list[Numbers], lengths: list[int], alpha: int, beta: int) -> list[int]:
    """Algorithm 1."""
    queue = list(lengths)
    assigned = []
    while queue:
        length = queue[0]
        c2 = [e for e in engines if e.tok <= beta and e.read <= alpha]
        c3 = [e for e in engines if e.tok <= beta and e.read > alpha]
        if c2:
            chosen = min(c2, key=lambda e: e.tok)
        elif c3:
            chosen = min(c3, key=lambda e: e.tok)
        else:
            break
        assigned.append(next(place for place, e in enumerate(engines) if e is chosen))
        chosen.tok += length
        chosen.seq += 1
        queue.pop(0)
    return assigned


def literal_watermark(engines: list[Numbers], waiting: list[tuple[int, int]], z: float) -> float:
    """Z of phase 2: R is the longest prefix of the private queue that fits in F."""
    space = sum(e.free for e in engines)
    longest = max(n for n in range(len(waiting) + 1) if sum(need for _, need in waiting[:n]) <= space)
    return z * (sum(length for length, _ in waiting[:longest]) + sum(e.tok for e in engines)) / len(engines)


def literal_decode(engines: list[Numbers], waiting: list[tuple[int, int]], z: float) -> list[int]:
    """Phase 2."""
    watermark = literal_watermark(engines, waiting, z)
    queue = list(waiting)
    assigned = []
    while queue:
        length, need = queue[0]
        able = [e for e in engines if e.free >= need]
        if not able:
            break
        low = [e for e in able if e.tok + length <= watermark]
        high = [e for e in able if not any(e is other for other in low)]
        chosen = min(low, key=lambda e: e.seq) if low else min(high, key=lambda e: e.tok)
        assigned.append(next(place for place, e in enumerate(engines) if e is chosen))
        chosen.tok += length
        chosen.seq += 1
        chosen.free -= need
        queue.pop(0)
    return assigned


def group_of(engines: list[Numbers], role: EngineKind) -> EngineGroup:
    group = EngineGroup("g", role)
    for place, numbers in enumerate(engines):
        group.join(Engine(f"e{place}", role, "g", "n", 10_000))
        group.tok[place], group.seq[place] = numbers.tok, numbers.seq
        group.free[place], group.read[place] = numbers.free, numbers.read
    return group


def numbers_of(group: EngineGroup) -> list[Numbers]:
    return [
        Numbers(int(group.tok[place]), int(group.seq[place]), int(group.free[place]), int(group.read[place]))
        for place in range(len(group))
    ]


small = st.integers(0, 30)  # small numbers make ties, and meet bounds exactly
engine_numbers = st.lists(st.builds(Numbers, small, st.integers(0, 4), small, small), max_size=9)


@settings(max_examples=500, deadline=None)
@given(engine_numbers, st.lists(st.integers(1, 20), max_size=25), small, small)
def test_prefill_assignment_is_algorithm_1(engines: list[Numbers], lengths: list[int], alpha: int, beta: int) -> None:
    group = group_of(engines, EngineKind.PREFILL)
    ours = list(assign_prefill(group, lengths, alpha, beta))
    assert ours == literal_prefill(engines, lengths, alpha, beta)
    assert numbers_of(group) == engines


@settings(max_examples=500, deadline=None)
@given(
    engine_numbers,
    st.lists(st.tuples(st.integers(1, 20), st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=4)), max_size=25),
    small,
    small,
)
def test_engine_with_cached_prefix_is_charged_less(
    engines: list[Numbers], asked: list[tuple[int, dict[int, int]]], alpha: int, beta: int
) -> None:
    group = group_of(engines, EngineKind.PREFILL)
    near = ({f"e{place}": tokens for place, tokens in spared.items()} for _, spared in asked)
    ours = list(assign_prefill(group, (length for length, _ in asked), alpha, beta, near))
    literal = []
    for length, spared in asked:
        able = [place for place, engine in enumerate(engines) if engine.tok <= beta]
        short = [place for place in able if engines[place].read <= alpha]
        if not able:
            break
        chosen = min(short or able, key=lambda place: engines[place].tok - spared.get(place, 0))
        literal.append(chosen)
        engines[chosen].tok += max(0, length - spared.get(chosen, 0))
        engines[chosen].seq += 1
    assert ours == literal
    assert numbers_of(group) == engines


@settings(max_examples=500, deadline=None)
@given(
    engine_numbers.filter(bool),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=25),
    st.sampled_from([1.05, 1.0, 0.5, 2.0]),
)
def test_decode_assignment_is_phase_2(engines: list[Numbers], waiting: list[tuple[int, int]], z: float) -> None:
    group = group_of(engines, EngineKind.DECODE)
    watermark = decode_watermark(group, waiting, z)
    assert watermark == literal_watermark(engines, waiting, z)
    ours = list(assign_decode(group, waiting, watermark))
    assert ours == literal_decode(engines, waiting, z)
    assert numbers_of(group) == engines


@settings(max_examples=300, deadline=None)
@given(
    engine_numbers,
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=25),
    st.sets(st.integers(0, 9)),
    small,
    small,
)
def test_engines_of_shut_nodes_get_no_request(
    engines: list[Numbers], waiting: list[tuple[int, int]], shut: set[int], alpha: int, beta: int
) -> None:
    stays = [place for place in range(len(engines)) if place not in shut]
    for role in EngineKind:
        group = EngineGroup("g", role)
        for place, numbers in enumerate(engines):
            group.join(Engine(f"e{place}", role, "g", f"n{place}", numbers.free))
            group.tok[place], group.seq[place], group.free[place], group.read[place] = (
                numbers.tok, numbers.seq, numbers.free, numbers.read,
            )  # fmt: skip
        assert group.exclude_nodes({f"n{place}" for place in shut}) == (len(stays) < len(engines))
        assert group.most_hbm == max((engines[place].free for place in stays), default=-1)
        left = [Numbers(engines[place].tok, engines[place].seq, engines[place].free, engines[place].read) for place in stays]
        if role is EngineKind.PREFILL:
            ours = list(assign_prefill(group, (length for length, _ in waiting), alpha, beta))
            literal = literal_prefill(left, [length for length, _ in waiting], alpha, beta)
        elif not left:
            ours, literal = list(assign_decode(group, waiting, decode_watermark(group, waiting, 1.05) if engines else 0.0)), []
        else:
            ours = list(assign_decode(group, waiting, decode_watermark(group, waiting, 1.05)))
            literal = literal_decode(left, waiting, 1.05)
        assert ours == [stays[place] for place in literal]
        assert [number for place, number in enumerate(numbers_of(group)) if place in stays] == left


def test_empty_group_gets_no_request() -> None:
    assert list(assign_prefill(EngineGroup("g", EngineKind.PREFILL), [1], 1, 1)) == []
    assert list(assign_decode(EngineGroup("g", EngineKind.DECODE), [(1, 1)], 1.0)) == []


@given(st.lists(st.tuples(small, small, st.integers(0, 3)), max_size=8), st.integers(0, 30))
def test_phase_1_takes_the_group_with_the_fewest_tokens(drawn: list[tuple[int, int, int]], need: int) -> None:
    """Each drawn group: tokens of its engines, waiting tokens, HBM of its only engine in tens (0: no engine)."""
    groups = DecodeGroups()
    able = {}
    for number, (tokens, waiting, hbm) in enumerate(drawn):
        group = EngineGroup(f"g{number}", EngineKind.DECODE)
        groups.join(group)
        if hbm:
            group.join(Engine(f"e{number}", EngineKind.DECODE, group.name, "n", hbm * 10))
            group.tok[0] = tokens
            if hbm * 10 >= need:
                able[group.name] = tokens + waiting
        groups.refresh(group.name, waiting)
    assert groups.choose(need) == min(able, key=lambda name: able[name], default=None)


# ---- compute quota ----


class Quadratic:
    """Causal attention: each new token attends to all earlier tokens."""

    def work(self, cached: int, tokens: int) -> float:
        return tokens * cached + tokens * (tokens + 1) / 2

    def seconds(self, work: float) -> float:
        return work * 1e-3


@given(
    st.lists(st.builds(PromptChunk, st.integers(0, 50), st.integers(1, 50)), max_size=12),
    st.floats(1e-3, 5.0),
    st.integers(1, 16),
)
def test_quota_fills_batch_in_order_and_cuts_the_last(waiting: list[PromptChunk], quota: float, granule: int) -> None:
    model = Quadratic()

    def seconds(batch: list[PromptChunk]) -> float:
        return model.seconds(sum(model.work(chunk.cached, chunk.tokens) for chunk in batch))

    batch = fill_batch(waiting, model, quota, granule)
    whole = 0
    while whole < len(waiting) and seconds(waiting[: whole + 1]) <= quota:
        whole += 1
    assert batch[:whole] == waiting[:whole]
    if whole == len(waiting):
        assert len(batch) == whole
        return
    cut = waiting[whole]
    sizes = [
        size
        for size in range(granule, cut.tokens, granule)
        if seconds([*waiting[:whole], PromptChunk(cut.cached, size)]) <= quota
    ]
    best = max(sizes, default=0)
    if not whole and not best:
        best = min(granule, cut.tokens)  # or the first would never run
    assert batch[whole:] == ([PromptChunk(cut.cached, best)] if best else [])


def test_quota_out_of_range_is_rejected() -> None:
    with pytest.raises(InvalidArgument):
        fill_batch([], Quadratic(), 0.0)
    with pytest.raises(InvalidArgument):
        fill_batch([], Quadratic(), granule=0)
    with pytest.raises(InvalidArgument):
        PromptChunk(-1, 1)
    with pytest.raises(InvalidArgument):
        PromptChunk(0, 0)


# ---- the bound ----


@pytest.mark.parametrize(
    ("g", "s", "memory_in_b", "lower", "upper", "by"),
    [
        (8, 1, 10, 1 / 7, 3.5, ("decode CNIC write", "decode DRAM")),  # the paper's example
        (8, 2, 10, 1 / 3, 1.0, ("decode DRAM",)),
        (4, 1, 10, 1 / 3, 1.5, ("decode CNIC write",)),
        (8, 0.5, 10, 1 / 15, 7.5, ("decode CNIC write",)),
        (4, 2, math.inf, 1.0, 0.0, ("decode CNIC read",)),
        (1, 1, math.inf, math.inf, -1.0, ("decode CNIC read",)),
    ],
)
def test_pd_bounds_match_manual_computation(
    g: float, s: float, memory_in_b: float, lower: float, upper: float, by: tuple[str, ...]
) -> None:
    verdict = judge(Bed(1, 1, g, 50e9, s * 50e9, memory_in_b * 50e9))
    assert verdict.lower == pytest.approx(lower)
    assert verdict.upper == pytest.approx(upper)
    assert verdict.upper_by in by


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.5, 16), st.floats(0.01, 8), st.floats(1.0, 100.0) | st.just(math.inf))
def test_bed_without_bottleneck_matches_equation_9(prefill: int, decode: int, g: float, s: float, memory_in_s: float) -> None:
    verdict = judge(Bed(prefill, decode, g, 1e9, s * 1e9, memory_in_s * s * 1e9))
    holds = verdict.lower <= verdict.ratio <= verdict.upper and s <= g / 2 and memory_in_s >= 2
    margin = min(abs(load - 1) for load in verdict.loads.values())
    if margin > 1e-6:
        assert verdict.free == holds
    assert (verdict.loads[verdict.busiest] > 1 + 1e-9) == (not verdict.free)


def test_bound_sentence_names_the_bottleneck() -> None:
    def of(prefill: int, decode: int, g: float, s: float) -> str:
        return judge(Bed(prefill, decode, g, 50e9, s * 50e9, 500e9)).sentence

    assert "2P4D: P/D = 0.50 lies within 0.14 … 3.50" in of(2, 4, 8, 1)
    assert "up to 3.00 times" in of(2, 4, 8, 1)
    assert "is above 3.50" in of(4, 1, 8, 1)
    assert "is below 0.14 (prefill CNIC write)" in of(1, 8, 8, 1)
    assert "no P:D is free of bottlenecks, with storage at 100% of a node's CNICs" in of(1, 1, 1, 1)


@pytest.mark.parametrize("wrong", [(0, 1, 8, 1, 1), (1, 0, 8, 1, 1), (1, 1, 0, 1, 1), (1, 1, 8, 0, 1), (1, 1, 8, 1, -1)])
def test_invalid_beds_are_rejected(wrong: tuple[int, int, float, float, float]) -> None:
    with pytest.raises(InvalidArgument):
        Bed(*wrong)
