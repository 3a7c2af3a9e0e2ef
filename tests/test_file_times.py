"""The record of test times keeps what is true and puts slow files first."""

from __future__ import annotations

from file_times import merged, start_order


def test_merged_measured_file_replaces_its_record() -> None:
    assert merged({"a": 5.0, "b": 9.0}, {"a": 12.34}, {"a", "b"}) == {"a": 12.3, "b": 9.0}


def test_merged_removed_file_is_dropped() -> None:
    assert merged({"a": 5.0, "gone": 9.0}, {}, {"a"}) == {"a": 5.0}


def test_start_order_slowest_first_unrecorded_last() -> None:
    ranks = start_order({"slow", "fast", "new"}, {"slow": 9.0, "fast": 1.0})
    assert sorted(ranks, key=ranks.__getitem__) == ["slow", "fast", "new"]
