"""Calibration of copy strategies: the choice, and trial copies that disturb nothing and never fail an engine."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from caches import ANY_GROUPS, LAYOUTS, block_bytes, make_cache, snapshot
from calibration_bed import ALL, Script, a_copier, a_device
from deferred import DeferredDevice, DeferredStream, FakePinning, bytes_of
from hypothesis import given
from hypothesis import strategies as st

from kvclient.device.calibration import trial as trial_module
from kvclient.device.calibration.choice import (
    CANDIDATES,
    DIRECTIONS,
    LEAST_SAMPLES,
    MARGIN,
    ON_COPY_ENGINES,
    SMALL_PIECE_BYTES,
    Direction,
    TrialResults,
    by_rule,
    candidates,
    choose,
    combined_rate,
)
from kvclient.device.calibration.trial import PIECES, REPEATS, TRIAL_BYTES, plan_trial
from kvclient.device.copier import DeviceCopier
from kvclient.device.copy_strategies import BatchedCopy, CopyRequest, HostMemory
from kvclient.device.streams import CpuDevice
from kvclient.engines.vllm.memory.device_pages import device_pages
from kvstore.core.errors import Internal, Unsupported

PATIENT_S = 30.0
"""Longer than a busy machine takes to pin a few kilobytes. Copies take the time of the script's clock."""
SAME = dict.fromkeys(ALL, 1e9)
directions = st.sampled_from(DIRECTIONS)
names = st.sampled_from(["staged", "batched", "batched_ahead", "direct"])
available = st.sets(names).map(lambda some: some | {"staged"})
rates = st.floats(1.0, 1e12)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy fewer pieces, and leave out the test of the kernel at start, which lasts a second in Triton's interpreter."""
    monkeypatch.setattr(trial_module, "PIECES", (8, 64))
    monkeypatch.setattr("kvclient.device.copier.try_out", lambda *_: None)


# ---- the choice ----
@given(direction=directions, available=available, piece_bytes=st.integers(1, 1 << 22), rates=st.dictionaries(names, rates))
def test_choice_of_measured_strategies_is_the_fastest(
    direction: Direction, available: set[str], piece_bytes: int, rates: dict[str, float]
) -> None:
    wanted = candidates(direction, available)
    rates = {name: rates.get(name, 1e9) for name in wanted}
    choice = choose(direction, available, piece_bytes, TrialResults(rates))
    assert (choice.source, choice.gap, choice.rates) == ("measured", "", rates)
    engines = [rates[name] for name in wanted if name in ON_COPY_ENGINES]
    kernels = [rates[name] for name in wanted if name not in ON_COPY_ENGINES]
    if choice.strategy in ON_COPY_ENGINES:
        assert rates[choice.strategy] == max(engines)
        assert direction == "store" or max(kernels) <= (1 + MARGIN) * max(engines), "a kernel is much faster"
    else:
        assert rates[choice.strategy] == max(kernels)
        assert not engines or direction == "load", "kernels for stores must be requested"
        assert not engines or max(kernels) > (1 + MARGIN) * max(engines), "it takes multiprocessors for little"
    assert choose(direction, available, piece_bytes, TrialResults(dict(reversed(rates.items())))).strategy == choice.strategy


@given(
    direction=directions,
    available=available,
    piece_bytes=st.integers(1, 1 << 16),
    rates=st.dictionaries(names, st.one_of(rates, st.sampled_from([0.0, -1.0, math.inf, math.nan]))),
    failed=st.sets(names),
    gap=st.sampled_from(["", "too little time"]),
)
def test_choice_with_missing_measurements_follows_the_rule(
    direction: Direction, available: set[str], piece_bytes: int, rates: dict[str, float], failed: set[str], gap: str
) -> None:
    choice = choose(direction, available, piece_bytes, TrialResults(rates, dict.fromkeys(failed, "error"), gap))
    wanted = CANDIDATES[direction]
    assert choice.strategy in available
    assert choice.strategy in wanted, "stores never use a kernel that reads pages, or sources that are not final"
    assert choice.strategy not in failed or choice.strategy == "staged"
    left = [name for name in wanted if name in available and name not in failed]
    complete = not gap and all(math.isfinite(rates.get(name, math.nan)) and rates[name] > 0 for name in left)
    assert (choice.source == "measured") == (complete and bool(left))
    if choice.source == "rule":
        assert choice.gap
        assert choice.strategy == by_rule(direction, left, piece_bytes)


