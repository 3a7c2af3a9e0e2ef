"""Seconds that each test file takes, recorded in ``tests/file_times.json``: shows what tests cost, and orders them.

``pytest --record-times`` updates the record for the files that it ran. Every run starts the slowest files first, so that no
worker is left with a long file at the end. Files without a record start last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
RECORD = REPOSITORY / "tests" / "file_times.json"


def read_times(record: Path = RECORD) -> dict[str, float]:
    """Seconds by file, relative to the repository."""
    times: dict[str, float] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return times


def merged(recorded: Mapping[str, float], measured: Mapping[str, float], exists: set[str]) -> dict[str, float]:
    """The new record, slowest first: measured times replace recorded ones, and files that no longer exist are dropped."""
    times = {name: round(seconds, 1) for name, seconds in {**recorded, **measured}.items() if name in exists}
    return dict(sorted(times.items(), key=lambda entry: (-entry[1], entry[0])))


def start_order(names: set[str], times: Mapping[str, float]) -> dict[str, int]:
    """Rank of each file: the slowest first, unrecorded files last."""
    ordered = sorted(names, key=lambda name: (-times.get(name, 0.0), name))
    return {name: rank for rank, name in enumerate(ordered)}


class TimeRecorder:
    """Pytest plugin that sums the time of each file's tests, fixtures included. With xdist it runs in the controller only."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        exists = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").rglob("test_*.py")}
        RECORD.write_text(json.dumps(merged(read_times(), self._seconds, exists), indent=1) + "\n", encoding="utf-8")
