"""vLLM's pages on a device: rejected layouts, and failed loads and stores. See ``late_engine``."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from caches import ANY_GROUPS
from deferred import ComputingDevice, DeferredDevice, DeferredEvent, FakePinning
from late_engine import LAYERS, NAMES, Engine

from kvclient import CacheSpec, InvalidArgument
from kvclient.device import copier as copier_module
from kvclient.device.blocks import DeviceBlocks
from kvclient.device.copier import DeviceCopier
from kvclient.device.copy_strategies import StagedCopy
from kvclient.device.int8 import Int8Codec
from kvclient.device.pins.pinned_range import PinnedRange
from kvclient.device.streams import CpuDevice
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.namespaces import GroupFacts, group_spec
from kvclient.engines.vllm.memory.device_pages import device_pages, make_pages
from kvclient.engines.vllm.memory.int8_groups import int8_groups
from kvclient.engines.vllm.memory.pages import GroupPages
from kvclient.engines.vllm.pd.plan import SendJob
from kvclient.engines.vllm.pd.sender import Sender
from kvclient.engines.vllm.plan import StepPlan, WorkerOutput
from kvstore.core.errors import Internal
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

FIRST, OTHER = [1, 2, 3, 4, 5], [9, 10, 11, 12, 13]
PAGES = [10, 11, 12, 13, 14]
numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=32 << 20, settings=(("prefault", "true"),))]) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: LocalCluster) -> Iterator[Callable[..., Engine]]:
    """Makes an engine that has stored the first blocks."""
    made: list[Engine] = []

    def with_blocks(device: DeferredDevice, **how: Any) -> Engine:
        engine = Engine(cluster, f"f{next(numbers)}", device, **how)
        made.append(engine)
        engine.step([3, 4, 5, 6, 7], FIRST, save=True)
        assert engine.stored() == set()
        return engine

    yield with_blocks
    for engine in made:
        engine.close()


# ---- layouts ----
def laid_out(
    layout: str, dtype: torch.dtype, *, layers: int = 3, blocks: int = 6, heads: int = 2, tokens: int = 4, content: int = 8
) -> list[torch.Tensor]:
    """Tensors in vLLM's layout: ``[B, H, N, C]`` per layer, contiguous."""
    axes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": content}
    memory = torch.randint(0, 100, [axes[axis] for axis in layout], dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    memory = memory.repeat_interleave(dtype.itemsize, dim=-1).view(dtype)
    whole = memory.permute(*(layout.index(axis) for axis in "LBHNC"))
    return list(whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_device_blocks_match_host_blocks(layout: str, dtype: torch.dtype) -> None:
    """The bytes must have the same order, because both kinds share one namespace."""
    layers = laid_out(layout, dtype)
    (pages,) = device_pages([layers], 6, CpuDevice(), strategy="staged", staging_bytes=1 << 20)
    host = GroupPages(layers, 6)
    assert pages.shape == host.shape
    wanted = [b"".join(bytes(piece) for piece in host.buffer([4, 1, 0]).segments(at, 0, LAYERS)) for at in range(3)]
    blocks = pages.buffer([4, 1, 0])
    assert isinstance(blocks, DeviceBlocks)
    assert [row.tobytes() for row in blocks.gather()] == wanted


def test_kernel_pages_smaller_than_blocks_are_copied_whole() -> None:
    layers = laid_out("LBNHC", torch.float32, blocks=12)
    (pages,) = device_pages([layers], 6, CpuDevice(), strategy="batched", staging_bytes=1 << 20)
    host = GroupPages(layers, 6)
    blocks = pages.buffer([4, 0])
    assert isinstance(blocks, DeviceBlocks)
    for at, row in enumerate(blocks.gather()):
        assert row.tobytes() == b"".join(bytes(piece) for piece in host.buffer([4, 0]).segments(at, 0, LAYERS))


@pytest.mark.parametrize(
    ("layout", "blocks"), [("LBNHC", 6), ("LBHNC", 6), ("BLHNC", 6), ("BLNHC", 6), ("LBNHC", 12), ("LBHNC", 12)]
)
def test_int8_keys_and_values_have_own_scales_in_all_layouts(layout: str, blocks: int) -> None:
    """Pages of the kernel's may be smaller than blocks. Equal keys of a channel and equal values of a token come back exactly."""
    layers = laid_out(layout, torch.bfloat16, blocks=blocks, tokens=32, content=32)
    for layer in layers:
        layer[..., :16] = torch.randn(blocks, 2, 2, 1, 16).exp2().expand(-1, -1, -1, 16, -1).flatten(2, 3) * 2.0 ** torch.arange(
            16
        )
        layer[..., 16:] = torch.randn(blocks, 2, 32, 1).exp2() * 2.0 ** torch.arange(32).view(-1, 1)
    before = [layer.clone() for layer in layers]
    groups = [int8_groups(layers[0], "full", "FLASH_ATTN", "device")]
    (pages,) = device_pages([layers], 6, DeferredDevice(3), strategy="auto", staging_bytes=64, int8=groups)
    assert all(torch.equal(layer, was) for layer, was in zip(layers, before, strict=True)), "changed by the test of copies"
    source = pages.buffer([4, 1, 0])
    assert isinstance(source, DeviceBlocks)
    coded = source.gather()
    for layer in layers:
        layer.zero_()
    size, each = pages.shape.block_bytes, blocks // 6
    target = pages.buffer([4, 1, 0])
    assert isinstance(target, DeviceBlocks)
    target.read_arena(memoryview(coded.reshape(-1)), np.arange(3) * size, 0, 0, LAYERS)
    target.drain()
    for layer, was in zip(layers, before, strict=True):
        for block in (4, 1, 0):
            assert torch.equal(layer[block * each : (block + 1) * each], was[block * each : (block + 1) * each])


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layout_with_divided_pages_is_rejected(layout: str) -> None:
    with pytest.raises(InvalidArgument, match="not supported"):
        device_pages([laid_out(layout, torch.float32)], 6, CpuDevice(), strategy="staged", staging_bytes=1 << 20)


@pytest.mark.parametrize(
    "layers",
    [
        [torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8, dtype=torch.bfloat16)],
        [torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 4)],
        [torch.zeros(5, 2, 4, 8)],
        [torch.zeros(2, 6, 4, 2, 8)],
    ],
    ids=["dtypes", "sizes", "blocks", "keys and values apart"],
)
def test_layers_of_different_shape_are_rejected(layers: list[torch.Tensor]) -> None:
    with pytest.raises(InvalidArgument, match="supported"):
        device_pages([layers], 6, CpuDevice(), strategy="staged", staging_bytes=1 << 20)


