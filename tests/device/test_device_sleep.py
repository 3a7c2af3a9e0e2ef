"""Sleep mode of vLLM: the KV cache is unmapped only when no copy accesses it. A scripted allocator replaces vLLM's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import make_cache
from deferred import ComputingDevice, DeferredDevice, DeferredStream, FakePinning, bytes_of
from hypothesis import given
from hypothesis import strategies as st
from late_engine import Engine

from kvclient import InvalidArgument
from kvclient.device.copier import DeviceCopier
from kvclient.engines.vllm.plan import StepPlan
from kvclient.engines.vllm.worker import sleep_mode
from kvclient.engines.vllm.worker.sleep_mode import guard_sleep, may_sleep
from kvstore.core.errors import Internal
from kvstore.embedded.cluster import LocalCluster, NodeSpec

FIRST, OTHER = [1, 2, 3, 4, 5], [6, 7, 8]
numbers = itertools.count()


class Allocator:
    """vLLM's allocator: unmaps and maps the KV cache; fails the test if copies could access it in between."""

    def __init__(self, device: DeferredDevice) -> None:
        self.device = device
        self.mapped = True
        self.calls: list[object] = []

    def sleep(self, offload_tags: tuple[str, ...] = ()) -> None:
        self.calls.append(("sleep", offload_tags))
        self._unmap()

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))
        if "kv_cache" in tags:
            self._unmap()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))
        if tags is None or "kv_cache" in tags:
            assert not any(stream.work for stream in self.device.streams), "copies began while the KV cache was unmapped"
            self.mapped = True

    def _unmap(self) -> None:
        assert not any(stream.work for stream in self.device.streams), "copies under way into memory that is unmapped"
        self.mapped = False


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=32 << 20, settings=(("prefault", "true"),))]) as cluster:
        yield cluster


@pytest.fixture
def engine_on(cluster: LocalCluster) -> Iterator[Callable[[DeferredDevice], Engine]]:
    made: list[Engine] = []

    def make(device: DeferredDevice) -> Engine:
        made.append(Engine(cluster, f"s{next(numbers)}", device))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_sleep_with_copies_under_way_waits_for_them(engine_on: Callable[[DeferredDevice], Engine], seed: int) -> None:
    device = ComputingDevice(seed)
    engine = engine_on(device)
    allocator = Allocator(device)
    restore = guard_sleep(allocator, engine.side)
    engine.step([3, 4, 5, 6, 7], FIRST, save=True)
    assert engine.stored() == set()
    job = engine.job([10, 11, 12, 13, 14], FIRST, layerwise=False)

    engine.side.begin_loads(StepPlan(chain=engine.chain, loads=[job]))
    engine.step([8, 9, 15], OTHER, save=True)
    device.run_all() if seed == 1 else None
    while device.compute.work:  # vLLM waits for its own stream before it sleeps
        device.step()
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(["weights"])
    assert not allocator.mapped

    engine.side.begin_loads(StepPlan(chain=engine.chain, loads=[engine.job([16, 17], FIRST[:2], layerwise=True)]))
    engine.step([3], OTHER[:1], save=True) if seed == 2 else None
    while device.compute.work:
        device.compute.work.popleft()  # what a sleeping engine does not compute
    engine.side.end_forward(StepPlan(chain=engine.chain))
    assert engine.side.take_completions(StepPlan(has_tokens=True), set()).missing >= {16, 17}
    allocator.wake_up()

    assert allocator.mapped
    engine.step([3, 4, 5, 6, 7], FIRST)
    assert engine.load([10, 11, 12, 13, 14], FIRST) == set(), "after it woke, the engine loads again"
    engine.step([20, 21, 22], [41, 42, 43], save=True)
    jobs = 4 if seed == 2 else 3
    failed = engine.stored(jobs - 1)
    assert jobs not in failed
    assert seed != 2 or 3 in failed, "the store of a step without pages"
    assert engine.settled() == []
    assert engine.side.counters.totals()["device_sleeps"] == 1
    restore()
    assert allocator.sleep.__func__ is Allocator.sleep  # type: ignore[attr-defined]


