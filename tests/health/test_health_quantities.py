"""Tests of sizes and durations for people."""

from __future__ import annotations

import pytest

from kvstore.health.quantities import show_duration, show_size


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 20, "8.0 MiB"), (1000 << 30, "1000.0 GiB"), (5 << 40, "5.00 TiB")],
)
def test_size_has_a_unit_and_a_space_on_request(size: int, shown: str) -> None:
    assert show_size(size) == shown
    assert show_size(size, space=False) == shown.replace(" ", "")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (119, "119 s"), (600, "10 minutes"), (10_800, "3 hours"), (200_000, "2 days")]
)
def test_duration_is_in_words(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown
