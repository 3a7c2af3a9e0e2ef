"""Listing the namespaces of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient import CacheSpec, ClientOptions, KVClient, Unavailable, list_namespaces
from kvstore.embedded.cluster import LocalCluster


def test_list_namespaces_returns_registered_specs(tmp_path: Path) -> None:
    specs = [CacheSpec(model=name, block_tokens=16, layers=2, layer_block_bytes=64, salt=b"x") for name in ("a", "b")]
    with LocalCluster([], tmp_path) as cluster:
        assert list_namespaces(cluster.metadata_address) == []
        for spec in specs:
            KVClient.connect(cluster.metadata_address, spec, node=None, options=ClientOptions()).close()
        assert list_namespaces(cluster.metadata_address) == specs
        address = cluster.metadata_address
    with pytest.raises(Unavailable):
        list_namespaces(address, timeout_s=2.0)