def test_memory_of_other_device_types_is_rejected() -> None:
    for groups in ([[torch.zeros(6, 4, device="meta")]], [[torch.zeros(6, 4)], [torch.zeros(6, 4, device="meta")]]):
        with pytest.raises(InvalidArgument, match="use a CPU, or one CUDA device"):
            make_pages(groups, 6, strategy="auto", staging_bytes=1)
    assert isinstance(make_pages([[torch.zeros(6, 4)]], 6, strategy="auto", staging_bytes=1)[0], GroupPages)


# ---- checks at start ----
def test_wrong_copies_are_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = laid_out("LBNHC", torch.bfloat16)
    before = [layer.clone() for layer in layers]
    for strategy in ("staged", "batched"):
        device_pages([layers], 6, DeferredDevice(3), strategy=strategy, staging_bytes=64)  # type: ignore[arg-type]
        assert all(torch.equal(layer, was) for layer, was in zip(layers, before, strict=True)), "as they were"
    device = DeferredDevice(3)
    with monkeypatch.context() as wrong:
        wrong.setattr(StagedCopy, "_scatter", lambda *_: None)
        with pytest.raises(Internal, match="wrong bytes"):
            device_pages([layers], 6, device, strategy="staged", staging_bytes=64)
    with monkeypatch.context() as wrong:  # only on the path of unpinned memory
        wrong.setattr(DeviceBlocks, "host_copy_ready", lambda *_: None)
        with pytest.raises(Internal, match="wrong bytes"):
            device_pages([layers], 6, device, strategy="batched", staging_bytes=64)
    with monkeypatch.context() as wrong:
        wrong.setattr(DeviceBlocks, "gather", lambda blocks: np.zeros((blocks.count, blocks.shape.block_bytes), np.uint8))
        with pytest.raises(Internal, match="wrong bytes"):
            device_pages([layers], 6, device, strategy="batched", staging_bytes=64)
    device.fail_after = 0
    with pytest.raises(Internal, match="failed"):
        device_pages([layers], 6, device, strategy="staged", staging_bytes=64)
    assert all(torch.equal(layer, was) for layer, was in zip(layers, before, strict=True))


