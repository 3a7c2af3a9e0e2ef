"""The compact structures below the eviction policies, held against plain ones: a sorted list, and an ordered dict."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict

import pytest

from kvstore.testing.policy_suite import policy_key
from kvstore.tiers.eviction import policy_memory
from kvstore.tiers.eviction.policy_memory import Entry, EvictionQueue, GhostList


@pytest.mark.parametrize("least", [4, 4096])
@pytest.mark.parametrize("disorder", [0.0, 0.1, 1.0])
def test_queue_yields_in_total_order(monkeypatch: pytest.MonkeyPatch, least: int, disorder: float) -> None:
    for name in ("_LEAST_MERGED", "_LEAST_CUT"):
        monkeypatch.setattr(f"kvstore.tiers.eviction.policy_memory.{name}", least)
    draw = random.Random(int(disorder * 10))
    queue, model = EvictionQueue(), list[Entry]()
    numbers = array("q", bytes(8 * 1000))
    number = 0
    for step in range(6_000):
        if draw.random() < 0.6:
            row = draw.randrange(1000)
            number += 1
            numbers[row] = number
            place = draw.randrange(-500, 500) if draw.random() < disorder else step
            queue.push(place, number, row)
            model.append((place, number, row))
        elif model:
            first = min(model)
            assert queue.first() == first
            queue.drop_first()
            model.remove(first)
        if queue.crowded or draw.random() < 0.002:
            queue.keep(numbers)
            model = [entry for entry in model if numbers[entry[2]] == entry[1]]
        assert len(queue) == len(model)
    while model:
        first = min(model)
        assert queue.first() == first
        queue.drop_first()
        model.remove(first)
    assert queue.first() is None


def test_queue_in_order_needs_no_heap() -> None:
    """Newcomers come in order: 20 bytes each, and nothing is merged."""
    queue = EvictionQueue()
    for number in range(1, 20_000):
        queue.push(0, number, number)
        assert not queue.crowded
    assert queue.first() == (0, 1, 1)


@pytest.mark.parametrize(("segment_bits", "bucket"), [(2, 2), (12, 64)])
def test_ghosts_leave_first_in_first_out(monkeypatch: pytest.MonkeyPatch, segment_bits: int, bucket: int) -> None:
    monkeypatch.setattr(policy_memory, "_SEGMENT_BITS", segment_bits)
    monkeypatch.setattr(policy_memory, "_SEGMENT", 1 << segment_bits)
    monkeypatch.setattr(policy_memory, "_BUCKET", bucket)
    draw = random.Random(bucket)
    ghosts, model = GhostList(), OrderedDict[bytes, int]()
    for step in range(30_000):
        key = policy_key(draw.randrange(3_000))
        what = draw.random()
        if what < 0.5 and key not in model:
            ghosts.add(key, step)
            model[key] = step
        elif what < 0.8:
            assert ghosts.pop(key) == model.pop(key, None)
        elif model and draw.random() < 0.9:
            ghosts.drop_oldest()
            model.popitem(last=False)
        assert len(ghosts) == len(model)
    for key, number in list(model.items()):
        assert ghosts.pop(key) == number
    ghosts.drop_oldest()  # of none: nothing happens
    assert len(ghosts) == 0