@given(direction=directions, available=available, piece_bytes=st.integers(1, 1 << 16))
def test_rule_uses_a_kernel_only_for_loads_of_small_pieces(direction: Direction, available: set[str], piece_bytes: int) -> None:
    small = direction == "load" and piece_bytes < SMALL_PIECE_BYTES and "direct" in available
    assert by_rule(direction, available, piece_bytes) == (
        "direct" if small else "batched" if "batched" in available else "staged"
    )


@given(st.dictionaries(st.integers(1, 1 << 30), st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=5), max_size=2))
def test_combined_rate_ignores_a_single_disturbance(samples: dict[int, list[float]]) -> None:
    rate = combined_rate(samples)
    assert (rate is None) == (not samples)
    slowest = {size: [*sorted(durations)[:-1], 1e6] for size, durations in samples.items()}
    assert combined_rate(slowest) == rate
    for size in samples:
        assert combined_rate({**samples, size: samples[size][: LEAST_SAMPLES - 1]}) is None
        assert combined_rate({size: [0.0] * 3}) is None


@given(
    layers=st.integers(1, 200),
    row_bytes=st.integers(1, 1 << 27),
    row_pieces=st.integers(1, 2048),
    trial_bytes=st.integers(1, 1 << 26),
)
def test_trial_plan_keeps_its_bounds(layers: int, row_bytes: int, row_pieces: int, trial_bytes: int) -> None:
    plan = plan_trial(layers, row_bytes, row_pieces, trial_bytes)
    if plan is None:
        assert row_bytes > trial_bytes
        return
    assert 1 <= plan.layers <= layers
    assert 1 <= len(plan.blocks) <= len(PIECES)
    assert list(plan.blocks) == sorted(set(plan.blocks))
    assert plan.blocks[-1] * plan.layers * row_bytes <= trial_bytes
    assert plan.blocks[-1] * plan.layers * row_pieces <= max(*PIECES, row_pieces)


