"""Lookups of a batch's rows, all within one deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvclient import BlockKey, Lookup

_LEAST_S = 0.001


def look_up_rows(
    rows: Sequence[Sequence[BlockKey]],
    look_up: Callable[[Sequence[BlockKey], float], Lookup],
    deadline_s: float,
    now_s: Callable[[], float],
) -> list[Lookup | None]:
    """Look up the chains of all rows. Rows with equal chains share one lookup.

    Args:
        rows: the keys of each row.
        look_up: looks up one chain within a number of seconds.
        deadline_s: the time for all rows together.
        now_s: the clock.

    Returns:
        One result per row; None: the deadline had passed before the row's turn.
    """
    end_s = now_s() + deadline_s
    found: dict[tuple[BlockKey, ...], Lookup] = {}
    for row in rows:
        left_s = end_s - now_s()
        if left_s < _LEAST_S:
            break
        if tuple(row) not in found:
            found[tuple(row)] = look_up(row, left_s)
    return [found.get(tuple(row)) for row in rows]
