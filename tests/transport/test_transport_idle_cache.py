"""The cache of open connections closes none that may be in use, and keeps no more unused ones than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.idle_cache import IDLE_S, IN_USE_FACTOR, IdleCache

MOST = 4


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0, IDLE_S / 3, IDLE_S * 2])), max_size=60))
def test_idle_cache_retires_unused_values_only(uses: list[tuple[int, float]]) -> None:
    cache: IdleCache[int, list[int]] = IdleCache(MOST)
    used_s: dict[int, float] = {}
    now_s = 0.0
    for key, pause_s in uses:
        now_s += pause_s
        value = cache.get(key, now_s)
        assert (value is not None) is (key in used_s)
        retired = [] if value is not None else cache.put(key, [key], now_s)
        used_s[key] = now_s
        for (one,) in retired:
            assert now_s - used_s.pop(one) >= IDLE_S
        assert len(cache) == len(used_s)
        if retired or value is None:
            idle = [one for one, at_s in used_s.items() if now_s - at_s >= IDLE_S]
            assert len(cache) <= MOST or not idle
    assert sorted(cache.clear()) == sorted([key] for key in used_s)
    assert len(cache) == 0


def test_idle_cache_is_bounded_if_all_values_are_used() -> None:
    cache: IdleCache[int, list[int]] = IdleCache(MOST)
    retired = [one for key in range(100) for one in cache.put(key, [key], 1.0)]
    assert len(cache) == IN_USE_FACTOR * MOST
    assert retired == [[key] for key in range(100 - len(cache))]
