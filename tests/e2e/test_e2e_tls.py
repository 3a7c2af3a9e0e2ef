"""The whole store over mutual TLS, as an operator sets it up: certificates carry a common name, hosts are dialled by address.

The nodes are on several loopback addresses, none of which is in a certificate. Blocks are on a storage node only, so every
load uses at least one data-plane connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from certificates import SERVER_NAME, CertificateFiles, make_certificates
from conftest import WAIT_S
from kvclient import CacheSpec, ClientOptions, KVClient, Lookup, Paths, list_namespaces
from kvclient.engines.options import HookOptions
from kvclient.events import BlockWatcher
from kvclient.hbm import HbmPool
from kvclient.scheduling.client import SchedulerClient
from kvclient.scheduling.types import EngineRequest
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, Tier
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.process.tls import TlsConfig
from kvstore.transport.nixl.agent import NixlOptions
from kvstore.workload.payload import Payloads
from support.wait import wait_until

LAYERS = 4
LAYER_BYTES = 4096
SPEC = CacheSpec(model="tls", block_tokens=16, layers=LAYERS, layer_block_bytes=LAYER_BYTES)
MIB = 1 << 20
BLOCKS = 40
IMPATIENT = ClientOptions(connect_deadline_s=2.0, log_interval_s=0.0)
NODES = ("storage", "prefill", "decode")


@dataclass
class Secured:
    """A store with TLS, and clients for it."""

    cluster: LocalCluster
    files: CertificateFiles
    payloads: Payloads

    def connect(
        self,
        node: str | None,
        tls: TlsConfig | None = None,
        options: ClientOptions | None = None,
        hbm: HbmPool | None = None,
        metadata: str | None = None,
    ) -> KVClient:
        return KVClient.connect(
            metadata or self.cluster.metadata_address,
            SPEC,
            node=None if node is None else self.cluster.node(node).local_socket,
            tls=tls or self.files.client(),
            options=options,
            hbm=hbm,
        )

    def keys(self, client: KVClient, number: int, blocks: int = BLOCKS) -> list[BlockKey]:
        return client.keys(np.arange(blocks * SPEC.block_tokens, dtype=np.uint32) + 1_000_000 * number)

    def bytes_of(self, keys: list[BlockKey]) -> np.ndarray:  # type: ignore[type-arg]
        data = np.zeros((len(keys), SPEC.block_bytes), np.uint8)
        self.payloads.fill(keys, data)
        return data

    def load(self, client: KVClient, keys: list[BlockKey], paths: Paths | None = None) -> dict[str, int]:
        """Load all blocks and check every byte. Returns the bytes by path."""
        space = np.zeros((len(keys), SPEC.block_bytes), np.uint8)
        result = client.load(client.lookup(keys), space, paths=paths)
        assert result.hit_blocks == len(keys), result
        assert np.array_equal(space, self.bytes_of(keys)), "WRONG BYTES"
        return dict(result.bytes_by_path)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    files = make_certificates(folder / "pki")
    settings = (*files.settings(), ("cache_loads", "false"))
    places = [DaemonHost(f"127.0.0.{number}") for number in (1, 2, 3)]
    nodes = [
        NodeSpec("storage", ("storage",), dram_bytes=64 * MIB, nvme_bytes=128 * MIB, settings=settings, place=places[0]),
        NodeSpec("prefill", ("prefill",), dram_bytes=64 * MIB, write_back_to="storage", settings=settings, place=places[1]),
        NodeSpec("decode", ("decode",), dram_bytes=64 * MIB, settings=settings, place=places[2]),
    ]
    with LocalCluster(nodes, folder / "store", metadata_settings=files.settings()) as cluster:
        yield Secured(cluster, files, Payloads(SPEC.block_bytes))


@pytest.fixture(scope="module")
def stored(secured: Secured) -> list[BlockKey]:
    """A chain on the storage node's volume."""
    with secured.connect("storage") as writer:
        keys = secured.keys(writer, 0)
        assert writer.store(keys, secured.bytes_of(keys), durable=True, wait_visible=True).durable
        wait_until(lambda: on_disk(writer, keys), "the blocks lie on the storage node's volume", WAIT_S)
    return keys


def on_disk(client: KVClient, keys: list[BlockKey]) -> bool:
    found: Lookup = client.lookup(keys)
    return found.hit_blocks == len(keys) and any(run.tier is Tier.NVME for run in found.runs)


# ---------------------------------------------------------------- bytes move
@pytest.mark.parametrize("node", [None, "prefill", "decode"])
def test_tls_load_by_address_moves_every_byte(secured: Secured, stored: list[BlockKey], node: str | None) -> None:
    with secured.connect(node) as client:
        assert sum(secured.load(client, stored).values()) == BLOCKS * SPEC.block_bytes


