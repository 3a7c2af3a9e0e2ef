"""A call that waits has a thread of its own for as long as it lives."""

from __future__ import annotations

import pytest

from kvstore.core.errors import CapacityExceeded
from kvstore.node.lanes import Lanes


def test_there_are_no_more_calls_than_threads() -> None:
    lanes = Lanes(2, "test")
    lanes.enter()
    lanes.enter()
    with pytest.raises(CapacityExceeded):
        lanes.enter()
    lanes.leave()
    lanes.enter()
    assert lanes.taken == 2
    assert lanes.pool.submit(lambda: 3).result(10) == 3
    lanes.close()
