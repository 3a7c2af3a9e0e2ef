"""The movers of the vLLM connector over pages on a device that computes and copies late, with a real store, without vLLM."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deferred import ComputingDevice, DeferredDevice, DeferredEvent, FakePinning
from late_engine import LAYERS, NAMES, Engine, rows_of

from kvclient.device.blocks import DeviceBlocks
from kvclient.engines.vllm.memory.device_pages import DevicePages
from kvclient.engines.vllm.pd.plan import AwaitJob, CopyJob, SendJob
from kvclient.engines.vllm.pd.receiver import Receiver
from kvclient.engines.vllm.pd.sender import Sender
from kvclient.engines.vllm.plan import StepPlan, WorkerOutput
from kvclient.engines.vllm.worker.worker_connector import LoadCompletions
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

numbers = itertools.count()
FIRST, SECOND, OTHER = [1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = [
        NodeSpec("n", roles=("prefill",), dram_bytes=32 << 20, settings=(("prefault", "true"),)),
        NodeSpec("d", roles=("decode",), dram_bytes=32 << 20, settings=(("decode_buffer", "8MiB"), ("prefault", "true"))),
    ]
    with LocalCluster(nodes) as cluster:
        yield cluster


@pytest.fixture
def engines(cluster: LocalCluster) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []
    model = f"m{next(numbers)}"

    def make(device: DeferredDevice, **how: Any) -> Engine:
        made.append(Engine(cluster, how.pop("model", model), device, **how))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def life(engine: Engine) -> tuple[list[str], bool]:
    """Store and load both ways, into recently used pages. Returns wrong reads, and whether the store is right."""
    engine.step([3, 4, 5, 6, 7], FIRST, save=True)
    engine.step([8, 9, 10], SECOND, save=True)
    assert engine.stored(2) == set()
    engine.step([3, 4, 5], OTHER)  # other requests use their pages now, and still compute with them
    engine.attend([3, 4, 5], OTHER, 0)
    assert engine.load([5, 4, 3, 20, 21], FIRST) == set()
    engine.step([11, 12, 13], OTHER)
    assert engine.load_in_step([13, 12, 11], SECOND) == set()
    wrong = engine.settled()
    right = np.array_equal(engine.read_back(FIRST), rows_of(FIRST)) and np.array_equal(engine.read_back(SECOND), rows_of(SECOND))
    return wrong, right


@pytest.mark.parametrize("strategy", ["staged", "batched"])
@pytest.mark.parametrize("first", ["compute", "copies", ""])
def test_vllm_pages_are_read_only_after_load(engines: Callable[..., Engine], first: str, strategy: str) -> None:
    for seed in range(3):
        engine = engines(ComputingDevice(seed, first), strategy=strategy, model=f"m{next(numbers)}")
        assert life(engine) == ([], True)
        assert engine.side.counters.totals().get("bugs", 0) == 0


def test_vllm_auto_strategy_is_measured_and_copies_right(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.device.calibration.trial.PIECES", (8, 32))
    for seed, first in enumerate(("compute", "copies")):
        device = ComputingDevice(seed, first)
        device.pinning = FakePinning()
        engine = engines(device, strategy="auto", model=f"m{next(numbers)}")
        ((_, rates),) = engine.side.copy_rates().items()
        assert len({(direction, strategy) for group, direction, strategy, *_ in rates}) == len(rates) == 6
        assert [direction for _, direction, _, in_use, _ in rates if in_use] == ["load", "store"]
        assert life(engine) == ([], True)
        engine.side.count_device_copies()
        totals = engine.side.counters.totals()
        assert not {"bugs", "device_errors", "device_trials_failed", "device_trials_late"} & set(totals)


def reached(*_: object) -> DeferredEvent:
    event = DeferredEvent(DeferredDevice())
    event.reached = True
    return event


def begin_without_mark(pages: Any) -> None:
    """Loads begin at once."""
    buffer = DevicePages.buffer

    def at_once(self: DevicePages, ids: Sequence[int], after: object = None) -> Any:
        return buffer(self, ids, after if _is_store() else reached())

    pages.setattr(DevicePages, "buffer", at_once)


def store_without_mark(pages: Any) -> None:
    """Stores begin at once."""
    buffer = DevicePages.buffer

    def at_once(self: DevicePages, ids: Sequence[int], after: object = None) -> Any:
        return buffer(self, ids, reached() if _is_store() else after)

    pages.setattr(DevicePages, "buffer", at_once)


def _is_store() -> bool:
    return threading.current_thread().name == "kvstore-save"


def no_follow(pages: Any) -> None:
    """The engine's stream does not wait for a layer."""
    pages.setattr(ComputingDevice, "wait_event", lambda *_: None)


