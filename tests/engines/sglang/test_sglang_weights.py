"""Weights that SGLang updates in a running engine: SGLang's own classes, with the model runner replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cases import PAGE, hashes, positions, prefixed

from kvstore.lab.sglang_bed import host_pool
from support.wait import wait_until

OpenBackend = Callable[..., Any]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's manager of weight updates. Its ``flushes`` says whether SGLang's own caches can be flushed."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for owner, names in {
        Manager: ("_observe_weight_load", "flush_cache_after_weight_update", "_assert_weight_cache_inactive"),
        WeightUpdater: ("begin_weight_update",),
    }.items():
        for name in names:  # so that the end of the test removes the patches
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(WeightUpdater, "begin_weight_update", lambda runner: None)
    state = SimpleNamespace(flushes=True, runner=object.__new__(WeightUpdater))
    loads = SimpleNamespace(update_weights_from_disk=lambda *given, **named: (True, "loaded"))
    state.manager = object.__new__(Manager)
    state.manager.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=loads))])
    state.manager.draft_worker = state.manager.metrics_collector = None
    state.manager.scheduler = SimpleNamespace(record_weight_version_change=lambda new_version: None)
    state.manager.flush_cache = lambda empty_cache: state.flushes
    return state


def update(engine: Any, *, flush_cache: bool = True) -> bool:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path="m", flush_cache=flush_cache)
    return bool(engine.manager.update_weights_from_disk(request).success)


def filled(open_backend: OpenBackend) -> tuple[Any, list[str]]:
    pool, names = host_pool("page_first", tokens=512, page=PAGE), hashes("a", 2)
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "the pages can be looked up")
    return backend, names


def assert_misses(backend: Any, names: list[str]) -> None:
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, positions([4, 5]), prefixed([])) == [False, False]


def assert_not_stored(backend: Any, names: list[str]) -> None:
    assert backend.batch_set_v1(names, positions([0, 1]), prefixed([])) == [False, False]


def assert_stores_and_loads(backend: Any, names: list[str]) -> None:
    assert all(backend.batch_set_v1(names, positions([0, 1]), prefixed([])))
    wait_until(lambda: backend.batch_exists(names) == 2, "pages stored afterwards are found")
    assert all(backend.batch_get_v1(names, positions([4, 5]), prefixed([])))


def test_updated_weights_do_not_load_old_kv(open_backend: OpenBackend, engine: Any) -> None:
    backend, names = filled(open_backend)
    assert update(engine)
    assert_misses(backend, names)
    assert_stores_and_loads(backend, names)


def test_update_without_flush_pauses_until_clear(open_backend: OpenBackend, engine: Any) -> None:
    """SGLang's tree still has KV of the old weights, which must not be stored as that of the new ones."""
    backend, names = filled(open_backend)
    engine.flushes = False
    assert not update(engine)
    assert_misses(backend, names)
    assert_not_stored(backend, names)
    assert update(engine, flush_cache=False)
    assert_not_stored(backend, names)
    backend.clear()
    assert_misses(backend, names)
    assert_stores_and_loads(backend, names)


def test_begun_session_pauses_until_flushed_update(open_backend: OpenBackend, engine: Any) -> None:
    """Others may write weights during a session without a call of SGLang."""
    backend, names = filled(open_backend)
    engine.runner.begin_weight_update()
    assert_misses(backend, names)
    assert_not_stored(backend, names)
    assert update(engine)
    assert_misses(backend, names)
    assert_stores_and_loads(backend, names)


def test_released_weights_pause(open_backend: OpenBackend, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components import weight_updater

    monkeypatch.setattr(weight_updater, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    manager = engine.manager
    manager.scheduler, manager.is_fully_idle, manager.offload_tags = None, lambda ignore_waiting: True, set()
    manager.tp_worker, manager.tp_cpu_group = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(1, 1))), None
    manager.memory_saver_adapter = SimpleNamespace(pause=lambda tag: None)
    backend, names = filled(open_backend)
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
    assert_misses(backend, names)
    assert_not_stored(backend, names)
