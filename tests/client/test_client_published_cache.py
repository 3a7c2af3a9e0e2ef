"""The cache of an engine in a real index: routers find it, and no lookup, load, store or drain of the store's blocks meets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvclient import BlockKey, CacheSpec, ClientOptions, KVClient, Outcome, StoreOutcome, Tier
from kvclient.engine_cache.cache_namespace import cache_keys, cache_spec
from kvclient.engine_cache.publication import CachePublication
from kvclient.engine_cache.tracker import CacheOffer, CacheSpace, CacheTracker, KnownBlock
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.cli.app import root
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call, connect
from support.wait import wait_until

SPEC = CacheSpec(model="published-cache", block_tokens=16, layers=2, layer_block_bytes=4096)
SPACE = CacheSpace(SPEC.namespace, cache_spec(SPEC).namespace)
BLOCKS = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("n", dram_bytes=32 << 20)], metadata_settings=[("node_ttl", "1s")]) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[KVClient]:
    with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("n").local_socket) as client:
        yield client


class Engine:
    """A tracker of a pool that holds all blocks but those evicted, and its publication."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self.evicted: set[bytes] = set()
        self.tracker = CacheTracker(SPACE, 1_000, lambda name: (name,))
        self.publication = CachePublication(
            name,
            cluster.metadata_address,
            capacity_bytes=64 << 20,
            block_bytes=SPEC.block_bytes,
            take_changes=self.tracker.take_changes,
        )
        self.publication.start()

    def _missing(self, blocks: Sequence[KnownBlock]) -> Sequence[KnownBlock]:
        return [block for block in blocks if block[1] in self.evicted]

    def compute(self, keys: Sequence[BlockKey]) -> None:
        self.tracker.offer(CacheOffer(0, None, keys, list(keys)))
        self.step()

    def step(self) -> None:
        self.tracker.step(self._missing, 1.0)


@pytest.fixture
def engine(cluster: LocalCluster) -> Iterator[Engine]:
    made = Engine(cluster, "engine-1")
    yield made
    made.publication.close()


def cached(cluster: LocalCluster, keys: Sequence[BlockKey]) -> metadata_pb2.LookupResponse:
    """Look up blocks in the caches of engines."""
    namespace, packed = cache_keys(SPEC, keys)
    with connect(cluster.metadata_address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        answer: metadata_pb2.LookupResponse = call(
            stub.Lookup, metadata_pb2.LookupRequest(namespace_id=namespace, keys=packed), 5.0
        )
    return answer


def chain(client: KVClient, seed: int) -> list[BlockKey]:
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, BLOCKS * SPEC.block_tokens, dtype=np.uint32)
    return client.keys(tokens)


def test_cache_is_found_with_tier_hbm_until_evicted(cluster: LocalCluster, client: KVClient, engine: Engine) -> None:
    keys = chain(client, 1)
    engine.compute(keys)
    wait_until(lambda: cached(cluster, keys).hit_blocks == BLOCKS)
    (node,) = cached(cluster, keys).nodes
    assert (node.node_id, node.control_address, node.data_address) == ("engine-1", "", "")
    assert [volume.tier for volume in node.volumes] == [common_pb2.TIER_HBM]
    engine.evicted.update(keys[5:])
    engine.step()
    wait_until(lambda: cached(cluster, keys).hit_blocks == 5)
    engine.tracker.clear()
    wait_until(lambda: cached(cluster, keys).hit_blocks == 0)


def test_cache_is_no_hit_and_no_copy_for_clients(cluster: LocalCluster, client: KVClient, engine: Engine) -> None:
    keys = chain(client, 2)
    engine.compute(keys)
    wait_until(lambda: cached(cluster, keys).hit_blocks == BLOCKS)
    assert client.lookup(keys).hit_blocks == 0
    assert client.lookup_heads(keys[:1]).runs == ()
    buffer = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    stored = client.store(keys, buffer, wait_visible=True)
    assert set(stored.outcomes) == {StoreOutcome.STORED}
    assert {run.tier for run in client.lookup(keys).runs} == {Tier.DRAM}


def test_cache_named_in_a_load_is_a_miss(cluster: LocalCluster, client: KVClient, engine: Engine) -> None:
    """A client that looks up the namespace of caches in order to load dials nothing, and gets misses instead of an error."""
    keys = chain(client, 3)
    engine.compute(keys)
    wait_until(lambda: cached(cluster, keys).hit_blocks == BLOCKS)
    options = ClientOptions(default_deadline_s=5.0)
    with KVClient.connect(
        cluster.metadata_address, cache_spec(SPEC), node=cluster.node("n").local_socket, options=options
    ) as reader:
        packed = cache_keys(SPEC, keys)[1]
        lookup = reader.lookup(packed)
        assert {run.tier for run in lookup.runs} == {Tier.HBM}
        result = reader.load(lookup, np.zeros((BLOCKS, SPEC.block_bytes), np.uint8))
    assert Outcome.HIT not in set(result.outcomes)


def test_cache_of_closed_engine_is_hidden(cluster: LocalCluster, client: KVClient) -> None:
    engine, keys = Engine(cluster, "engine-2"), chain(client, 4)
    engine.compute(keys)
    wait_until(lambda: cached(cluster, keys).hit_blocks == BLOCKS)
    engine.publication.close()
    assert cached(cluster, keys).hit_blocks == 0