@pytest.mark.parametrize("number", [1, 2])
def test_tls_store_without_local_node_is_loaded_elsewhere(secured: Secured, number: int) -> None:
    """Whole blocks, and layer by layer."""
    with secured.connect(None) as remote, secured.connect("decode") as local:
        keys = secured.keys(remote, number)
        data = secured.bytes_of(keys)
        if number == 1:
            result = remote.store(keys, data)
        else:
            layers = data.reshape(BLOCKS, LAYERS, LAYER_BYTES)
            with remote.begin_store(keys) as handle:
                for layer in range(LAYERS):
                    handle.put_layer(layer, np.ascontiguousarray(layers[:, layer]))
                result = handle.commit()
        assert (result.error, result.bytes_stored) == (None, data.nbytes)
        wait_until(lambda: local.lookup(keys).hit_blocks == BLOCKS, "the store is visible", WAIT_S)
        secured.load(local, keys)
        secured.load(remote, keys)


@pytest.mark.parametrize("node", [None, "prefill"])
@pytest.mark.parametrize("paths", [None, Paths(decode_node="decode", policy="split", layer_group=2)])
def test_tls_load_by_layers_moves_every_byte(
    secured: Secured, stored: list[BlockKey], node: str | None, paths: Paths | None
) -> None:
    wanted = secured.bytes_of(stored)
    with secured.connect(node) as client:
        space = np.zeros_like(wanted)
        with client.start_load(client.lookup(stored), space, paths=paths) as load:
            for layer in range(LAYERS):
                assert load.wait_layer(layer)
                upto = (layer + 1) * LAYER_BYTES
                assert np.array_equal(space[: load.promised_blocks, :upto], wanted[: load.promised_blocks, :upto])
            assert load.result().hit_blocks == BLOCKS
        assert np.array_equal(space, wanted)


@pytest.mark.parametrize("policy", ["split", "prefill_only", "shorter_queue"])
@pytest.mark.parametrize("node", [None, "prefill"])
def test_tls_planned_load_moves_every_byte(secured: Secured, stored: list[BlockKey], node: str | None, policy: str) -> None:
    with secured.connect(node) as client:
        by_path = secured.load(client, stored, Paths(decode_node="decode", policy=policy))
        assert sum(by_path.values()) == BLOCKS * SPEC.block_bytes


def test_tls_handoff_to_another_host_arrives_whole(secured: Secured) -> None:
    with secured.connect("prefill") as prefill, secured.connect("decode") as decode:
        keys = secured.keys(prefill, 3)
        data = secured.bytes_of(keys)
        layers = data.reshape(BLOCKS, LAYERS, LAYER_BYTES)
        with (
            decode.await_prompt(keys, deadline_s=WAIT_S) as awaited,
            prefill.begin_handoff(keys, "decode") as handoff,
        ):
            for layer in range(LAYERS):
                handoff.put_layer(layer, np.ascontiguousarray(layers[:, layer]))
            given = handoff.commit()
            assert (given.error, given.held_blocks) == (None, BLOCKS)
            assert awaited.wait(WAIT_S)
            taken = np.zeros_like(data)
            assert awaited.take(taken, verify="always").hit_blocks == BLOCKS
        assert np.array_equal(taken, data)


def test_tls_hbm_pool_is_read_by_address(secured: Secured) -> None:
    with (
        HbmPool(device="cpu", capacity_bytes=8 * MIB, metadata=secured.cluster.metadata_address, node_id="pool",
                listen="127.0.0.2:0", tls=secured.files.server(), demote=False) as pool,
        secured.connect("prefill", hbm=pool) as engine,
        secured.connect(None) as reader,
    ):  # fmt: skip
        keys = secured.keys(engine, 4)
        engine.store(keys, secured.bytes_of(keys))
        assert pool.wait_published()
        found = reader.lookup(keys)
        only = replace(found, runs=tuple(run for run in found.runs if run.node_id == "pool"))
        space = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        result = reader.load(only, space)
        assert dict(result.bytes_by_node) == {"pool": space.nbytes}, result
        assert np.array_equal(space, secured.bytes_of(keys)), "WRONG BYTES"


def test_tls_hook_options_move_every_byte(secured: Secured) -> None:
    """Clients made from the options of the vLLM, SGLang and transformers hooks."""
    files = secured.files
    options = HookOptions.from_mapping(
        {
            "metadata": secured.cluster.metadata_address,
            "node": "none",
            "tls_ca": str(files.ca),
            "tls_cert": str(files.cert),
            "tls_key": str(files.key),
            "tls_server_name": SERVER_NAME,
        }
    )
    with options.connect(SPEC) as client:
        keys = secured.keys(client, 5)
        assert client.store(keys, secured.bytes_of(keys)).held_blocks == BLOCKS
        wait_until(lambda: client.lookup(keys).hit_blocks == BLOCKS, "the store is visible", WAIT_S)
        secured.load(client, keys)


