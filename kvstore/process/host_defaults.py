"""Derive the defaults of a node from its host: a laptop and a host with 1 TB of DRAM and eight NVMe disks need different ones.

Pure. Configured values always win; only unset settings are derived. A host with two volumes at most and an unknown link speed
gets the values of a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

LEAST_THREADS: Final = 8
MOST_THREADS: Final = 64
THREADS_PER_VOLUME: Final = 4
LEAST_WINDOW: Final = 64 * _MIB
MOST_WINDOW: Final = 512 * _MIB
WINDOW_PER_VOLUME: Final = 32 * _MIB
WINDOW_SHARE: Final = 64
"""A window above the least is at most this fraction (1/n) of the arena."""
USUAL_MOVE_BYTES_PER_S: Final = 256 * _MIB
LEAST_MOVE_BYTES_PER_S: Final = 64 * _MIB
MOVE_SHARE: Final = 4
"""A drain takes this fraction (1/n) of the link."""
LEAST_MOVE_WINDOW: Final = 32 * _MIB
MOST_MOVE_WINDOW: Final = 256 * _MIB
MOVE_WINDOWS_PER_S: Final = 32
LEAST_GRACE_MS: Final = 10_000
MOST_GRACE_MS: Final = 600_000
"""The stop timeout of a supervisor must be longer (``TimeoutStopSec`` of the unit)."""
VOLUME_WRITE_BYTES_PER_S: Final = 1_000_000_000
"""Assumed sustained write rate of one NVMe disk."""
HUGE_PAGES_FROM: Final = 32 * _GIB
"""Above this arena size, page tables and TLB misses of 4 KiB pages matter."""
USUAL_CHECK_BYTES_PER_S: Final = 200_000_000
CHECK_SHARE: Final = 10
"""A volume check reads at this fraction (1/n) of the measured rate of the volume."""

_T = TypeVar("_T", int, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of a host that the defaults depend on.

    Attributes:
        cores: number of cores available to this process.
        arena_bytes: ``node.dram``.
        volumes: number of configured NVMe volumes.
        writes_elsewhere: write-back goes to a storage node (``node.write_back_to``).
        huge_pages_free_bytes: reserved huge pages that are free.
        link_bytes_per_s: rate of the compute link; None: unknown.
    """

    cores: int
    arena_bytes: int
    volumes: int = 0
    writes_elsewhere: bool = False
    huge_pages_free_bytes: int = 0
    link_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class DerivedDefault(Generic[_T]):
    """A derived value with its reason."""

    value: _T
    why: str


@dataclass(frozen=True, slots=True)
class NodeDefaults:
    """Values for unset settings of a node. Fields have the names of the settings."""

    load_threads: DerivedDefault[int]
    load_window: DerivedDefault[int]
    move_bandwidth: DerivedDefault[int]
    move_window: DerivedDefault[int]
    stop_grace: DerivedDefault[int]
    """Milliseconds."""
    huge_pages: DerivedDefault[bool]


def derive(facts: HostFacts) -> NodeDefaults:
    """Derive the defaults of a host.

    Example:
        >>> derive(HostFacts(cores=2, arena_bytes=1 << 30)).load_threads.value
        8
    """
    move = _move_bandwidth(facts)
    window = min(MOST_MOVE_WINDOW, max(LEAST_MOVE_WINDOW, move.value // MOVE_WINDOWS_PER_S // _MIB * _MIB))
    return NodeDefaults(
        load_threads=_load_threads(facts),
        load_window=_load_window(facts),
        move_bandwidth=move,
        move_window=DerivedDefault(window, f"1/{MOVE_WINDOWS_PER_S} s of move_bandwidth, at least {LEAST_MOVE_WINDOW >> 20} MiB"),
        stop_grace=_stop_grace(facts),
        huge_pages=_huge_pages(facts),
    )


def _load_threads(facts: HostFacts) -> DerivedDefault[int]:
    wanted = THREADS_PER_VOLUME * facts.volumes
    most = min(MOST_THREADS, max(LEAST_THREADS, 2 * facts.cores))
    value = max(LEAST_THREADS, min(most, wanted))
    bounds = f"at least {LEAST_THREADS}, at most {most} on {facts.cores} cores"
    return DerivedDefault(value, f"{THREADS_PER_VOLUME} for each of {facts.volumes} volumes, {bounds}")


def _load_window(facts: HostFacts) -> DerivedDefault[int]:
    wanted = min(WINDOW_PER_VOLUME * facts.volumes, facts.arena_bytes // WINDOW_SHARE // _MIB * _MIB, MOST_WINDOW)
    why = f"{WINDOW_PER_VOLUME >> 20} MiB for each of {facts.volumes} volumes, at least {LEAST_WINDOW >> 20} MiB"
    return DerivedDefault(max(LEAST_WINDOW, wanted), why)


def _move_bandwidth(facts: HostFacts) -> DerivedDefault[int]:
    if facts.link_bytes_per_s is None:
        return DerivedDefault(USUAL_MOVE_BYTES_PER_S, "the speed of the link is unknown")
    share = int(facts.link_bytes_per_s) // MOVE_SHARE
    return DerivedDefault(
        max(LEAST_MOVE_BYTES_PER_S, share), f"a quarter of the link of {facts.link_bytes_per_s / 125e6:g} Gbit/s"
    )


def _stop_grace(facts: HostFacts) -> DerivedDefault[int]:
    if not facts.volumes and not facts.writes_elsewhere:
        return DerivedDefault(LEAST_GRACE_MS, "no volume to write to")
    waiting = facts.arena_bytes * 3 // 4
    rate = VOLUME_WRITE_BYTES_PER_S * max(1, facts.volumes)
    seconds = -(-waiting // rate)
    value = min(MOST_GRACE_MS, max(LEAST_GRACE_MS, seconds * 1_000))
    why = f"three quarters of the arena may wait for write-back, at {rate / 1e9:g} GB/s assumed"
    return DerivedDefault(value, why)


def _huge_pages(facts: HostFacts) -> DerivedDefault[bool]:
    if facts.arena_bytes < HUGE_PAGES_FROM:
        return DerivedDefault(value=False, why=f"the arena is smaller than {HUGE_PAGES_FROM >> 30} GiB")
    if facts.huge_pages_free_bytes < facts.arena_bytes:
        return DerivedDefault(value=False, why=f"{facts.huge_pages_free_bytes >> 30} GiB of huge pages are reserved and free")
    return DerivedDefault(value=True, why="the host has reserved huge pages for the whole arena")


def check_bandwidth(measured_bytes_per_s: float | None) -> int:
    """Bytes per second of a volume check if the caller does not choose a rate.

    Args:
        measured_bytes_per_s: measured read rate of the volume; None: not measured.
    """
    if measured_bytes_per_s is None:
        return USUAL_CHECK_BYTES_PER_S
    return max(1_000_000, int(max(measured_bytes_per_s / CHECK_SHARE, min(USUAL_CHECK_BYTES_PER_S, measured_bytes_per_s / 2))))
