"""An engine without hits logs a line if other tensor parallelism is the reason."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvclient import CacheSpec, KVClient
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.keys import RequestKeys
from kvclient.engines.vllm.scheduler.other_ranks import OtherRanks, other_counts
from kvclient.engines.vllm.scheduler.prefix_lookup import BackgroundLookup
from kvclient.nodes.metadata_client import MetadataClient
from kvstore.embedded.cluster import LocalCluster, NodeSpec

SPEC = CacheSpec(model="m", block_tokens=16, layers=1, layer_block_bytes=4096, layout="vllm=0.32;page=2x16", weights_epoch="a")
TWO = replace(SPEC, shard_count=2, layout="vllm=0.32;page=1x16", layer_block_bytes=2048, weights_epoch="b")
TOLD_S = 10.0


def test_other_ranks_of_other_models_and_tenants_are_left_out() -> None:
    known = [SPEC, TWO, replace(TWO, shard_rank=1), replace(TWO, model="n"), replace(TWO, tenant="t"), replace(TWO, layout="x=1")]
    assert other_counts(known, SPEC) == [2]
    assert other_counts(known[:1], SPEC) == []
    assert other_counts(known, TWO) == [1]


def test_other_ranks_are_looked_for_once_a_minute() -> None:
    ranks = OtherRanks(SPEC)
    assert [ranks.due, ranks.due] == [True, False]


def test_other_ranks_are_named_after_a_lookup_without_hits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with LocalCluster([NodeSpec("n", dram_bytes=16 << 20)], tmp_path) as cluster:
        options = HookOptions(metadata=cluster.metadata_address)
        with KVClient.connect(cluster.metadata_address, TWO, node=None):
            lookup = BackgroundLookup(options, [[SPEC]], ConnectorCounters())
            try:
                keys = RequestKeys(lookup.chain, {})
                assert lookup.begin(keys, list(range(64)), 4).result().hit_blocks == 0
                end_s = time.monotonic() + TOLD_S
                while "other tensor parallelism" not in caplog.text and time.monotonic() < end_s:
                    time.sleep(0.01)
            finally:
                lookup.close()
    assert "model=m, parts=1, other parts=2" in caplog.text
    assert "KVStoreOffloadingConnector" in caplog.text


def test_other_ranks_hung_server_delays_no_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Event(), threading.Event()

    def namespaces(*_: object) -> list[CacheSpec]:
        asked.set()
        assert over.wait(TOLD_S)
        return []

    monkeypatch.setattr(MetadataClient, "namespaces", namespaces)
    monkeypatch.setattr(OtherRanks, "due", True)
    with LocalCluster([NodeSpec("n", dram_bytes=16 << 20)], tmp_path) as cluster:
        lookup = BackgroundLookup(HookOptions(metadata=cluster.metadata_address), [[SPEC]], ConnectorCounters())
        try:
            for at in range(4):  # more than there are lookup threads
                tokens = list(range(at, at + 64))
                assert lookup.begin(RequestKeys(lookup.chain, {}), tokens, 4).result(TOLD_S).hit_blocks == 0
            assert asked.wait(TOLD_S)
            assert not over.is_set()
        finally:
            over.set()
            lookup.close()