def test_namespace_of_other_blocks_is_rejected() -> None:
    (pages,) = device_pages([laid_out("LBNHC", torch.bfloat16)], 6, CpuDevice(), strategy="auto", staging_bytes=64)
    size = pages.shape.layer_block_bytes
    right = CacheSpec(model="m", block_tokens=4, layers=3, layer_block_bytes=size, dtype="bfloat16", layout="vllm=1")
    watcher = pages.watcher(right)
    assert watcher is not None
    watcher.check(replace(right, weights_epoch="other"))
    for wrong in (replace(right, layout="vllm=2"), replace(right, dtype="float16"), replace(right, layout_version=7)):
        with pytest.raises(InvalidArgument):
            watcher.check(wrong)
    for wrong in (replace(right, layers=2), replace(right, layer_block_bytes=size * 2)):
        with pytest.raises(InvalidArgument):
            pages.watcher(wrong)


def test_int8_pages_are_tested_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = laid_out("LBNHC", torch.bfloat16, tokens=16, content=32)
    monkeypatch.setattr(Int8Codec, "decode", lambda _, coded: torch.zeros(len(coded), 2048, dtype=torch.uint8))
    with pytest.raises(Internal, match="wrong bytes"):
        device_pages([layers], 6, CpuDevice(), strategy="auto", staging_bytes=64, int8=[ANY_GROUPS])


def test_int8_namespace_must_name_the_encoding() -> None:
    layers = laid_out("LBNHC", torch.bfloat16, tokens=16, content=32)
    (pages,) = make_pages([layers], 6, strategy="auto", staging_bytes=64, int8=[ANY_GROUPS])
    assert pages.codec_name == "int8-bfloat16-8-8x1-8x1"
    size = pages.shape.layer_block_bytes
    facts = GroupFacts("m", "d", "bfloat16", 16, ("a", "b", "c"), size, (2, 16, 32), "full", "FLASH_ATTN", "device", "0.32")
    coded = group_spec(HookOptions(), replace(facts, codec=pages.codec_name))
    watcher = pages.watcher(coded)
    assert watcher is not None
    watcher.check(coded)
    plain = group_spec(HookOptions(), facts)
    others = [plain, group_spec(HookOptions(), replace(facts, codec="int8-float16-8-8x1-8x1")), replace(coded, dtype="bfloat16")]
    assert len({spec.namespace for spec in [coded, *others]}) == 4
    for wrong in others:
        with pytest.raises(InvalidArgument):
            pages.watcher(wrong)


@pytest.mark.parametrize("late", [False, True])
def test_worker_start_waits_for_pinned_arena(late: bool, cluster: LocalCluster) -> None:
    go_on = threading.Event()
    pinning = FakePinning()

    def hold(call: int) -> None:
        if call > 1:  # the first pin is that of the memory for test copies
            go_on.wait(30.0 if late else 0.3)

    pinning.before_pin = hold
    device = ComputingDevice(1)
    device.pinning = pinning
    engine = Engine(cluster, f"f{next(numbers)}", device, pin_wait_s=0.05 if late else 30.0)
    try:
        engine.side.wait_pinned()
        copier = engine.pages[0].watcher(engine.spec)
        assert isinstance(copier, DeviceCopier)
        assert [report.done for report in copier.pin_reports()] == [not late]
        assert engine.side.counters.totals().get("device_pinned_late", 0) == late
    finally:
        go_on.set()
        engine.close()


