"""Reads from NVMe into the landing ring of a late device, verified there, and copied into pages."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("triton", reason="Triton is not installed: landing rings are NOT tested here")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported

from caches import ANY_GROUPS
from deferred import ComputingDevice, DeferredEvent
from landing_bed import BLOCKS, PAGES, SPEC, Engine, Volume, hash_quickly
from late_engine import Engine as LateEngine

from kvclient import InvalidArgument, Tier
from kvclient.device.copier import DeviceCopier
from kvclient.device.layouts import PagedCache
from kvclient.gds.landing_ring import LandingRing
from kvclient.gds.ring_slots import RingSlots
from kvstore.core.buffers import DenseBlocks
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.tiers.io_engines.tensor_memory import TensorMemory
from kvstore.tiers.nvme.mounted import MountedSlab
from samples import sample
from support.client_parts import session_of
from support.node_stats import evict
from support.stub_cases import run_stub_cases
from support.wait import wait_until

HERE = Path(__file__).parent
ORDERS = 240


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    volume = Volume(tmp_path_factory.mktemp("volume"))
    yield volume
    volume.slab.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hash_quickly(monkeypatch)


@pytest.fixture
def engine_of(volume: Volume) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(seed: int = 1, *, ready: bool = True, **choices: Any) -> Engine:
        made.append(Engine(volume, seed, **choices))
        if ready:
            made[-1].wait_ready()
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class SlotMachine(RuleBasedStateMachine):
    """No slot has two holders, and no more slots exist than the ring has."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = RingSlots(5)
        self.held: list[list[int]] = []

    @rule(most=st.integers(1, 7))
    def take(self, most: int) -> None:
        free = self.slots.free
        taken = self.slots.take(most, 0.0)
        assert len(taken) == min(most, free)
        if taken:
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.slots.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def each_slot_has_one_place(self) -> None:
        held = [slot for slots in self.held for slot in slots]
        assert len(set(held)) == len(held) == self.slots.count - self.slots.free


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=20, stateful_step_count=20)