def no_drain(pages: Any) -> None:
    """A load is reported as ended during its copies."""
    pages.setattr(DeviceBlocks, "drain", lambda *_: None)


@pytest.mark.parametrize(
    ("left_out", "first"),
    [(begin_without_mark, "copies"), (store_without_mark, "copies"), (no_follow, "compute"), (no_drain, "compute")],
)
def test_vllm_missing_wait_is_detected(
    left_out: Callable[[Any], None], first: str, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(ComputingDevice(1, first))
    left_out(monkeypatch)
    wrong, right = life(engine)
    monkeypatch.undo()
    assert wrong or not right


def test_failed_load_pages_are_cleared_before_reuse(engines: Callable[..., Engine]) -> None:
    """The store lacks the last blocks of a load: their pages are cleared, on the engine's stream, and computed."""
    engine = engines(ComputingDevice(2, "copies"))
    engine.step([3, 4], FIRST[:2], save=True)
    assert engine.stored() == set()
    job = engine.job([10, 11, 12, 13, 14], FIRST, layerwise=False, found=2)
    lookups = {name: replace(lookup, hit_blocks=5) for name, lookup in job.groups[0].lookups.items()}
    job.groups[0] = replace(job.groups[0], lookups=lookups)  # a lookup result that claims too many blocks
    engine.step([12], [77])
    assert engine.load(job.groups[0].block_ids, FIRST, job) == {12, 13, 14}
    assert engine.settled() == []
    for layer in engine.layers:
        assert not layer[[12, 13, 14]].any()


def test_async_load_does_not_wait_for_current_step(engines: Callable[..., Engine]) -> None:
    engine = engines(ComputingDevice(5))
    engine.step([3, 4, 5, 6, 7], FIRST, save=True)
    assert engine.stored() == set()
    job = engine.job([10, 11, 12, 13, 14], FIRST, layerwise=False)
    engine.step([10, 11, 12, 13, 14], [80, 81, 82, 83, 84])
    engine.side.begin_step(StepPlan(loads=[job]))
    never = DeferredEvent(engine.device)
    engine.device.compute.wait(never)  # type: ignore[attr-defined]  # the step's forward pass: it has not ended when the load has
    assert engine.load(job.groups[0].block_ids, FIRST, job) == set()
    never.reached = True
    assert engine.settled() == []


def hand_over(sender: Engine, receiver: Engine) -> list[str]:
    """Hand a prompt to another engine while it is computed, into recently used pages."""
    sends = Sender(sender.pages, sender.side.layer_positions, 10.0, sender.side.counters)
    takes = Receiver(receiver.pages, 15.0, receiver.side.counters, verify="auto")
    keys, pages, target = sender.keys(FIRST), [3, 4, 5, 6, 7], [20, 19, 18, 17, 16]
    takes.begin([AwaitJob("r", keys, [0], "t")], receiver.chain, receiver.side.clients)
    sends.begin([SendJob(1, "d", 0, None, keys, False, [pages])], sender.chain, sender.side.clients)
    for layer in range(LAYERS):
        sender.compute(pages, FIRST, layer)
        sends.layer(NAMES[layer])
    sends.end_step(good=True)
    answers = WorkerOutput()
    wait_until(lambda: bool(answers.merge(sends.take()) or answers.stores_done), "the prompt is handed over")
    assert answers.stores_failed == set()
    came: set[str] = set()
    wait_until(lambda: bool(came.update(takes.take_known()[0]) or came), "the prompt is here")
    receiver.step(target, [90, 91, 92, 93, 94])
    takes.take([CopyJob("r", [0], [target])])
    got: list[LoadCompletions] = []
    wait_until(lambda: bool(got.append(takes.take_completions()) or got[-1].received), "the prompt is copied")
    assert got[-1].missing == set()
    for layer in range(LAYERS):
        receiver.attend(target, FIRST, layer)
    sends.close()
    takes.close()
    sender.device.run_all()
    return receiver.settled()


@pytest.mark.parametrize("first", ["compute", "copies", ""])
def test_handoff_copies_prompt_from_device_to_device(engines: Callable[..., Engine], first: str) -> None:
    pair = [engines(ComputingDevice(4, first), node=node) for node in ("n", "d")]
    assert hand_over(*pair) == []


@pytest.mark.parametrize("method", ["layer_buffer", "buffer"])
def test_handoff_missing_wait_is_detected(method: str, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [engines(ComputingDevice(4, "copies"), node=node) for node in ("n", "d")]
    given = getattr(DevicePages, method)
    monkeypatch.setattr(DevicePages, method, lambda self, *how: given(self, *how[:-1], reached()))
    assert hand_over(*pair) != []