def test_cache_node_causes_no_finding_and_no_calls(cluster: LocalCluster, client: KVClient, engine: Engine) -> None:
    keys = chain(client, 5)
    engine.compute(keys)
    wait_until(lambda: cached(cluster, keys).hit_blocks == BLOCKS)
    runner = CliRunner()
    for command in (["status"], ["nodes"], ["ping"]):
        result = runner.invoke(root, [*command, "--metadata", cluster.metadata_address])
        assert result.exit_code == 0, result.output
        if command == ["status"]:
            assert "node engine-1: alive, the cache of an engine" in result.output
            assert "engine-1/cache  hbm" in result.output


@pytest.mark.parametrize("tier", [common_pb2.TIER_DRAM, common_pb2.TIER_NVME])
def test_node_without_addresses_needs_tier_hbm(cluster: LocalCluster, tier: common_pb2.Tier) -> None:
    node = common_pb2.NodeInfo(node_id="nowhere", boot_id=b"b" * 16)
    node.volumes.add(volume_id="nowhere/v", tier=tier, capacity_bytes=1)
    request = metadata_pb2.RegisterNodeRequest(operation_id=b"o" * 16, node=node)
    with connect(cluster.metadata_address) as channel, pytest.raises(InvalidArgument, match="lack addresses"):
        call(metadata_pb2_grpc.MetadataStub(channel).RegisterNode, request, 5.0)


@pytest.mark.parametrize("field", ["storage_address", "local_socket"])
def test_cache_with_another_address_is_rejected(cluster: LocalCluster, field: str) -> None:
    node = common_pb2.NodeInfo(node_id="somewhere", boot_id=b"b" * 16, **{field: "127.0.0.1:1"})
    node.volumes.add(volume_id="somewhere/v", tier=common_pb2.TIER_HBM, capacity_bytes=1)
    request = metadata_pb2.RegisterNodeRequest(operation_id=b"o" * 16, node=node)
    with connect(cluster.metadata_address) as channel, pytest.raises(InvalidArgument, match="lack addresses"):
        call(metadata_pb2_grpc.MetadataStub(channel).RegisterNode, request, 5.0)


class Counted(Counter[str]):
    """The counters of an engine's hook."""

    def add(self, name: str, more: int) -> None:
        self[name] += more


def guarded(folder: Path) -> LocalCluster:
    """A store that requires tokens."""
    tokens = folder / "tokens"
    tokens.write_text("engine e an-engine-token-of-tests\nnode n a-node-token-of-tests\n")
    tokens.chmod(0o600)
    return LocalCluster([], folder / "store", metadata_settings=[("tokens_file", str(tokens))])


def publication(address: str, counts: Counted, token: TokenSource | None = None) -> CachePublication:
    tracker = CacheTracker(SPACE, 100, lambda name: (name,))
    keys = [BlockKey(bytes([at]) * 16) for at in range(20)]
    tracker.offer(CacheOffer(0, None, keys, list(keys)))
    tracker.step(lambda _: [], 0.0)
    made = CachePublication(
        "engine-3",
        address,
        capacity_bytes=1,
        block_bytes=1,
        take_changes=tracker.take_changes,
        count=counts.add,
        token=token,
        setting_names=("tls_ca", "token_file"),
    )
    made.start()
    return made


@pytest.mark.parametrize("token", ["an-engine-token-of-tests", "an-unknown-token-of-tests"])
def test_cache_denied_is_published_with_new_token(tmp_path: Path, token: str) -> None:
    """Only nodes may publish. The cache counts as connected once the token is replaced, and not after the store stopped."""
    own, counts = tmp_path / "own", Counted()
    own.write_text(token)
    own.chmod(0o600)
    with guarded(tmp_path) as store:
        cache = publication(store.metadata_address, counts, TokenSource.of(file=own))
        assert not cache.is_connected
        wait_until(lambda: counts["cache_publication_failures"] >= 3)
        assert counts["cache_publication_denied"] == 1, "counted once"
        assert not cache.is_connected
        own.write_text("a-node-token-of-tests")
        wait_until(lambda: cache.is_connected)
    wait_until(lambda: not cache.is_connected)
    cache.close()
    assert counts["cache_publication_denied"] == 1


def test_cache_without_token_names_the_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts = Counted()
    with guarded(tmp_path) as store:
        cache = publication(store.metadata_address, counts)
        wait_until(lambda: counts["cache_publication_denied"])
        cache.close()
    (line,) = [record.getMessage() for record in caplog.records if "cache not published" in record.getMessage()]
    assert "token_file is not set" in line
    assert not cache.is_connected


def test_cache_changes_wait_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the metadata server is away, an inventory replaces changes that are too many."""
    monkeypatch.setattr("kvclient.engine_cache.publication.MOST_WAITING", 10)
    counts = Counted()
    cache = publication("127.0.0.1:1", counts)
    wait_until(lambda: counts["cache_inventories"] and counts["cache_publication_failures"])
    cache.close()
    assert (counts["cache_inventories"], counts["cache_published_blocks"]) == (1, 20)