# ---- any order, any fault ----
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(sample(24, ORDERS)))
def test_landing_any_order_brings_no_wrong_byte(
    volume: Volume, engine_of: Callable[..., Engine], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads at once over a small ring, with damaged slots, slots of other blocks, late and failed reads."""
    rng = random.Random(seed)
    engine = engine_of(seed, slots=rng.randint(1, 6))
    slots = list(volume.slots)
    flips: list[tuple[int, int]] = []
    faults = sorted(rng.sample(range(BLOCKS), rng.choice([0, 0, 1, 2])))
    for at in faults:
        kind = rng.choice(["header", "payload", "other block", "generation"])
        if kind in ("header", "payload"):
            flips.append((at, 12 if kind == "header" else 4096 + rng.randrange(volume.bytes.shape[1])))
        elif kind == "other block":
            slots[at] = volume.slots[at - 1]
        else:
            slots[at] = slots[at]._replace(generation=slots[at].generation + 1)
    trouble, released, read = rng.choice(["none", "none", "none", "late", "vanishes"]), threading.Event(), MountedSlab.read_device
    calls = iter(range(1000))
    when = rng.randrange(3)

    def troubled(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        if next(calls) == when and trouble != "none":
            if trouble == "vanishes":
                raise OSError("the volume has vanished")
            assert released.wait(30.0)
        return read(self, *wanted, **choices)

    for flip in flips:
        volume.flip(*flip)
    try:
        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
            patch.setattr(MountedSlab, "read_device", troubled)
            pages = rng.sample(range(PAGES), 2 * BLOCKS)
            loads = [
                threads.submit(engine.fetch, half, slots, seconds=0.3 if trouble == "late" else 30.0)
                for half in (pages[:BLOCKS], pages[BLOCKS:])
            ]
            good = [load.result() for load in loads]
            released.set()
    finally:
        for flip in flips:
            volume.flip(*flip)
    most = faults[0] if faults else BLOCKS
    assert max(good) <= most
    if trouble == "none" and not faults:  # after a miss, the volume is opened again, and a load beside it is left to the node
        assert good == [most, most]
    wait_until(lambda: engine.ring.slots.free == engine.ring.slots.count)
    assert engine.count("device_gds_blocks_total") == sum(good)
    assert engine.count("device_gds_failed_blocks_total") == 2 * BLOCKS - sum(good)


# ---- cost ----
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("slots", "fillings"), [(1, 12), (4, 3), (5, 3), (12, 1)])
@pytest.mark.parametrize("verify", [False, True])
def test_landing_costs_two_launches_per_filling(
    engine_of: Callable[..., Engine], slots: int, fillings: int, verify: bool
) -> None:
    """One hashes the slots, one scatters them; the third piece of work uploads numbers. Verified copies are hashed once more."""
    engine = engine_of(slots=slots)
    before = sum(stream.launches for stream in engine.device.streams)
    assert engine.fetch(range(BLOCKS), verify=verify) == BLOCKS
    assert sum(stream.launches for stream in engine.device.streams) - before == fillings * (4 if verify else 3)


@pytest.mark.parametrize(("mib", "launches"), [(64, 64), (128, 32)])
def test_landing_launches_for_1000_blocks_of_llama(mib: int, launches: int) -> None:
    """As documented: two per filling (counted in the test above), for 16 tokens of Llama-3-8B."""
    layers = torch.empty((32, 1, 64 << 10), dtype=torch.uint8).unbind(0)
    with LandingRing(DeviceCopier(PagedCache(list(layers))), gds="off", ring_bytes=mib << 20) as ring:
        assert 2 * -(-1000 // ring.slots.count) == launches


# ---- single faults ----
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("verify", [False, True])
def test_landing_flip_on_the_way_is_found_on_device(
    engine_of: Callable[..., Engine], verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Header and disk are sound; only the bytes in device memory are wrong."""
    engine = engine_of(slots=5)
    fill = TensorMemory.fill
    calls = iter(range(100))

    def flipped(self: TensorMemory, source: memoryview) -> None:
        content = bytearray(source)
        if next(calls) == 7:
            content[300] ^= 1
        fill(self, memoryview(content))

    with monkeypatch.context() as patch:
        patch.setattr(TensorMemory, "fill", flipped)
        good = engine.fetch(range(BLOCKS), verify=verify)
    assert good < BLOCKS
    assert engine.count("device_gds_corrupt_blocks_total") == 1
    assert engine.fetch(range(BLOCKS), verify=verify) == BLOCKS
    assert engine.ring.slots.free == 5


@pytest.mark.usefixtures("quick")
def test_landing_flip_in_pages_is_found_by_verify(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    from landing_bed import QuickScatter, TorchScatter

    engine = engine_of(slots=BLOCKS)

    def changed(self: QuickScatter, *given: Any, **choices: Any) -> None:
        TorchScatter(engine.cache).move_slots(*given, **choices)
        engine.cache.layers[1].tensor[0, 5, 0, 0, 0] += 1

    monkeypatch.setattr(QuickScatter, "move_slots", changed, raising=False)
    assert engine.fetch(range(BLOCKS), verify=True) == 5


@pytest.mark.usefixtures("quick")
def test_landing_late_read_keeps_its_slots(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a read that is late are not read into again before it ends. Until then the node reads."""
    release, read = threading.Event(), MountedSlab.read_device

    def late(self: MountedSlab, *wanted: Any, **choices: Any) -> Any:
        assert release.wait(30.0)
        return read(self, *wanted, **choices)

    engine = engine_of(slots=3)
    with monkeypatch.context() as patch:
        patch.setattr(MountedSlab, "read_device", late)
        assert engine.fetch(range(BLOCKS), seconds=0.3) == 0
        assert engine.ring.slots.free == 0
        assert not engine.reader.reads_disks(engine.volume.stored)
        assert engine.fetch(range(BLOCKS), seconds=0.2) == 0
        assert engine.count("device_gds_busy_total") == 1
        release.set()
        wait_until(lambda: engine.ring.slots.free == 3)
    engine.wait_ready()
    assert engine.fetch(range(BLOCKS)) == BLOCKS


@pytest.mark.usefixtures("quick")
def test_landing_vanished_volume_is_left_to_the_node(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("gone")

    engine = engine_of()
    monkeypatch.setattr(MountedSlab, "read_device", fails)
    assert engine.fetch(range(BLOCKS)) == 0
    assert not engine.reader.reads_disks(engine.volume.stored)
    assert engine.ring.slots.free == 4
    assert engine.count("mount_errors_total") == 1
    assert any("gone" in line for line in engine.ring.reader.describe())


@pytest.mark.usefixtures("quick")
def test_landing_hung_device_loses_ring_and_slots(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    assert engine.fetch(range(BLOCKS)) == BLOCKS
    monkeypatch.setattr("kvclient.device.copier.DRAIN_S", 0.05)
    engine.device.paused = True
    assert engine.fetch(range(BLOCKS, 2 * BLOCKS)) == 0
    assert not engine.reader.reads_disks(engine.volume.stored)
    assert engine.ring.slots.free == 0, "the device may still read these slots"
    assert engine.count("device_gds_refused_total") == engine.count("device_lost_total") == 1


@pytest.mark.usefixtures("quick")
def test_landing_long_step_delays_the_ring_only(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring is allocated while the engine computes, for longer than copies may take. The node reads until then."""
    engine = engine_of()
    step = DeferredEvent(engine.device)
    with monkeypatch.context() as patch:
        patch.setattr("kvclient.device.copier.DRAIN_S", 0.02)
        patch.setattr("kvclient.gds.landing_ring.WAIT_S", 0.1)
        patch.setattr(engine.copier, "mark", lambda: step)
        assert engine.fetch(range(BLOCKS)) == 0
        assert engine.count("device_lost_total") == engine.count("device_gds_refused_total") == 0
        assert engine.count("device_gds_busy_total") == 1
        step.reached = True
    assert engine.fetch(range(BLOCKS)) == BLOCKS


@pytest.mark.usefixtures("quick")
def test_landing_sleeping_engine_reads_nothing(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(*_: object, **__: object) -> None:
        raise AssertionError("read in vain")

    engine = engine_of()
    engine.copier.suspend(10)
    assert not engine.copier.hashes
    assert not engine.reader.reads_disks(engine.volume.stored)
    with monkeypatch.context() as patch:
        patch.setattr(MountedSlab, "read_device", reads)
        assert engine.fetch(range(BLOCKS)) == 0
    assert engine.count("mount_errors_total") == 0
    assert engine.ring.slots.free == 4
    engine.copier.resume()
    assert engine.reader.reads_disks(engine.volume.stored)
    assert engine.fetch(range(BLOCKS)) == BLOCKS


@pytest.mark.usefixtures("quick")
def test_landing_client_of_sleeping_engine_reads_later(volume: Volume, engine_of: Callable[..., Engine]) -> None:
    """Volumes are probed while the engine sleeps: with ``gds=required``, ``connect`` must find what cannot be read."""
    copier = engine_of(ready=False).copier
    with LandingRing(copier, gds="forced", ring_bytes=1) as ring:
        copier.suspend(10)
        reader = ring.attach(SPEC)
        reader.prepare_disks(volume.stored)
        wait_until(lambda: any("forced" in line for line in ring.reader.describe()))
        assert not reader.reads_disks(volume.stored)
        copier.resume()
        wait_until(lambda: reader.reads_disks(volume.stored), "the kernels were tried out")


# ---- whether there is a ring ----
@pytest.mark.usefixtures("quick")
def test_landing_without_memory_is_refused_once(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no device memory")

    engine = engine_of()
    buffer = engine.copier.blocks([0])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        assert engine.ring.memory(0.0) is None
    assert engine.ring.memory(0.0) is None
    assert engine.count("device_gds_refused_total") == 1
    assert not engine.reader.reads_disks(engine.volume.stored)
    assert engine.reader.accepts(buffer)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("gds", "choices", "refused"),
    [("off", {}, 0), ("auto", {}, 0), ("forced", {"checksums": False}, 1), ("forced", {"int8": ANY_GROUPS}, 1)],
)
def test_landing_is_not_used_without_need(volume: Volume, gds: str, choices: dict[str, Any], refused: int) -> None:
    """Host memory, the setting, a device without checksums."""
    from landing_bed import cache_of

    copier = DeviceCopier(cache_of(1), **choices)
    with LandingRing(copier, gds=gds) as ring:  # type: ignore[arg-type]
        reader = ring.attach(SPEC if not choices.get("int8") else copier.spec("landing", 4))
        reader.prepare_disks(volume.stored)
        assert not reader.reads_disks(volume.stored)
        assert copier.counters.snapshot().get("device_gds_refused_total", 0) == refused


@pytest.mark.usefixtures("quick")
def test_landing_accepts_only_pages_of_its_cache(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(ready=False)
    assert engine.reader.accepts(engine.copier.blocks([3, 1]))
    assert not engine.reader.accepts(engine.copier.blocks([3, 1], layer=0))
    assert not engine.reader.accepts(DenseBlocks(np.zeros((2, 3, 256), np.uint8)))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("choices", [{"gds": "yes"}, {"gds": "required"}, {"slots": 0}])
def test_landing_impossible_choices_are_refused(volume: Volume, choices: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Engine(volume, 1, **choices)


# ---- the kernels, and kvikio ----
def test_landing_kernels_bring_stored_bytes(engine_of: Callable[..., Engine]) -> None:
    """With the kernels themselves, in Triton's interpreter."""
    engine = engine_of(slots=5)
    engine.volume.flip(9, 4096 + 77)
    assert engine.fetch(range(4, 4 + BLOCKS), verify=True) == 9
    engine.volume.flip(9, 4096 + 77)
    assert engine.fetch(range(4, 4 + BLOCKS), verify=True) == BLOCKS


def test_landing_reads_by_kvikio_without_gpu(tmp_path: Path) -> None:
    """kvikio's device path in compatibility mode, with a stub driver: bytes land in the ring and are not fetched back."""
    run_stub_cases(HERE / "landing_stub_cases.py", tmp_path)


# ---- the vLLM hook's worker, with a real node ----
@pytest.mark.usefixtures("quick")
def test_landing_serves_vllm_worker_beside_the_arena(tmp_path: Path) -> None:
    """Blocks that only the node's NVMe has reach the engine's pages without the arena; attention reads the right bytes."""
    blocks = list(range(1, 9))
    device = ComputingDevice(3)
    device.memory = torch.device("cuda", 0)
    with LocalCluster([NodeSpec("n", dram_bytes=32 << 20, nvme_bytes=64 << 20)], tmp_path) as cluster:
        engine = LateEngine(cluster, "landing", device, gds="forced")
        try:
            engine.step(range(3, 11), blocks, save=True)
            assert engine.stored() == set()
            client = engine.side.clients[0]
            keys = engine.keys(blocks)

            def only_on_disk() -> bool:
                evict(cluster, "n")
                found = client.lookup(keys)
                return found.hit_blocks == len(keys) and {run.tier for run in found.runs} == {Tier.NVME}

            wait_until(only_on_disk)
            reader = client.context.disks
            assert reader is not None
            volumes = session_of(client).volumes
            wait_until(lambda: reader.reads_disks(volumes))
            engine.step(range(12, 20), range(50, 58))  # other requests still compute with the pages
            assert engine.load(range(12, 20), blocks) == set()
            assert engine.settled() == []
            counts = engine.pages[0].counts()
            assert (counts["device_gds_blocks"], counts["device_gds_failed_blocks"]) == (len(blocks), 0)
            assert counts["device_loaded_bytes"] == 0, "blocks went through the arena"
        finally:
            engine.close()
