"""Hits and misses add up, with the right reasons. All other client tests check the sums too (see conftest)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.request import urlopen

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, payloads
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, ClientOptions, KVClient
from kvclient.load.accounting import HitAccounting, LoadTrace, missed_reasons
from kvclient.load.sink import BlockSink
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument
from kvstore.core.types import Outcome, Tier
from kvstore.lab.accounting_check import check_accounts
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions.label_values import MISS_REASONS, PATHS
from support.chains import token_chain

MakeClient = Callable[..., KVClient]
BLOCK_TOKENS = 16


@st.composite
def loads(draw: st.DrawFn) -> tuple[BlockSink, LoadTrace, bool]:
    """A load with any outcomes, from any mixture of sources."""
    blocks = draw(st.integers(0, 40))
    sink, trace = BlockSink(blocks, 1), LoadTrace(MonotonicClock())
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, blocks))
        stop = draw(st.integers(start, blocks))
        path, tier = draw(st.sampled_from(PATHS)), draw(st.sampled_from([0, *map(int, Tier)]))
        sink.record(slice(start, stop), draw(st.sampled_from(list(Outcome))), tier, "a", path)
    trace.named_blocks = draw(st.none() | st.integers(0, blocks))
    trace.index_failed = draw(st.booleans())
    return sink, trace, draw(st.booleans())


@given(st.lists(loads(), max_size=5), st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=5))
def test_hit_accounting_adds_up(done: list[tuple[BlockSink, LoadTrace, bool]], lookups: list[tuple[int, bool]]) -> None:
    incidents = LimitedLog(logging.getLogger("kvclient"))
    accounts = HitAccounting(BLOCK_TOKENS, 4096, incidents, ClientOptions())
    asked = 0
    for sink, trace, cancelled in done:
        accounts.account(sink.result(4096), sink.sources(), trace, cancelled=cancelled)
        asked += len(sink.outcomes)
        missed = missed_reasons(sink.outcomes, trace, cancelled=cancelled)
        assert set(missed) <= set(MISS_REASONS)
        assert all(missed.values())
        assert "other" not in missed, "every outcome has its reason"
        assert sum(missed.values()) == int(np.count_nonzero(sink.outcomes != Outcome.HIT))
    for left, fails in lookups:
        error = Internal("x") if fails else None
        accounts.not_found(left, error)
        asked += left
    accounts.refused(3, CapacityExceeded("full"))
    check_accounts(incidents.counters.snapshot(), BLOCK_TOKENS)
    assert incidents.counters.get("client_asked_blocks_total") == asked + 3
    assert incidents.counters.get("client_missed_capacity_blocks_total") >= 3


def allocate(spec: CacheSpec, blocks: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.zeros((blocks, spec.block_bytes), np.uint8)


def test_miss_not_in_index_counts_as_unknown(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 10)
    near.blocks.hold(keys[:6])
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    found = client.lookup(keys)
    assert client.load(found, allocate(spec, 6)).hit_blocks == 6
    stats = client.stats()
    assert stats["client_asked_blocks_total"] == 10
    assert stats["client_missed_unknown_blocks_total"] == 4
    assert stats["client_hit_local_dram_tokens_total"] == 6 * spec.block_tokens


def test_miss_named_by_index_counts_as_evicted(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 8)
    metadata.runs = [(0, 8, near)]
    client = make_client(near)
    found = client.lookup(keys)
    assert found.hit_blocks == 8
    assert client.load(found, allocate(spec, 8)).hit_blocks == 0
    assert client.stats()["client_missed_evicted_blocks_total"] == 8


def test_miss_without_index_counts_as_index_down(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    client = make_client(near, lookup_deadline_s=0.5)
    metadata.stop()
    keys = token_chain(spec, 5)
    assert client.lookup(keys).hit_blocks == 0
    assert client.load(keys, allocate(spec, 5)).hit_blocks == 0
    assert client.stats()["client_missed_index_down_blocks_total"] == 10


def test_refused_calls_are_counted(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near)
    keys = token_chain(spec, 4)
    client.close()
    client.load(keys, allocate(spec, 4))
    client.lookup(keys)
    assert client.stats()["client_missed_other_blocks_total"] == 8


def test_slow_load_is_logged_with_its_phases(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(near, slow_load_s=0)
    keys = token_chain(spec, 4)
    client.store(keys, payloads(keys, spec.shape))
    with caplog.at_level(logging.WARNING, "kvclient"):
        client.load(keys, allocate(spec, 4))
    (record,) = client.recent_loads.slowest()
    assert record.request_id
    assert f"load slow: {record.request_id} (seconds=" in caplog.text
    assert "blocks=4, of=4, reason=longest phase: " in caplog.text
    assert {"lookup_s", "local node_s"} <= record.parts.keys()
    assert record.parts["local_dram_bytes"] == 4 * spec.block_bytes
    assert client.stats()["client_slow_loads_total"] == 1


def test_client_serves_its_metrics(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    from prometheus_client import CollectorRegistry

    from kvclient.metrics import collector

    clients = [make_client(near, metrics_listen="127.0.0.1:0")]
    registry = CollectorRegistry()
    registry.register(collector(clients))
    clients.append(make_client(near))
    assert clients[1].metrics_address is None
    for client in clients:
        client.load(token_chain(spec, 3), allocate(spec, 3))
    assert registry.get_sample_value("kvstore_client_missed_blocks_total", {"reason": "unknown"}) == 6
    assert registry.get_sample_value("kvstore_client_session_open") == 2
    assert registry.get_sample_value("kvstore_client_load_seconds_count", {"path": "none", "tier": "none"}) == 2
    with urlopen(f"http://{clients[0].metrics_address}/metrics", timeout=10) as served:
        assert b'kvstore_client_missed_blocks_total{reason="unknown"} 3.0' in served.read()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "unix:/tmp/x", "here"])
def test_metrics_address_must_be_local(address: str) -> None:
    with pytest.raises(InvalidArgument):
        ClientOptions(metrics_listen=address)
