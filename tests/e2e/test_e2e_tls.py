"""The whole store with TLS on every socket that leaves the host: control, data plane, peers, clients; mutual where asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import WAIT_S, until
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.core.errors import KVStoreError
from kvstore.core.tls import TlsConfig
from kvstore.testing.certificates import make_certificates
from kvstore.testing.cluster import LocalCluster, NodeSpec
from kvstore.workload.payload import Payloads

SPEC = CacheSpec(model="tls", block_tokens=16, layers=4, layer_block_bytes=4096)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[LocalCluster, TlsConfig]]:
    pki = tmp_path / "pki"
    pki.mkdir()
    made = make_certificates(pki)
    tls = TlsConfig(ca=made.ca, cert=made.cert, key=made.key, require_client_cert=True)
    settings = tuple((f"tls.{name}", str(getattr(tls, name))) for name in ("ca", "cert", "key"))
    settings += (("tls.require_client_cert", "true"),)
    nodes = [NodeSpec("a", settings=settings), NodeSpec("b", settings=settings)]
    with LocalCluster(nodes, tmp_path / "store", metadata_settings=settings) as cluster:
        yield cluster, tls


def test_stores_loads_and_peer_fetches_over_mutual_tls(secured: tuple[LocalCluster, TlsConfig]) -> None:
    cluster, tls = secured
    payloads = Payloads(SPEC.block_bytes)
    with (
        KVClient.connect(cluster.metadata_address, SPEC, node=None, tls=tls) as remote,
        KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("b").local_socket, tls=tls) as local,
    ):
        keys = remote.keys(np.arange(16 * 40, dtype=np.uint32))
        data = np.zeros((40, SPEC.block_bytes), np.uint8)
        payloads.fill(keys, data)
        assert remote.store(keys, data).bytes_stored == data.nbytes
        until(lambda: remote.lookup(keys).hit_blocks == 40, "published", WAIT_S)
        for client in (remote, local):
            room = np.zeros_like(data)
            assert client.load(keys, room).hit_blocks == 40
            assert np.array_equal(room, data)


def test_a_client_without_a_certificate_is_refused(secured: tuple[LocalCluster, TlsConfig]) -> None:
    cluster, tls = secured
    impatient = ClientOptions(connect_deadline_s=2.0)
    for stranger in (None, TlsConfig(ca=tls.ca)):
        with pytest.raises(KVStoreError):
            KVClient.connect(cluster.metadata_address, SPEC, node=None, tls=stranger, options=impatient)
