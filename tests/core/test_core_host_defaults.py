"""Defaults of a node on hosts from a laptop to eight disks and 1 TB of DRAM."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.process.host_defaults import MOST_GRACE_MS, HostFacts, check_bandwidth, derive

MIB, GIB = 1 << 20, 1 << 30
LAPTOP = HostFacts(cores=8, arena_bytes=GIB)
THIS_MACHINE = HostFacts(cores=2, arena_bytes=GIB, volumes=1)
LARGE = HostFacts(
    cores=128, arena_bytes=800 * GIB, volumes=8, huge_pages_free_bytes=900 * GIB, link_bytes_per_s=400e9 / 8
)  # 1 TB of DRAM, eight NVMe disks, one port of 400 Gbit/s


@pytest.mark.parametrize(
    ("facts", "threads", "window", "move", "move_window", "grace_ms", "huge"),
    [
        (LAPTOP, 8, 64 * MIB, 256 * MIB, 32 * MIB, 10_000, False),
        (THIS_MACHINE, 8, 64 * MIB, 256 * MIB, 32 * MIB, 10_000, False),
        (LARGE, 32, 256 * MIB, 12_500_000_000, 256 * MIB, 81_000, True),
    ],
)
def test_derive_by_host(
    facts: HostFacts, threads: int, window: int, move: int, move_window: int, grace_ms: int, huge: bool
) -> None:
    found = derive(facts)
    assert found.load_threads.value == threads
    assert found.load_window.value == window
    assert found.move_bandwidth.value == move
    assert found.move_window.value == move_window
    assert found.stop_grace.value == grace_ms
    assert found.huge_pages.value is huge


@pytest.mark.parametrize(
    ("facts", "move"),
    [
        (HostFacts(cores=8, arena_bytes=GIB, link_bytes_per_s=125e6), 64 * MIB),
        (HostFacts(cores=8, arena_bytes=GIB, link_bytes_per_s=3.125e9), 781_250_000),
        (HostFacts(cores=8, arena_bytes=GIB), 256 * MIB),
    ],
)
def test_derive_move_bandwidth_follows_link(facts: HostFacts, move: int) -> None:
    assert derive(facts).move_bandwidth.value == move


def test_derive_huge_pages_too_few_reserved_stays_off() -> None:
    found = derive(HostFacts(cores=64, arena_bytes=64 * GIB, huge_pages_free_bytes=63 * GIB)).huge_pages
    assert not found.value
    assert found.why == "63 GiB of huge pages are reserved and free"


def test_derive_stop_grace_without_writes_is_least() -> None:
    assert derive(HostFacts(cores=64, arena_bytes=900 * GIB)).stop_grace.value == 10_000
    assert derive(HostFacts(cores=64, arena_bytes=64 * GIB, writes_elsewhere=True)).stop_grace.value == 52_000


@given(
    st.builds(
        HostFacts,
        cores=st.integers(1, 1024),
        arena_bytes=st.integers(1, 1 << 44),
        volumes=st.integers(0, 64),
        writes_elsewhere=st.booleans(),
        huge_pages_free_bytes=st.integers(0, 1 << 44),
        link_bytes_per_s=st.none() | st.floats(1.0, 1e12),
    )
)
def test_derive_any_host_stays_in_bounds(facts: HostFacts) -> None:
    found = derive(facts)
    assert 8 <= found.load_threads.value <= 64
    assert 64 * MIB <= found.load_window.value <= 512 * MIB
    assert 32 * MIB <= found.move_window.value <= 256 * MIB
    assert 10_000 <= found.stop_grace.value <= MOST_GRACE_MS
    assert found.move_bandwidth.value >= 64 * MIB
    assert not found.huge_pages.value or facts.huge_pages_free_bytes >= facts.arena_bytes


@pytest.mark.parametrize(
    ("measured", "rate"), [(None, 200_000_000), (7e9, 700_000_000), (1e9, 200_000_000), (1e8, 50_000_000), (1.0, 1_000_000)]
)
def test_check_bandwidth_is_a_part_of_what_was_measured(measured: float | None, rate: int) -> None:
    assert check_bandwidth(measured) == rate


def test_unit_waits_longer_than_any_stop_grace() -> None:
    unit = Path(__file__).parents[2] / "deploy" / "systemd" / "kvstore-node.service"
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("TimeoutStopSec=")]
    minutes = int(line.removeprefix("TimeoutStopSec=").removesuffix("min"))
    assert minutes * 60_000 > MOST_GRACE_MS