def test_tls_other_clients_are_answered(secured: Secured, stored: list[BlockKey]) -> None:
    """Namespaces, block events and the scheduler."""
    address, tls = secured.cluster.metadata_address, secured.files.client()
    assert [spec.model for spec in list_namespaces(address, tls=tls)] == [SPEC.model]
    with BlockWatcher(address, tls=tls) as watcher:
        watcher.wait_complete(WAIT_S)
        assert {volume.node_id for volume in watcher.holders(stored[0])} >= {"storage"}
    scheduler = SchedulerClient(address, tls=tls)
    assert scheduler.cancel(EngineRequest("nobody's", 1)) is False
    scheduler.close()


def test_tls_client_with_nixl_uses_tcp(secured: Secured, stored: list[BlockKey]) -> None:
    """NIXL lacks TLS: bytes move over TLS, and the fallback is counted."""
    with secured.connect(None, options=ClientOptions(nixl=NixlOptions(), nixl_trusted_network=True)) as client:
        secured.load(client, stored)
        assert client.stats()["transport_nixl_unavailable_total"] == 1


# ---------------------------------------------------------------- no byte moves
@pytest.mark.parametrize("stranger", ["clear text", "no certificate", "another authority", "another name", "no name"])
def test_tls_stranger_moves_no_byte(
    secured: Secured, stored: list[BlockKey], tmp_path: Path, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused at once. A client that continues, as hooks do, loads and stores nothing and counts the reason."""
    ours = secured.files.client()
    tls = {
        "clear text": None,
        "no certificate": replace(ours, cert=None, key=None),
        "another authority": make_certificates(tmp_path / "theirs").client(),
        "another name": secured.files.client("elsewhere.example"),
        "no name": secured.files.client(None),
    }[stranger]
    with pytest.raises(KVStoreError):
        KVClient.connect(secured.cluster.metadata_address, SPEC, node=None, tls=tls, options=IMPATIENT)
    goes_on = replace(IMPATIENT, require_store=False, lookup_deadline_s=0.5)
    with (
        caplog.at_level(logging.WARNING, "kvclient"),
        KVClient.connect(secured.cluster.metadata_address, SPEC, node=None, tls=tls, options=goes_on) as client,
    ):
        space = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        loaded = client.load(stored, space, deadline_s=1.0)
        assert (loaded.hit_blocks, loaded.bytes_loaded, int(space.max())) == (0, 0, 0)
        assert client.store(secured.keys(client, 9), secured.bytes_of(stored), deadline_s=1.0).bytes_stored == 0
        counted = client.stats()
    assert counted["client_connect_failed_total"] > 0
    assert counted["client_store_failed_total"] > 0
    assert caplog.records


def test_tls_node_under_another_name_gets_no_byte(secured: Secured, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node whose certificate is signed by our authority for another name: not read, not written, and logged."""
    other = make_certificates(tmp_path / "other", name="elsewhere", authority=secured.files)
    settings = tuple(one for one in other.settings() if one[0] != "tls.server_name")
    nodes = [
        NodeSpec(
            "other", dram_bytes=64 * MIB, settings=(*settings, ("tls.server_name", SERVER_NAME)), place=DaemonHost("127.0.0.2")
        )
    ]
    with (
        caplog.at_level(logging.WARNING, "kvclient"),
        LocalCluster(nodes, tmp_path / "store", metadata_settings=secured.files.settings()) as cluster,
        KVClient.connect(
            cluster.metadata_address, SPEC, node=cluster.node("other").local_socket, tls=secured.files.client()
        ) as local,
        secured.connect(None, options=IMPATIENT, metadata=cluster.metadata_address) as remote,
    ):
        keys = secured.keys(local, 0)
        assert local.store(keys, secured.bytes_of(keys), wait_visible=True).held_blocks == BLOCKS
        wait_until(lambda: remote.lookup(keys).hit_blocks == BLOCKS, "the metadata server says where the blocks are", WAIT_S)
        space = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        loaded = remote.load(remote.lookup(keys), space)
        assert (loaded.hit_blocks, loaded.bytes_loaded, int(space.max())) == (0, 0, 0)
        assert loaded.error is not None
        more = secured.keys(remote, 1)
        put = remote.store(more, secured.bytes_of(more))
        assert (put.bytes_stored, put.held_blocks) == (0, 0)
        assert put.error is not None
        assert remote.stats()["client_peer_failed_total"] > 0
        assert "read from a node failed: other" in caplog.text


# ---------------------------------------------------------------- the local node is lost
def test_tls_local_node_killed_loads_from_others(secured: Secured, stored: list[BlockKey]) -> None:
    """The engine's own node dies: from then on it reads other hosts over the data plane."""
    with secured.connect("decode") as client:
        secured.load(client, stored)
        secured.cluster.kill("decode")
        try:
            space = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
            wait_until(lambda: client.load(stored, space).hit_blocks == BLOCKS, "loads go on over other hosts", WAIT_S)
            assert np.array_equal(space, secured.bytes_of(stored)), "WRONG BYTES"
        finally:
            secured.cluster.start_node("decode")