def test_pins_pause_only_after_the_start(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test copies at the start wait for pins too, and the engine serves nothing yet."""
    paused: list[int] = []
    serve = PinnedRange.serve

    def note(pins: PinnedRange) -> None:
        paused.append(pins.nbytes)
        serve(pins)

    monkeypatch.setattr(PinnedRange, "serve", note)
    device = ComputingDevice(1)
    device.pinning = FakePinning()
    engine = Engine(cluster, f"f{next(numbers)}", device)
    try:
        assert paused == []
        engine.side.wait_pinned()
        assert len(paused) == 1
    finally:
        engine.close()


# ---- while it runs ----
def test_device_rejecting_copies_is_a_miss(make: Callable[..., Engine]) -> None:
    engine = make(ComputingDevice(1))
    engine.device.fail_after = 1
    engine.step(PAGES, OTHER)
    assert engine.load(PAGES, FIRST) == set(PAGES)
    engine.step([3, 4], OTHER[:2], save=True)
    assert engine.stored() == {2}
    engine.device.fail_after = None
    assert engine.settled() == []
    assert all(not layer[PAGES].any() for layer in engine.layers), "what was there is nobody's"
    engine.side.count_device_copies()
    assert engine.side.counters.totals()["device_errors"] >= 2
    assert engine.load(PAGES, FIRST) == set()
    assert engine.settled() == []


def test_no_memory_for_staging_is_a_miss(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(ComputingDevice(1))

    def no_space(_: StagedCopy) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as full:
        full.setattr(StagedCopy, "_slot", no_space)
        assert engine.load(PAGES, FIRST) == set(PAGES)
    assert engine.load(PAGES, FIRST) == set()
    assert engine.settled() == []


@pytest.mark.parametrize("fenced", [True, False])
def test_late_copies_are_never_visible(fenced: bool, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A load's copies do not end in time: other requests reuse its pages, and compute after the late copies."""
    engine = make(ComputingDevice(1, "compute"))
    monkeypatch.setattr(copier_module, "COMPUTE_S", 0.2)
    job = engine.job(PAGES, FIRST, layerwise=False)
    if not fenced:
        monkeypatch.setattr(ComputingDevice, "wait_event", lambda *_: None)
    engine.device.paused = True
    assert engine.load(PAGES, FIRST, job) == set(PAGES)
    engine.step(PAGES, OTHER)
    for layer in range(LAYERS):
        engine.attend(PAGES, OTHER, layer)
    engine.device.paused = False
    engine.device.run_all()
    for layer in range(LAYERS):
        engine.attend(PAGES, OTHER, layer)
    assert (engine.settled() == []) == fenced
    engine.side.count_device_copies()
    assert engine.side.counters.totals()["device_lost"] == 1


class NapTime:
    """Time that passes with each nap of the copier: a busy machine makes naps longer, not copies later.

    Attributes:
        ends_at: nap at which the computation ends.
    """

    def __init__(self, computes: DeferredEvent, ends_at: float) -> None:
        self._computes = computes
        self.ends_at = ends_at
        self.naps = 0

    def monotonic(self) -> float:
        return self.naps

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.naps += 1
        if self.naps >= self.ends_at:
            self._computes.reached = True


@pytest.mark.parametrize("ends", [True, False])
def test_long_computation_keeps_the_device(ends: bool, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of copies begins after the work that they wait for, which has a separate timeout."""
    engine = make(ComputingDevice(1))
    computes = DeferredEvent(engine.device)
    monkeypatch.setattr(copier_module, "time", NapTime(computes, ends_at=8_000 if ends else math.inf))
    monkeypatch.setattr(copier_module, "DRAIN_S", 4_000)
    monkeypatch.setattr(copier_module, "COMPUTE_S", math.inf if ends else 6_000)
    job = engine.job(PAGES, FIRST, layerwise=False)
    engine.device.compute.wait(computes)  # type: ignore[attr-defined]
    assert engine.load(PAGES, FIRST, job) == (set() if ends else set(PAGES))
    computes.reached = True
    assert engine.load(PAGES, FIRST) == (set() if ends else set(PAGES))
    engine.settled()
    engine.side.count_device_copies()
    assert engine.side.counters.totals().get("device_lost", 0) == (0 if ends else 1)


def test_aborted_request_pages_are_freed_after_copies(make: Callable[..., Engine]) -> None:
    engine = make(ComputingDevice(1, "compute"))
    job = engine.job(PAGES, FIRST, layerwise=False)
    engine.device.paused = True
    engine.side.begin_loads(StepPlan(chain=engine.chain, loads=[job]))
    copies = [stream for stream in engine.device.streams if stream is not engine.device.compute]  # type: ignore[attr-defined]
    wait_until(lambda: any(stream.work for stream in copies), "copies are on their way")
    assert not engine.side.take_completions(StepPlan(has_tokens=True), {"r"}).received, "given up, and still written to"
    engine.device.paused = False
    wait_until(lambda: bool(engine.side.take_completions(StepPlan(has_tokens=True), set()).received), "the load ends")
    engine.step(PAGES, OTHER)
    engine.device.run_all()
    for layer in range(LAYERS):
        engine.attend(PAGES, OTHER, layer)
    assert engine.settled() == []


@pytest.mark.parametrize("closed", [False, True], ids=["marked", "at the end"])
def test_handoff_with_failed_device_ends(closed: bool, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The handoff waits for the end of the step, and a device failure must not block the engine's thread."""
    engine = make(ComputingDevice(1))
    sends = Sender(engine.pages, engine.side.layer_positions, 600.0, engine.side.counters)
    sends.begin([SendJob(1, "n", 0, None, engine.keys(FIRST), False, [PAGES])], engine.chain, engine.side.clients)

    def failed(_: ComputingDevice) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ComputingDevice, "mark", failed)
    with pytest.raises(RuntimeError, match="CUDA") if not closed else nullcontext():
        sends.end_step(good=not closed)
    sends.close()
    assert sends.take() == WorkerOutput({1: 1}, {1})


def test_handoff_with_hung_step_is_abandoned(make: Callable[..., Engine]) -> None:
    engine = make(ComputingDevice(1))
    sends = Sender(engine.pages, engine.side.layer_positions, 0.2, engine.side.counters)
    sends.begin([SendJob(1, "n", 0, None, engine.keys(FIRST), False, [PAGES])], engine.chain, engine.side.clients)
    answers = WorkerOutput()
    wait_until(lambda: bool(answers.merge(sends.take()) or answers.stores_done), "the handoff is given up")
    assert answers.stores_failed == {1}
    sends.layer(NAMES[0])  # like a step that ends late
    sends.end_step(good=True)
    sends.close()
    assert sends.take() == WorkerOutput()


def test_layer_without_wait_fails_the_load(make: Callable[..., Engine]) -> None:
    """A step that runs a captured graph never calls ``wait_layer``."""
    engine = make(ComputingDevice(1))
    job = engine.job(PAGES, FIRST, layerwise=True)
    engine.side.begin_loads(StepPlan(chain=engine.chain, loads=[job], has_tokens=True))
    for name in NAMES[1:]:
        engine.side.wait_layer(name)
    engine.side.end_forward(StepPlan(has_tokens=True))
    assert engine.side.step_failed
    assert engine.side.take_completions(StepPlan(has_tokens=True), set()).missing == set(PAGES)
    assert engine.side.counters.totals()["bugs"] == 1
    engine.device.run_all()
    assert all(not np.any(layer[PAGES].numpy()) for layer in engine.layers)
