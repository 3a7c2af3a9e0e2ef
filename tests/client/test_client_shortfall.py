"""The reasons that results give for missing blocks, for log lines."""

from __future__ import annotations

import numpy as np
import pytest

from kvclient import Outcome, StoreOutcome, Unavailable
from kvclient.results import LoadResult, StoreResult

AWAY = Unavailable("no session")


@pytest.mark.parametrize(
    ("outcomes", "error", "shown"),
    [
        ([Outcome.HIT, Outcome.HIT], None, ""),
        ([Outcome.HIT, Outcome.HIT], AWAY, ""),
        ([Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.MISS], None, "2 MISS, 1 CORRUPT"),
        ([Outcome.TIMEOUT], AWAY, "1 TIMEOUT: no session"),
    ],
)
def test_load_shortfall_names_outcomes(outcomes: list[Outcome], error: Unavailable | None, shown: str) -> None:
    assert LoadResult(np.array(outcomes, np.uint8), error=error).shortfall == shown


@pytest.mark.parametrize(
    ("outcomes", "error", "draining", "shown"),
    [
        ([StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS], None, False, ""),
        ([StoreOutcome.STORED, StoreOutcome.SKIPPED], None, False, "1 SKIPPED: the node had no space in time"),
        ([StoreOutcome.SKIPPED], None, True, "1 SKIPPED: the node drains or shuts down"),
        ([StoreOutcome.CORRUPT], None, False, "1 CORRUPT"),
        ([StoreOutcome.LOST, StoreOutcome.SKIPPED], AWAY, False, "1 SKIPPED, 1 LOST: no session"),
    ],
)
def test_store_shortfall_names_the_cause(
    outcomes: list[StoreOutcome], error: Unavailable | None, draining: bool, shown: str
) -> None:
    assert StoreResult(np.array(outcomes, np.uint8), error=error, draining=draining).shortfall == shown