def test_sleep_with_hung_copies_fails_and_changes_nothing(
    engine_on: Callable[[DeferredDevice], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeferredDevice(1)
    engine = engine_on(device)
    allocator = Allocator(device)
    guard_sleep(allocator, engine.side)
    engine.step([3, 4, 5, 6, 7], FIRST, save=True)
    assert engine.stored() == set()
    monkeypatch.setattr(sleep_mode, "SUSPEND_S", 0.05)
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 60.0)
    buffer = engine.pages[0].buffer([3, 4], engine.pages[0].mark())
    arena = bytes_of(2 * engine.pages[0].shape.block_bytes, 1)
    device.paused = True
    buffer.write_arena(memoryview(arena), np.array([0, engine.pages[0].shape.block_bytes]))  # type: ignore[attr-defined]
    with pytest.raises(Internal, match="must stay mapped"):
        allocator.sleep()
    assert (allocator.mapped, allocator.calls) == (True, [])
    device.paused = False
    buffer.drain()  # type: ignore[attr-defined]
    assert engine.load([10, 11, 12, 13, 14], FIRST) == set()
    allocator.sleep()
    assert not allocator.mapped


@given(
    calls=st.lists(
        st.one_of(
            st.just(("sleep", None)),
            st.tuples(st.just("discard"), st.sampled_from([("kv_cache",), ("weights",), ("kv_cache", "weights")])),
            st.tuples(st.just("wake_up"), st.sampled_from([None, ["kv_cache"], ["weights"]])),
        ),
        max_size=8,
    ),
)
def test_pages_accept_copies_only_while_mapped(calls: list[tuple[str, Any]]) -> None:
    """Model: copies are accepted exactly while the allocator has the KV cache mapped."""
    device = DeferredDevice(3)
    copier = DeviceCopier(make_cache("mla"), device=device)
    allocator = Allocator(device)
    guard_sleep(allocator, copier)
    for name, tags in calls:
        getattr(allocator, name)(*([] if name == "sleep" else [tags]))
        blocks = copier.blocks([0, 1])
        if allocator.mapped:
            assert len(blocks.gather()) == 2
        else:
            with pytest.raises(Internal, match="asleep"):
                blocks.gather()
            copier.clear([0])
            assert not any(stream.work for stream in device.streams)


def test_suspend_waits_for_a_rejected_strategy() -> None:
    device = DeferredDevice(2, FakePinning())
    device.batches_left = 1
    copier = DeviceCopier(make_cache("mla"), strategy="batched", device=device)
    memory = bytes_of(4 * copier.shape.block_bytes, 1)
    arena = memoryview(memory)
    guard = copier.mapped(arena)
    assert copier.wait_pinned(10)
    blocks = copier.blocks([0, 1])
    for _ in range(2):  # the second goes another way
        blocks.write_arena(arena, np.array([0, 1]) * copier.shape.block_bytes)
    assert copier.strategy == "staged"
    copier.suspend(10)
    assert not any(stream.work for stream in device.streams)
    copier.resume()
    blocks.drain()
    assert guard.close()


def test_suspend_with_a_hung_driver_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is inside the driver, so its copies are not enqueued yet: the memory must stay mapped."""
    device = DeferredDevice(2)
    copier = DeviceCopier(make_cache("mla"), device=device)
    entered, go_on = threading.Event(), threading.Event()
    run = DeferredStream.run

    def hold(stream: DeferredStream, work: Callable[[], None]) -> None:
        entered.set()
        assert go_on.wait(30)
        run(stream, work)

    monkeypatch.setattr(DeferredStream, "run", hold)
    with ThreadPoolExecutor(1) as threads:
        rows = threads.submit(copier.blocks([0, 1]).gather)
        try:
            assert entered.wait(30)
            with pytest.raises(Internal, match="must stay mapped"):
                copier.suspend(0.05)
        finally:
            go_on.set()
        assert len(rows.result()) == 2
    copier.suspend(10)
    assert not any(stream.work for stream in device.streams)


def test_sleep_mode_that_cannot_be_guarded_is_refused() -> None:
    assert not may_sleep(SimpleNamespace())
    assert not may_sleep(SimpleNamespace(enable_sleep_mode=False, sleep_mode_backend="criu"))
    assert may_sleep(SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem"))
    assert may_sleep(SimpleNamespace(enable_cumem_allocator=True))
    with pytest.raises(InvalidArgument, match="sleep mode"):
        may_sleep(SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="criu"))
    sleeper = DeviceCopier(make_cache("mla"), device=DeferredDevice())
    with pytest.raises(InvalidArgument, match="missing=discard"):
        guard_sleep(SimpleNamespace(sleep=len, wake_up=len), sleeper)
