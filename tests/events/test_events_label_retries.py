"""Tests of the memory of labels that could not be read."""

from __future__ import annotations

from kvclient.events.block_groups import GroupBlockId
from kvstore.core.types import NamespaceId
from kvstore.events.label_retries import PAUSES_S, Block, LabelRetries


def block(number: int) -> Block:
    return NamespaceId(b"n" * 16), GroupBlockId(number.to_bytes(16, "big"))


def test_failed_label_waits_longer_after_each_failure() -> None:
    retries, now_s = LabelRetries(10), 0.0
    assert retries.failed(block(1), now_s)
    for pause in (*PAUSES_S, PAUSES_S[-1]):
        assert list(retries.take_due(now_s + pause - 1, 10)) == []
        assert retries.is_waiting(block(1))
        now_s += pause
        assert list(retries.take_due(now_s, 10)) == [block(1)]
        assert not retries.is_waiting(block(1))
        assert not retries.failed(block(1), now_s)
    retries.succeeded(block(1))
    assert not retries.is_waiting(block(1))
    assert retries.failed(block(1), now_s)


def test_due_labels_come_in_bounded_parts() -> None:
    retries = LabelRetries(10)
    for number in range(5):
        retries.failed(block(number), float(number))
    assert list(retries.take_due(PAUSES_S[0] + 3, 3)) == [block(0), block(1), block(2)]
    assert list(retries.take_due(PAUSES_S[0] + 3, 3)) == [block(3)]


def test_remembered_failures_are_bounded() -> None:
    retries = LabelRetries(3)
    for number in range(5):
        retries.failed(block(number), 0.0)
    assert (len(retries), retries.forgotten) == (3, 2)
    assert [retries.is_waiting(block(number)) for number in range(5)] == [False, False, True, True, True]
    assert len(list(retries.take_due(PAUSES_S[0], 10))) == 3
