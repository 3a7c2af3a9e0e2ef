"""Labs for tests. Tests that need a lab are skipped with a reason if none can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.netlab.lab import HostSpec, NetLab, available


@pytest.fixture(scope="session")
def lab_possible() -> None:
    """Skip the test if no lab can run."""
    reason = available()
    if reason is not None:
        pytest.skip(f"NO NETWORK LAB CAN RUN HERE, its tests are skipped: {reason}")


@pytest.fixture
def make_lab(lab_possible: None) -> Iterator[Callable[..., NetLab]]:
    """Starts labs; all are removed at the end."""
    made: list[NetLab] = []

    def make(*specs: HostSpec) -> NetLab:
        lab = NetLab(specs)
        made.append(lab)
        return lab.__enter__()

    yield make
    for lab in made:
        lab.close()
