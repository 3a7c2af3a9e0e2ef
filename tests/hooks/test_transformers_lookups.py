"""Lookups of a batch's rows against a scripted clock."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvclient import BlockKey, Lookup
from kvclient.engines.transformers.row_lookups import look_up_rows

ROWS = st.lists(st.lists(st.integers(0, 3).map(lambda number: bytes([number]) * 16), max_size=3), max_size=20)


@given(ROWS, st.lists(st.floats(0.0, 2.0), min_size=20, max_size=20))
def test_lookups_of_rows_share_deadline_and_results(rows: list[list[BlockKey]], durations: list[float]) -> None:
    asked: list[tuple[BlockKey, ...]] = []
    now_s = 100.0

    def look_up(keys: Sequence[BlockKey], deadline_s: float) -> Lookup:
        nonlocal now_s
        now_s += min(deadline_s, durations[len(asked)])
        asked.append(tuple(keys))
        return Lookup(keys, hit_blocks=len(keys))

    found = look_up_rows(rows, look_up, 1.0, lambda: now_s)
    assert now_s <= 101.0 + 1e-9, "all rows together have one deadline"
    assert len(asked) == len(set(asked)), "equal rows are looked up once"
    for row, lookup in zip(rows, found, strict=True):
        assert (lookup is not None) == (tuple(row) in asked)
        assert lookup is None or list(lookup.keys) == row
