"""The connector's half in the scheduler as vLLM makes it, without an engine: handshakes, and epochs that cannot begin."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("default")  # of engines, as everywhere in this folder; modules are imported before that is set
    from kv_groups_bed import cache_of, engine, full, sparse
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_config_from_groups

from kvclient import CacheSpec, InvalidArgument, KeyChain
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm import connector as facade
from kvclient.engines.vllm.connector import Handshake, KVStoreConnector
from kvclient.engines.vllm.identity.kv_groups import read_groups
from kvclient.engines.vllm.identity.weights_check import combined_digest
from kvclient.engines.vllm.identity.weights_epoch import WeightsEpoch
from kvclient.engines.vllm.pd.scheduler import PdScheduler, TransferState
from kvclient.engines.vllm.pd_connector import KVStorePDConnector
from kvclient.engines.vllm.tier.connector import KVStoreOffloadingConnector
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.options import TierOptions

SPEC = CacheSpec(model="m", block_tokens=64, layers=3, layer_block_bytes=64)


class Finder:
    """Finds nothing."""

    def __init__(self, _options: object, shards: Sequence[Sequence[CacheSpec]], *_: object, **__: object) -> None:
        self.shards = shards
        self.chain = KeyChain(shards[0][0])

    def close(self) -> None:
        pass


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> list[Finder | Exception]:
    """The finders that the connector makes; an exception at their head is raised in place of the next one."""
    made: list[Any] = []

    def make(*args: Any, **more: Any) -> Finder:
        if made and isinstance(made[-1], Exception):
            raise made.pop()
        made.append(Finder(*args, **more))
        return made[-1]

    monkeypatch.setattr(facade, "BackgroundLookup", make)
    return made


def scheduler_side(cache: Any, workers: int = 1, kind: type[KVStoreConnector] = KVStoreConnector) -> Any:
    config = engine(distributed_executor_backend="mp", world_size=workers, rank=0)
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config={"load_choice": "always", "published_blocks": 0}, kv_load_failure_policy="recompute"
    )
    config.kv_events_config = None
    return kind(config, KVConnectorRole.SCHEDULER, cache)


def handshake(cache: Any, rank: int = 0) -> Handshake:
    """As a worker with these groups sends it."""
    parts = read_groups(engine(), cache)
    return Handshake([SPEC for _ in parts], [part.table for part in parts], rank, "d")


def stages(specs: Mapping[str, Any], *layers: str) -> list[Any]:
    """The cache of each pipeline stage, by the letters of its layers."""
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker, get_kv_cache_groups

    config = engine()
    groups = get_kv_cache_groups(config, dict(specs))
    own = [_project_kv_cache_groups_to_worker(groups, {name: specs[name] for name in names}) for names in layers]
    return [get_kv_cache_config_from_groups(config, one, 64 << 20) for one in own]


def test_scheduler_learns_the_parts_of_a_group_from_workers(finders: list[Any]) -> None:
    """vLLM shows the scheduler one layer of sparse attention."""
    cache = cache_of(engine(), sparse())
    made = scheduler_side(generate_scheduler_kv_cache_config([cache]))
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake(cache)})
    (finder,) = finders
    assert len(finder.shards) == 2
    made.shutdown()


@pytest.mark.parametrize("layers", [("abc", "d"), ("c", "abd"), ("ab", "cd")])
def test_stage_without_a_layer_of_a_group_is_refused(finders: list[Any], layers: tuple[str, ...]) -> None:
    window = interface.SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=96)
    caches = stages({"a": window, "b": window, "c": full(), "d": full()}, *layers)
    made = scheduler_side(generate_scheduler_kv_cache_config(caches), workers=2)
    with pytest.raises(InvalidArgument, match=r"pipeline stages .* are not supported: lower pipeline_parallel_size"):
        made.set_xfer_handshake_metadata_pp_aware({(rank, 0): handshake(cache, rank) for rank, cache in enumerate(caches)})
    assert not finders


def test_stages_with_layers_of_all_groups_start(finders: list[Any]) -> None:
    caches = stages({"a": full(), "b": full(head_size=96), "c": full(), "d": full(head_size=96)}, "ab", "cd")
    made = scheduler_side(generate_scheduler_kv_cache_config(caches), workers=2)
    made.set_xfer_handshake_metadata_pp_aware({(rank, 0): handshake(cache, rank) for rank, cache in enumerate(caches)})
    assert len(finders[0].shards) == 2
    made.shutdown()


def test_epoch_that_cannot_begin_closes_until_a_reset(finders: list[Any]) -> None:
    cache = cache_of(engine(), {"a": full()})
    made = scheduler_side(cache)
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake(cache)})
    weights = made.scheduler_side.weights
    weights.start("first", combined_digest(["d"]))

    def change(digest: str) -> None:
        """A reset of the cache that succeeds, and a step of which the worker reports these weights."""
        weights.reset_ended(cleared=True)
        number = weights.plan_check(computes=True)
        weights.answered({(number, 0): digest})
        made.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=None, failed_recving=None, finished_recving=None)
        )

    finders.append(RuntimeError("can't start new thread"))
    change("e")
    assert weights.is_closed
    assert made.scheduler_side.counters.totals()["epochs_closed"] == 1
    assert made.scheduler_side.prefix_lookup is finders[0]
    change("e")
    assert weights.is_open
    assert made.scheduler_side.prefix_lookup is finders[1]
    assert finders[1].shards[0][0].weights_epoch == combined_digest(["e"])
    made.shutdown()


def test_prompt_that_arrived_waits_while_weights_are_in_doubt(finders: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PdScheduler, "state", lambda *_: TransferState.ARRIVED)
    monkeypatch.setattr(PdScheduler, "get_num_new_matched_tokens", lambda *_: 64)
    cache = cache_of(engine(), {"a": full()})
    made = scheduler_side(cache, kind=KVStorePDConnector)
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake(cache)})
    one, weights = SimpleNamespace(request_id="r"), made.scheduler_side.weights
    assert made.get_num_new_matched_tokens(one, 0) == (64, True)
    weights.start("first", combined_digest(["d"]))
    for check in (1, 2):
        weights.reset_ended(cleared=False)
        assert weights.plan_check(computes=True) == check
    for answered in (1, 2):  # the check after the second reset must agree
        assert made.get_num_new_matched_tokens(one, 0) == (None, False)
        weights.answered({(answered, 0): "d"})
        weights.end_checks()
    assert made.get_num_new_matched_tokens(one, 0) == (64, True)
    made.shutdown()


def test_tier_that_cannot_connect_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(HookOptions, "connect", fail)
    monkeypatch.setattr(OffloadingConnector, "update_connector_output", lambda *_: None)
    options, counters = TierOptions.from_extra_config({}), TierCounters()
    weights = WeightsEpoch(options)
    weights.reset_ended(cleared=True)
    made: Any = object.__new__(KVStoreOffloadingConnector)
    vars(made).update(_options=options, _weights=weights, _specs={0: SPEC}, _tier=SimpleNamespace(counters=counters))
    weights.answered({(weights.plan_check(computes=True), 0): "d"})
    made.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert weights.is_open
    assert counters.totals()["bugs"] == 1
