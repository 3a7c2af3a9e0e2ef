"""Labs for tests. Where no lab can run, what needs one is skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.netlab.lab import HostSpec, NetLab, available


@pytest.fixture(scope="session")
def lab_possible() -> None:
    """Skips what needs a lab where none can run."""
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
