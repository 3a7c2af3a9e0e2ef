"""Calibration of one cache: trial copies of both directions, and their counters and log lines. Errors of trials never escape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvclient.device.calibration.choice import Direction, DirectionChoice, TrialResults
from kvclient.device.calibration.trial import CopyTrial, TrialLate, plan_trial
from kvclient.device.layouts import PagedCache
from kvclient.device.page_scatter import PageScatter
from kvclient.device.pins.copier_pins import CopierPins
from kvclient.device.streams import Device, Event
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics

_log = logging.getLogger(__name__)

CALIBRATE_S = 2.0
"""Bound of a calibration, its allocations and pins included. A driver call under way may exceed it: a copy by one second, a
pin or unpin by up to 30 s."""

Results = Mapping[Direction, TrialResults]


def shape_key(cache: PagedCache) -> tuple[object, ...]:
    """Caches with equal keys have equal rates."""
    layers, page = len(cache.layers), cache.page
    return str(cache.device), cache.kind, layers, page.parts, page.part_bytes, cache.pages_per_block, cache.has_joined_layers


def without_trial(wanted: Mapping[Direction, Sequence[str]], gap: str) -> Results:
    """Return results without measurements.

    Args:
        wanted: strategies to measure.
        gap: why they were not measured.
    """
    return {direction: TrialResults(gap=gap) for direction in wanted}


def measure(
    device: Device,
    cache: PagedCache,
    scatter: Callable[[PagedCache], PageScatter],
    pins: CopierPins,
    counters: Counters,
    wanted: Mapping[Direction, Sequence[str]],
    *,
    staging_bytes: int,
    until_s: float,
    now_s: Callable[[], float],
) -> tuple[Results, list[Event]]:
    """Measure strategies with trial copies. Raises no error of the device.

    Args:
        device: device of the cache.
        cache: the engine's pages; only their shape is used.
        scatter: moves rows for the strategy ``staged``.
        pins: pins the host memory of the trial.
        counters: counts strategies that failed, and copies that are late.
        wanted: strategies by direction.
        staging_bytes: as for the cache's own copies.
        until_s: when the trial must be over, by ``now_s``.
        now_s: a monotonic clock.

    Returns:
        Results by direction, and the events of copies that did not end.
    """
    plan = plan_trial(len(cache.layers), cache.row_bytes, cache.page.parts * cache.pages_per_block)
    if plan is None:
        return without_trial(wanted, "a layer of a block is larger than the trial memory"), []
    results = dict(without_trial(wanted, "too little time"))
    late: list[Event] = []
    trial = None
    try:
        trial = CopyTrial(device, cache, scatter, pins, plan, staging_bytes=staging_bytes, until_s=until_s, now_s=now_s)
        for direction, names in wanted.items():
            results[direction] = trial.measure(direction, names)
    except TrialLate:
        _log.warning("trial copies exceeded their time: %s", cache.device)
    except Exception as error:  # noqa: BLE001  # torch, Triton and drivers raise errors of many types
        failed = without_trial(wanted, f"trial copies failed: {error or type(error).__name__}")
        results = {direction: failed[direction] if known.gap else known for direction, known in results.items()}
    finally:
        if trial is not None:
            late = trial.close()
    for direction, measured in results.items():
        for name, reason in measured.failed.items():
            counters.add(device_metrics.DEVICE_TRIALS_FAILED)
            _log.warning("trial copies failed: %s (direction=%s, strategy=%s, error=%s)", cache.device, direction, name, reason)
    if late:
        counters.add(device_metrics.DEVICE_TRIALS_LATE)
        _log.error("trial copies did not end: %s, their memory stays reserved", cache.device)
    return results, late


def report(cache: PagedCache, piece_bytes: int, counters: Counters, choices: Mapping[Direction, DirectionChoice]) -> None:
    """Log the choice of both directions once, and count the directions that were not measured.

    Args:
        cache: the engine's pages.
        piece_bytes: length of the contiguous pieces of this cache.
        counters: counts.
        choices: by direction.
    """
    for direction, choice in choices.items():
        rates = ", ".join(f"{name}={rate / 1e9:.2f}" for name, rate in choice.rates.items())
        if choice.source == "measured":
            _log.info(
                "copies measured: %s %ss use %s (piece_bytes=%d, GB/s: %s)",
                cache.device,
                direction,
                choice.strategy,
                piece_bytes,
                rates,
            )
        else:
            counters.add(device_metrics.DEVICE_UNCALIBRATED)
            _log.warning(
                "copies not measured: %s %ss use %s by rule (piece_bytes=%d, reason=%s)",
                cache.device,
                direction,
                choice.strategy,
                piece_bytes,
                choice.gap,
            )