# ---- trial copies ----
def speeds(**given: float) -> dict[tuple[str, str], float]:
    """Speeds by direction and strategy: ``load_direct=3e9``; others are 1e9."""
    wanted = {tuple(name.split("_", 1)): speed for name, speed in given.items()}
    assert wanted.keys() <= set(ALL)
    return {what: wanted.get(what, 1e9) for what in ALL}  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "load", "store"),
    [
        ({}, "batched", "batched"),
        ({"load_direct": 5e9}, "direct", "batched"),
        ({"load_direct": 1.19e9, "store_staged": 1.19e9}, "batched", "batched"),
        ({"load_batched_ahead": 1.01e9, "load_direct": 1.2e9}, "batched_ahead", "batched"),
        ({"load_staged": 4e9, "load_direct": 3e9, "store_staged": 9e9}, "staged", "batched"),
        ({"load_batched": 7e9, "load_batched_ahead": 6e9, "load_direct": 8e9}, "batched", "batched"),
    ],
)
def test_calibration_uses_the_fastest_strategy(
    given: Mapping[str, float], load: str, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(speeds(**given)).install(monkeypatch)
    copier = a_copier(a_device())
    assert copier.strategy == "direct/batched", "the rule: pages of this cache are small"
    with caplog.at_level(logging.INFO):
        choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert {direction: choice.strategy for direction, choice in choices.items()} == {"load": load, "store": store}
    assert {choice.source for choice in choices.values()} == {"measured"}
    assert copier.strategy == (load if load == store else f"{load}/{store}")
    stats = copier.stats()
    assert stats[f"device_load_by_{load}"] == stats[f"device_store_by_{store}"] == 1
    for direction, name in ALL:
        assert stats[f"device_{direction}_{name}_bytes_per_second"] == pytest.approx(script.speeds[direction, name], rel=1e-3)
    assert stats.get("device_uncalibrated_total", 0) == 0
    assert sum("copies measured" in record.message for record in caplog.records) == 2
    assert script.begun.count(("load", "direct")) <= 1 + len(PIECES) * REPEATS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages_per_block", [1, 3])
def test_calibration_touches_no_page_of_the_engine(layout: str, pages_per_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device, pinning = a_device(), FakePinning()
    device.pinning = pinning
    cache = make_cache(layout, pages_per_block=pages_per_block)
    copier = DeviceCopier(cache, device=device, checksums=False)
    streams, before = len(device.streams), snapshot(cache)
    pinned: list[tuple[int, int]] = []
    pin = pinning.pin
    monkeypatch.setattr(pinning, "pin", lambda *range_: (pinned.append(range_), pin(*range_)))
    copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert all(torch.equal(layer.tensor, was) for layer, was in zip(cache.layers, before, strict=True))
    assert device.batches
    for targets, sources, sizes, final in device.batches:
        assert len(sizes) <= max(trial_module.PIECES)
        loads = [any(base <= at < base + size for base, size in pinned) for at in sources.tolist()]
        assert all(loads) or not any(loads)
        assert all(loads) or not final, "pages may still be computed when a store begins"
        for starts in (targets, sources):
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                assert all(start >= layer.end or start + size <= layer.address for layer in cache.layers)
    assert {final for *_, final in device.batches} == {False, True}
    assert sum(size for _, size in pinned) <= 2 * TRIAL_BYTES
    assert pinning.pinned == {}, "the memory is released"
    assert copier.pin_reports() == []
    assert len(device.streams) - streams <= 2 + 5, "streams are never destroyed"


def test_stores_never_let_the_driver_read_ahead() -> None:
    device, cache = DeferredDevice(), make_cache("mla")
    memory = bytes_of(4 * 3 * cache.row_bytes, 1)
    starts = memory.ctypes.data + np.arange(4) * 3 * cache.row_bytes
    request = CopyRequest(
        HostMemory(memory.ctypes.data, None), starts, 3 * cache.row_bytes, torch.arange(4), 0, 3, 0, device.mark(), pinned=True
    )
    way = BatchedCopy(device, cache, ahead=True)
    way.store(request)
    assert {final for *_, final in device.batches} == {False}
    device.batches.clear()
    way.load(request, lambda *_: None)
    assert {final for *_, final in device.batches} == {True}
    device.run_all()


def test_copies_after_calibration_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, best in enumerate(["staged", "batched", "batched_ahead", "direct"]):
        script = Script(speeds(**{f"load_{best}": 9e9})).install(monkeypatch)
        device = a_device(seed)
        copier = a_copier(device, "flash_nhd")
        early = bytes_of(12 * copier.shape.block_bytes, seed)
        guard = copier.mapped(memoryview(early))
        assert copier.wait_pinned(10)
        offsets = np.arange(4) * copier.shape.block_bytes
        under_way = copier.blocks(range(4, 8))
        under_way.read_arena(memoryview(early), offsets + 4 * copier.shape.block_bytes, 0, 0, 3)
        copier.calibrate(PATIENT_S, now_s=script.now_s)
        assert copier.choices["load"].strategy == best
        loaded = copier.blocks(range(4))
        loaded.read_arena(memoryview(early), offsets, 0, 0, 3)
        loaded.drain()
        under_way.drain()
        assert np.array_equal(block_bytes(copier.cache, range(8)).reshape(-1), early[: 8 * copier.shape.block_bytes])
        stored = copier.blocks(range(4))
        stored.write_arena(memoryview(early), offsets + 8 * copier.shape.block_bytes)
        stored.drain()
        assert np.array_equal(early[8 * copier.shape.block_bytes :], early[: 4 * copier.shape.block_bytes])
        assert guard.close()


# ---- without a measurement ----
@pytest.mark.parametrize("error", [Unsupported("no batches"), Internal("refused"), RuntimeError("CUDA error"), MemoryError()])
def test_strategy_that_fails_its_trial_is_not_used(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(speeds(load_direct=9e9, store_batched=9e9)).install(monkeypatch)
    script.errors = {("load", "direct"): error, ("store", "batched"): error}
    copier = a_copier(a_device())
    choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert (choices["load"].strategy, choices["store"].strategy) == ("batched", "staged")
    assert copier.stats()["device_trials_failed_total"] == 2
    assert script.begun.count(("load", "direct")) == 1, "not again"


def test_strategy_with_wrong_bytes_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(speeds(load_batched_ahead=9e9, store_staged=9e9)).install(monkeypatch)
    script.empty = {("load", "batched_ahead"), ("store", "staged")}
    copier = a_copier(a_device())
    choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert (choices["load"].strategy, choices["store"].strategy) == ("batched", "batched")
    assert sum("wrong bytes" in record.message for record in caplog.records) == 2


def test_calibration_with_all_trials_failed_follows_the_rule(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(SAME).install(monkeypatch)
    script.errors = dict.fromkeys(ALL, Internal("refused"))
    copier = a_copier(a_device())
    choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert {direction: choice.strategy for direction, choice in choices.items()} == {"load": "staged", "store": "staged"}
    stats = copier.stats()
    assert (stats["device_uncalibrated_total"], stats["device_trials_failed_total"]) == (2, len(ALL))
    assert sum("by rule" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("slow", [("load", "staged"), ("store", "batched")])
def test_calibration_out_of_time_follows_the_rule(slow: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(speeds()).install(monkeypatch)
    copier = a_copier(a_device())
    plan = plan_trial(3, copier.cache.row_bytes, 1)
    assert plan is not None
    largest = plan.blocks[-1] * copier.shape.block_bytes
    script.speeds[slow] = largest / 0.15
    choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    other: Direction = "store" if slow[0] == "load" else "load"
    assert choices[other].source == "measured", "each direction has its own time"
    late = choices[slow[0]]  # type: ignore[index]
    assert (late.source, late.gap) == ("rule", "too little time")
    assert late.strategy == ("direct" if slow[0] == "load" else "batched")
    assert script.now < 0.15 + trial_module.DIRECTION_S + 0.15 + 0.1
    assert copier.stats()["device_uncalibrated_total"] == 1


def test_calibration_without_time_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device = a_device()
    copier = a_copier(device)
    assert {choice.gap for choice in copier.calibrate(-1.0, now_s=script.now_s).values()} == {"too little time"}
    assert (script.begun, list(device.batches)) == ([], [])


def test_trial_copy_that_hangs_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "_CLOSE_S", 0.05)
    kept: list[object] = []
    monkeypatch.setattr(trial_module, "_kept", kept)
    device = a_device()
    copier = a_copier(device)
    device.paused = True
    choices = copier.calibrate(PATIENT_S, now_s=lambda: 2 * PATIENT_S if device.batches else 0.0)
    assert {choice.source for choice in choices.values()} == {"rule"}
    assert copier.stats()["device_trials_late_total"] == 1
    assert len(kept) == 1
    assert device.pinning.pinned, "a late copy still accesses the memory"  # type: ignore[union-attr]
    calls = device.pinning.calls  # type: ignore[union-attr]
    assert copier.calibrate(PATIENT_S)["load"].gap == "the device failed or hangs"
    assert device.pinning.calls == calls  # type: ignore[union-attr]
    with pytest.raises(Internal, match="must stay mapped"):
        copier.suspend(0.05)
    device.paused = False
    copier.suspend(10.0)
    copier.resume()
    assert not any(stream.work for stream in device.streams)


def test_calibration_on_failed_device_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "_CLOSE_S", 0.0)
    monkeypatch.setattr(trial_module, "_kept", [])
    for fault in ("record", "run", "mark"):
        device = a_device()
        copier = a_copier(device)

        def fails(*_: object) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with monkeypatch.context() as broken:
            broken.setattr(DeferredDevice if fault == "mark" else DeferredStream, fault, fails)
            choices = copier.calibrate()
        assert {choice.source for choice in choices.values()} == {"rule"}
        assert copier.stats()["device_uncalibrated_total"] == 2


@pytest.mark.parametrize("fault", ["pin refused", "no memory"])
def test_calibration_without_memory_follows_the_rule(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = a_device()
    copier = a_copier(device)
    with monkeypatch.context() as broken:
        if fault == "pin refused":
            device.pinning.refuse_from = 0  # type: ignore[union-attr]
        else:
            broken.setattr(trial_module, "_pages_like", lambda *_: torch.empty(1 << 60))
        choices = copier.calibrate()
    assert {choice.source for choice in choices.values()} == {"rule"}
    assert device.pinning.pinned == {}  # type: ignore[union-attr]
    assert not device.batches


def test_calibration_during_capture_waits_for_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device = a_device()
    device.pinning.captures = 3  # type: ignore[union-attr]
    copier = a_copier(device)
    assert {choice.source for choice in copier.calibrate(PATIENT_S, now_s=script.now_s).values()} == {"measured"}
    assert copier.stats()["device_pin_retries_total"] == 3


# ---- sleep ----
def test_calibration_while_asleep_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device = a_device()
    copier = a_copier(device)
    copier.suspend(1.0)
    assert {choice.gap for choice in copier.calibrate(PATIENT_S, now_s=script.now_s).values()} == {"the KV cache is asleep"}
    assert script.begun == []
    copier.resume()
    assert {choice.source for choice in copier.calibrate(PATIENT_S, now_s=script.now_s).values()} == {"measured"}


def test_sleep_waits_for_trial_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device = a_device()
    copier = a_copier(device)
    begun, slept = threading.Event(), threading.Event()
    copy = script.copy

    def slowly(*given: Any) -> None:
        begun.set()
        time.sleep(0.001)
        assert not slept.is_set(), "the memory may be unmapped"
        copy(*given)

    monkeypatch.setattr(script, "copy", slowly)
    calibrating = threading.Thread(target=copier.calibrate, args=(PATIENT_S,), kwargs={"now_s": script.now_s})
    calibrating.start()
    assert begun.wait(10)
    copier.suspend(PATIENT_S)
    slept.set()
    assert not any(stream.work for stream in device.streams)
    calibrating.join(PATIENT_S)
    assert copier.stats().get("device_trials_failed_total", 0) == 0
    assert {choice.source for choice in copier.choices.values()} == {"measured"}


# ---- when it is off ----
@pytest.mark.parametrize("strategy", ["staged", "batched", "direct"])
def test_fixed_strategy_is_not_calibrated(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SAME).install(monkeypatch)
    device = a_device()
    copier = a_copier(device, strategy=strategy)
    choices = copier.calibrate(PATIENT_S, now_s=script.now_s)
    assert {(choice.strategy, choice.source) for choice in choices.values()} == {(strategy, "fixed")}
    assert (script.begun, device.pinning.calls) == ([], 0)  # type: ignore[union-attr]
    assert "device_uncalibrated_total" not in copier.stats()


def test_host_memory_and_int8_are_not_calibrated() -> None:
    copiers = [
        DeviceCopier(make_cache("mla"), device=CpuDevice()),
        DeviceCopier(make_cache("mla"), device=DeferredDevice()),
        DeviceCopier(make_cache("mla"), device=DeferredDevice(0, FakePinning()), pin=False),
        DeviceCopier(make_cache("mla"), device=a_device(), int8=ANY_GROUPS),
    ]
    for copier, strategy in zip(copiers, ["batched", "batched", "batched", "staged"], strict=True):
        copier.calibrate()
        assert copier.strategy == strategy
        assert "device_uncalibrated_total" not in copier.stats()


def test_refused_batches_replace_only_batched_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(speeds(load_direct=9e9)).install(monkeypatch)
    device = a_device()
    copier = a_copier(device)
    copier.calibrate(PATIENT_S, now_s=script.now_s)
    memory = bytes_of(copier.shape.block_bytes, 1)
    guard = copier.mapped(memoryview(memory))
    assert copier.wait_pinned(10)
    device.batches_left = 0
    stored = copier.blocks([3])
    stored.write_arena(memoryview(memory), np.zeros(1, np.int64))
    stored.drain()
    assert np.array_equal(memory, block_bytes(copier.cache, [3]).reshape(-1))
    assert (copier.strategy, copier.stats()["device_batch_refused_total"]) == ("direct/staged", 1)
    assert guard.close()


# ---- vLLM's pages ----
def test_groups_of_one_shape_share_their_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(speeds(load_staged=9e9)).install(monkeypatch)
    groups = [[torch.zeros(6, 2, 4, 8) for _ in range(3)] for _ in range(2)] + [[torch.zeros(6, 2, 4, 16)]]
    device = a_device()
    calibrate = DeviceCopier.calibrate
    monkeypatch.setattr(DeviceCopier, "calibrate", lambda self, _, **how: calibrate(self, PATIENT_S, now_s=script.now_s, **how))
    pages = device_pages(groups, 6, device, strategy="auto", staging_bytes=1 << 20, checksums=False, gds="off")
    assert script.begun.count(("load", "staged")) == 2 * (1 + len(PIECES) * REPEATS)
    for group in pages:
        rates = group.copy_rates()
        assert [(rate.direction, rate.strategy) for rate in rates if rate.in_use] == [("load", "staged"), ("store", "batched")]
        assert {(rate.direction, rate.strategy) for rate in rates} == set(ALL)
        assert all(rate.bytes_per_second > 0 for rate in rates)
        assert group.counts()["device_uncalibrated"] == 0
