"""Metrics, traces, logs and slowest loads of real processes: a client, a metadata server and two nodes."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.config.node import NodeConfig
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.node.daemon import NodeDaemon
from kvstore.observe import tracing
from support.ports import free_ports
from support.wait import wait_until

WAIT_S = 30.0
SPEC = CacheSpec(model="seen", block_tokens=16, layers=4, layer_block_bytes=4096)
BLOCKS = 12


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_S) as answer:
        return answer.read().decode()


def value(address: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(page(address, "/metrics"))
    found = [
        one.value for family in families for one in family.samples if one.name == name and labels.items() <= one.labels.items()
    ]
    assert found, f"{name}{labels} is not exposed"
    return sum(found)


def stored(client: KVClient) -> list[bytes]:
    keys = client.keys(np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32))
    data = np.random.default_rng(1).integers(0, 256, (BLOCKS, SPEC.block_bytes), np.uint8)
    assert client.store(keys, data, wait_visible=True).held_blocks == BLOCKS
    return list(keys)


def test_every_process_exposes_metrics(tmp_path: Path) -> None:
    with LocalCluster([NodeSpec("a", nvme_bytes=32 << 20)], tmp_path) as cluster:
        metadata, node = cluster.node("metadata").metrics_address, cluster.node("a").metrics_address
        engine = f"127.0.0.1:{free_ports(1)[0]}"
        options = ClientOptions(metrics_listen=engine)
        with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket, options=options) as client:
            keys = stored(client)
            out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
            assert client.load(client.lookup(keys), out).hit_blocks == BLOCKS
            assert value(engine, "kvstore_client_hit_blocks_total", path="local", tier="dram") == BLOCKS
            assert value(engine, "kvstore_client_asked_tokens_total") == BLOCKS * SPEC.block_tokens
            (slowest,) = json.loads(page(engine, "/loads"))["slowest"]
            (at_node,) = json.loads(page(node, "/loads"))["slowest"]
            assert slowest["request_id"] == at_node["request_id"], "client and node use one request id"
            assert at_node["reason"].startswith("fast: ") or "% of the time" in at_node["reason"]
            assert isinstance(at_node["action"], str)
        assert value(node, "kvstore_node_load_seconds_count", reach="dram") == 1
        assert value(node, "kvstore_rpc_seconds_count", method="LoadResident") == 1
        assert value(node, "kvstore_node_registered") == 1
        assert value(node, "kvstore_volume_used_bytes", tier="dram") > 0
        assert value(node, "kvstore_network_bytes_total", network="compute", direction="sent") > 0
        assert value(node, "kvstore_quarantined_blocks_total") == 0
        wait_until(lambda: value(node, "kvstore_node_write_back_waiting_blocks") == 0, "all blocks are durable")
        assert value(node, "kvstore_volume_blocks", tier="nvme") == BLOCKS
        assert value(metadata, "kvstore_metadata_nodes", state="alive") == 1
        assert value(metadata, "kvstore_metadata_lookups_total") >= 1
        wait_until(lambda: value(metadata, "kvstore_index_blocks") == BLOCKS, "the index has the blocks")
        size = shutil.disk_usage(tmp_path).total
        wait_until(lambda: "\nkvstore_index_disk_bytes " in page(metadata, "/metrics"), "the index disk is measured")
        assert value(metadata, "kvstore_index_disk_bytes") == size
        assert 0 < value(metadata, "kvstore_index_disk_free_bytes") < size
        wait_until(lambda: "kvstore_volume_disk_bytes{" in page(node, "/metrics"), "the volume's disk is measured")
        assert value(node, "kvstore_volume_disk_bytes", tier="nvme") == size
        assert 0 < value(node, "kvstore_volume_disk_free_bytes", tier="nvme") < size
        cluster.kill("metadata")
        wait_until(lambda: value(node, "kvstore_node_registered") == 0, "the node is not registered")


def test_node_remote_metrics_require_permission(tmp_path: Path) -> None:
    node = NodeConfig(node_id="a", run_dir=tmp_path, dram_bytes=1 << 20, listen="127.0.0.1:0", data_listen="127.0.0.1:0")
    with pytest.raises(InvalidArgument, match="set allow_insecure_metrics"):
        NodeDaemon(node.model_copy(update={"metrics_listen": "0.0.0.0:0"}))
    with pytest.raises(InvalidArgument, match=r"requires TLS; set node\.tls, or node\.allow_insecure_remote"):
        NodeDaemon(node.model_copy(update={"listen": "0.0.0.0:0", "allow_insecure_metrics": True}))
    settings = (("metrics_listen", "0.0.0.0:0"), ("allow_insecure_metrics", "true"))
    with LocalCluster([NodeSpec("a", settings=settings)], tmp_path / "store") as cluster:
        port = cluster.node("a").metrics_address.rpartition(":")[2]
        assert value(f"127.0.0.1:{port}", "kvstore_node_registered") == 1


@pytest.fixture
def traced(tmp_path: Path) -> Callable[..., Path]:
    """Enable traces of this process, in a separate file."""
    file = tmp_path / "client.jsonl"
    tracing.set_up("file", "engine", file=file)
    yield lambda: file
    tracing.shut_down()


def test_load_from_peer_is_one_trace(tmp_path: Path, traced: Callable[[], Path]) -> None:
    file = tmp_path / "spans.jsonl"
    settings = {"KVSTORE_OBSERVE__TRACES": "file", "KVSTORE_OBSERVE__TRACES_FILE": str(file), "KVSTORE_OBSERVE__SLOW_LOAD": "0ms"}
    settings |= {"KVSTORE_LOG__FORMAT": "json"}
    with pytest.MonkeyPatch.context() as environment:
        for name, wanted in settings.items():
            environment.setenv(name, wanted)
        with LocalCluster([NodeSpec("a"), NodeSpec("b")], tmp_path / "c") as cluster:
            with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("b").local_socket) as other:
                keys = stored(other)
            with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket) as client:
                out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
                assert client.load(keys, out).hit_blocks == BLOCKS
                (record,) = client.recent_loads.slowest()
            log = cluster.node("a").log_path
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    slow = [line for line in lines if line["message"].startswith("load slow")]
    assert [line["request_id"] for line in slow] == [record.request_id], "the node's log names the client's request"
    tracing.shut_down()
    spans = [json.loads(line) for path in (file, traced()) for line in path.read_text().splitlines()]
    root = next(span for span in spans if span["name"] == "kvclient.load")
    mine = [span for span in spans if span["context"]["trace_id"] == root["context"]["trace_id"]]
    by_name = {span["name"]: span for span in mine}
    services = {span["resource"]["attributes"]["service.name"] for span in mine}
    assert {"kvclient.load", "Lookup", "Load", "peer.read", "IssueTicket"} <= by_name.keys()
    assert services == {"engine", "kvstore-metadata", "kvstore-node"}
    for child in ("Lookup", "Load"):
        assert by_name[child]["parent_id"] == root["context"]["span_id"]
    assert by_name["peer.read"]["parent_id"] == by_name["Load"]["context"]["span_id"]
    assert by_name["IssueTicket"]["resource"]["attributes"]["node"] == "b", "the peer's span"
    assert by_name["peer.read"]["attributes"] == {"peer": "b", "blocks": BLOCKS}


def test_disabled_traces_import_nothing() -> None:
    import subprocess

    program = (
        "import sys; import kvclient; from kvclient import *; import kvstore.node.daemon; print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_load_source_killed_counts_unavailable(tmp_path: Path) -> None:
    """The node counts blocks that it could not load, so alert rules need no metrics of the engine."""
    with LocalCluster([NodeSpec("a"), NodeSpec("b")], tmp_path) as cluster:
        with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("b").local_socket) as writer:
            keys = stored(writer)
        local = cluster.node("a")
        with KVClient.connect(cluster.metadata_address, SPEC, node=local.local_socket) as client:
            found = client.lookup(keys)
            assert found.hit_blocks == BLOCKS
            cluster.kill("b")
            out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
            assert client.load(found, out).hit_blocks == 0
        assert value(local.metrics_address, "kvstore_node_load_blocks_total") == BLOCKS
        assert value(local.metrics_address, "kvstore_node_load_missed_blocks_total", reason="unavailable") == BLOCKS
