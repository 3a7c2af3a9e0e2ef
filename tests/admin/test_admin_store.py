"""The admin REST API over a real store: values that it shows, and changes that it makes."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp

from kvclient import CacheSpec, KVClient
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.client import call, connect
from support.wait import wait_until

WAIT_S = 30.0
SPEC = CacheSpec(model="seen", block_tokens=16, layers=4, layer_block_bytes=4096, salt=b"pepper")
OTHER = CacheSpec(model="other", block_tokens=16, layers=4, layer_block_bytes=4096)
BLOCKS = 12
TOKENS = np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)


@dataclass
class Store:
    """Two nodes: ``a`` with a volume and a traffic cap, ``b`` with DRAM only."""

    cluster: LocalCluster
    http: AdminHttp
    engine: KVClient
    neighbour: KVClient
    """An engine on ``b``, in the other namespace."""

    @property
    def keys(self) -> list[bytes]:
        return list(self.engine.keys(TOKENS))

    def fill(self, client: KVClient, tokens: Any = TOKENS) -> list[bytes]:
        keys = list(client.keys(tokens))
        data = np.random.default_rng(1).integers(0, 256, (len(keys), SPEC.block_bytes), np.uint8)
        assert client.store(keys, data, wait_visible=True, durable=client is self.engine).held_blocks == len(keys)
        return keys

    def namespace(self, spec: CacheSpec = SPEC) -> str:
        return spec.namespace.hex()


@contextmanager
def started(folder: Path) -> Iterator[Store]:
    settings = (("compute_cap", "10GB"), ("storage_bandwidth", "1GB"))
    specs = [
        NodeSpec("a", dram_bytes=32 << 20, nvme_bytes=32 << 20, settings=settings),
        NodeSpec("b", roles=("decode",), dram_bytes=32 << 20),
    ]
    with LocalCluster(specs, folder) as cluster:
        address = cluster.start_admin().address
        with (
            KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket) as engine,
            KVClient.connect(cluster.metadata_address, OTHER, node=cluster.node("b").local_socket) as neighbour,
        ):
            made = Store(cluster, AdminHttp(address), engine, neighbour)
            made.fill(engine)
            made.fill(neighbour)
            yield made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with started(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Store]:
    """A store for one test, which may break it."""
    with started(tmp_path) as made:
        yield made


def test_overview_matches_lists_and_queries_each_node_once(store: Store) -> None:
    def asked() -> list[int]:
        with urllib.request.urlopen(f"http://{store.cluster.node('a').metrics_address}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        counts = dict(re.findall(r'^kvstore_rpc_seconds_count\{.*?method="(\w+)".*?\} (\S+)$', text, re.MULTILINE))
        return [int(float(counts.get(method, 0))) for method in ("DescribeNode", "GetNodeStats", "ListSlowLoads")]

    before = asked()
    found = store.http.get("/v1/overview")
    assert [now - then for now, then in zip(asked(), before, strict=True)] == [1, 1, 1]
    for name, path in (("nodes", "/v1/nodes"), ("volumes", "/v1/volumes"), ("activity", "/v1/activity")):
        items = store.http.get(path)["items"]
        assert [sorted(one) for one in found[name]] == [sorted(one) for one in items], "the same fields"
        key = "volume_id" if name == "volumes" else "node_id"
        assert [one[key] for one in found[name]] == [one[key] for one in items]
    assert found["volumes"] == store.http.get("/v1/volumes")["items"]
    assert (found["known_nodes"], found["unreached"], found["next_cursor"]) == (2, [], None)
    first = store.http.get("/v1/overview?limit=1")
    assert ([one["node_id"] for one in first["nodes"]], first["known_nodes"]) == (["a"], 2)
    rest = store.http.get(f"/v1/overview?cursor={first['next_cursor']}")
    assert ([one["node_id"] for one in rest["nodes"]], rest["next_cursor"]) == (["b"], None)
    assert {one["node_id"] for one in rest["volumes"]} == {"b"}


def test_cluster_healthy_reports_health_and_counts(store: Store) -> None:
    found = store.http.get("/v1/cluster")
    assert (found["health"], found["findings"]) == ("ok", [])
    assert (found["nodes_alive"], found["nodes_silent"], found["namespaces"]) == (2, 0, 2)
    assert found["metadata_version"] == found["admin_version"]
    assert found["index_blocks"] >= BLOCKS
    index = store.http.ask("GET", "/v1/index")
    assert index.etag == f'"{index.json["epoch"]}"' == f'"{found["index_epoch"]}"'


def test_nodes_are_listed_with_links(store: Store) -> None:
    a, b = store.http.all("/v1/nodes", 1)
    assert (a["node_id"], a["alive"], a["volumes"]) == ("a", True, ["a/dram", "a/nvme0"])
    storage = a["nics"][0]
    assert (storage["network"], storage["configured_bytes_per_s"], storage["planned_bytes_per_s"]) == ("storage", 10**9, 10**9)
    assert b["roles"] == ["decode"]
    detail = store.http.get("/v1/nodes/a")
    assert detail["unreached"] is None
    assert detail["process"]["sessions"] == 1
    assert detail["process"]["traffic_cap_bytes_per_s"] == 10**10
    assert {one["name"] for one in detail["process"]["staging"]} == {"prefill_buffer", "decode_buffer", "read_ahead"}
    assert store.http.get("/v1/nodes/b")["process"]["traffic_cap_bytes_per_s"] is None
    store.http.get("/v1/nodes/nobody", 404)
    page = store.http.get("/v1/nodes?limit=1")
    store.http.get(f"/v1/volumes?cursor={page['next_cursor']}", 400)


def test_volumes_are_listed_with_usage(store: Store) -> None:
    volumes = {one["volume_id"]: one for one in store.http.all("/v1/volumes", 2)}
    assert sorted(volumes) == ["a/dram", "a/nvme0", "b/dram"]
    nvme = volumes["a/nvme0"]
    assert (nvme["tier"], nvme["read_only"], nvme["quarantined_blocks"], nvme["node_alive"]) == ("nvme", None, 0, True)
    assert nvme["blocks"] == BLOCKS
    assert nvme["used_bytes"] >= BLOCKS * SPEC.block_bytes
    assert store.http.get("/v1/volumes/a/nvme0")["blocks"] == BLOCKS
    assert [one["volume_id"] for one in store.http.get("/v1/volumes?node=b")["items"]] == ["b/dram"]
    store.http.get("/v1/volumes/a/nvme7", 404)


def test_namespaces_report_usage_and_hits(store: Store) -> None:
    before = store.http.get(f"/v1/namespaces/{store.namespace()}")
    assert store.engine.lookup(store.keys).hit_blocks == BLOCKS
    found = {one["namespace_id"]: one for one in store.http.all("/v1/namespaces", 1)}
    assert set(found) == {store.namespace(), store.namespace(OTHER)}
    mine = found[store.namespace()]
    assert (mine["spec"]["model"], mine["spec"]["salted"]) == ("seen", True)
    assert "pepper" not in json.dumps(found)
    assert b"pepper".hex() not in json.dumps(found)
    assert mine["lookups"] == before["lookups"] + 1
    assert mine["hit_blocks"] - before["hit_blocks"] == BLOCKS
    usage = store.http.get(f"/v1/namespaces/{store.namespace()}/usage")
    assert usage["unreached"] == []
    assert [(one["volume_id"], one["blocks"], one["bytes"]) for one in usage["volumes"]] == [
        ("a/dram", BLOCKS, BLOCKS * SPEC.block_bytes),
        ("a/nvme0", BLOCKS, BLOCKS * SPEC.block_bytes),
    ]
    assert [one["tier"] for one in usage["tiers"]] == ["dram", "nvme"]
    store.http.get(f"/v1/namespaces/{'0' * 32}", 404)


def test_lookup_reports_hits_and_reasons_of_misses(store: Store) -> None:
    longer = [*TOKENS.tolist(), *range(1000, 1000 + 2 * SPEC.block_tokens), 5]
    found = store.http.post("/v1/blocks/lookup", {"namespace_id": store.namespace(), "tokens": longer})
    assert (found["blocks"], found["hit_blocks"]) == (BLOCKS + 2, BLOCKS)
    assert found["first_miss"] == "never stored, or evicted everywhere"
    hit, missed = found["runs"]
    assert (hit["hit"], hit["count"], hit["state"], missed["hit"], missed["count"]) == (True, BLOCKS, "held", False, 2)
    assert {(one["volume_id"], one["tier"]) for one in hit["replicas"]} == {("a/dram", "dram"), ("a/nvme0", "nvme")}
    keys = [key.hex() for key in store.keys]
    same = store.http.post("/v1/blocks/lookup", {"namespace_id": store.namespace(), "keys": keys})
    assert same["hit_blocks"] == BLOCKS, "keys are those of the tokens"
    torn = store.http.post("/v1/blocks/lookup", {"namespace_id": store.namespace(), "keys": ["f" * 32, *keys[1:]]})
    assert torn["hit_blocks"] == 0
    assert "gap before it, at depth 0" in torn["runs"][1]["why"]
    foreign = store.http.post("/v1/blocks/lookup", {"namespace_id": store.namespace(OTHER), "keys": keys[:1]})
    assert foreign["runs"][0]["state"] == "misplaced"
    one = store.http.get(f"/v1/blocks/{keys[3]}")
    assert (one["state"], one["namespace_id"], one["depth"]) == ("held", store.namespace(), 3)
    assert store.http.get(f"/v1/blocks/{'f' * 32}")["state"] == "unknown"
    for wrong in ({}, {"keys": keys[:1], "tokens": [1]}, {"tokens": [-1]}, {"keys": ["x"]}, {"keys": keys[:1], "more": 1}):
        store.http.post("/v1/blocks/lookup", {"namespace_id": store.namespace(), **wrong}, 400)
    store.http.post("/v1/blocks/lookup", {"namespace_id": "0" * 32, "tokens": [1]}, 404)


def test_plans_decisions_queues_and_slow_loads_are_listed(store: Store) -> None:
    out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    assert store.engine.load(store.engine.lookup(store.keys), out).hit_blocks == BLOCKS
    wanted = metadata_pb2.PlanLoadRequest(
        operation_id=bytes(16),
        prefill_node="a",
        decode_node="b",
        blocks=64,
        block_bytes=1 << 20,
        block_tokens=16,
        budget_ms=60_000,
    )
    with connect(store.cluster.metadata_address) as channel:
        plan = call(metadata_pb2_grpc.MetadataStub(channel).PlanLoad, wanted, WAIT_S)
    live = store.http.get("/v1/plans")["items"]
    assert [(one["plan_id"], one["blocks"]) for one in live] == [(str(plan.plan_id), 64)]
    assert sum(part["left"] for part in live[0]["parts"]) == 64
    assert store.http.get("/v1/cluster")["live_plans"] == 1
    decision = store.http.get("/v1/decisions?limit=1")["items"][0]
    assert (decision["policy"], decision["prefill_node"], decision["decode_node"]) == ("split", "a", "b")
    assert sum(part["count"] for part in decision["parts"]) == decision["blocks"]
    assert {one["node_id"] for one in decision["considered"]} == {"a", "b"}
    queues = {one["node_id"]: one for one in store.http.all("/v1/queues", 1)}
    assert sum(one["pending_bytes"] for one in queues.values()) == 64 << 20
    assert store.http.get("/v1/nodes/a")["nics"][0]["pending_bytes"] == queues["a"]["pending_bytes"]
    assert set(queues) == {"a", "b"}
    slow = store.http.get("/v1/loads/slow")
    assert slow["unreached"] == []
    slowest = slow["items"][0]
    assert slowest["reason"].startswith("fast: ") or "% of the time" in slowest["reason"]
    assert (slowest["action"] is None) == slowest["reason"].startswith("fast: ")
    assert slow["items"] == sorted(slow["items"], key=lambda one: -one["seconds"])


def test_activity_counts_loads_and_traffic(store: Store) -> None:
    before = {one["node_id"]: one for one in store.http.get("/v1/activity")["items"]}
    out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    assert store.engine.load(store.engine.lookup(store.keys), out).hit_blocks == BLOCKS
    found = store.http.get("/v1/activity")
    assert (found["unreached"], found["next_cursor"]) == ([], None)
    after = {one["node_id"]: one for one in found["items"]}
    assert list(after) == ["a", "b"]

    def loads(activity: Any) -> int:
        return sum(bucket["loads"] for one in activity["loads"] for bucket in one["buckets"])

    assert (loads(after["a"]) - loads(before["a"]), loads(after["b"]) - loads(before["b"])) == (1, 0)
    (dram,) = [one for one in after["a"]["loads"] if one["reach"] == "dram"]
    assert dram["total_s"] > 0
    assert [bucket["up_to_s"] for bucket in dram["buckets"]][-2:] == [30.0, None]
    (link,) = after["a"]["links"]
    assert link["network"] == "compute", "the one data plane, as nobody named a storage network"
    assert link["sent_bytes"] > 0
    page = store.http.get("/v1/activity?limit=1")
    assert [one["node_id"] for one in page["items"]] == ["a"]
    rest = store.http.get(f"/v1/activity?cursor={page['next_cursor']}")
    assert [one["node_id"] for one in rest["items"]] == ["b"]


def test_node_drain_is_cancelled_or_blocked(store: Store) -> None:
    assert (store.http.get("/v1/nodes/a")["state"], store.http.get("/v1/nodes/a")["drain"]) == ("active", None)
    done = store.http.post("/v1/nodes/a/drain", {"move": False})
    assert done["drain"]["move"] is False
    wait_until(lambda: store.http.get("/v1/nodes/a")["state"] == "drained", "a is drained")
    assert store.http.get("/v1/nodes/a")["drain"]["not_durable_blocks"] == 0
    assert store.http.post("/v1/nodes/a/undrain") == {"node_id": "a", "state": "active", "drain": None}
    store.fill(store.neighbour)
    store.http.post("/v1/nodes/b/drain", {})
    wait_until(lambda: store.http.get("/v1/nodes/b")["state"] == "drain_blocked", "b has nowhere to write to")
    found = store.http.get("/v1/nodes/b")["drain"]
    assert found["not_durable_blocks"] == BLOCKS
    assert found["why"]
    (finding,) = store.http.get("/v1/health")["findings"]
    assert (finding["code"], finding["severity"], finding["subject"]) == ("DRAIN_BLOCKED", "warning", "b")
    assert f"{BLOCKS} blocks would be lost" in finding["facts"]
    store.http.post("/v1/nodes/b/undrain")
    wait_until(lambda: store.http.get("/v1/cluster")["health"] == "ok", "nothing is wrong any more")
    store.http.post("/v1/nodes/nobody/drain", {}, 404)
    store.http.post("/v1/nodes/nobody/undrain", status=404)


def test_config_reports_values_and_sources(store: Store) -> None:
    metadata, admin = store.http.get("/v1/config")["processes"]
    assert (metadata["process"], admin["process"]) == ("metadata", "admin")
    shown = {one["key"]: one for one in metadata["settings"]}
    assert (shown["metadata.path_policy"]["value"], shown["metadata.path_policy"]["source"]) == ("split", "default")
    assert shown["metadata.index_path"]["source"] == "flag"
    assert not any(key.startswith("node.") for key in shown)
    node = {one["key"]: one["value"] for one in store.http.get("/v1/nodes/a/config")["settings"]}
    assert node["node.dram"] == "32MiB"


def test_volume_evict_reduces_fill_to_percentage(store: Store) -> None:
    store.fill(store.engine)
    volume = store.http.get("/v1/volumes/a/dram")
    done = store.http.post("/v1/volumes/a/dram/evict", {"to_percent": 0})
    assert done["evicted_blocks"] == volume["blocks"]
    assert (done["kept_blocks"], done["used_bytes"]) == (0, 0)
    assert store.http.get("/v1/volumes/a/nvme0")["blocks"] == BLOCKS, "durable as before"
    store.http.post("/v1/volumes/a/dram/evict", {"to_percent": 101}, 400)
    store.http.post("/v1/volumes/a/nvme7/evict", {"to_percent": 1}, 404)
    assert store.http.post("/v1/volumes/a/nvme0/evict", {"to_percent": 100})["evicted_blocks"] == 0


def test_namespace_invalidated_can_be_stored_again(store: Store) -> None:
    store.http.post(f"/v1/namespaces/{store.namespace()}/invalidate")
    store.fill(store.engine)
    only = store.http.post(f"/v1/namespaces/{store.namespace()}/evict", {"tiers": ["nvme"]})
    assert (only["complete"], only["evicted_blocks"]) == (True, BLOCKS)
    assert store.http.get("/v1/volumes/a/nvme0")["blocks"] == 0
    done = store.http.post(f"/v1/namespaces/{store.namespace()}/invalidate")
    assert (done["complete"], done["evicted_blocks"], done["kept_blocks"], done["unreached"]) == (True, BLOCKS, 0, [])
    wait_until(lambda: store.engine.lookup(store.keys).hit_blocks == 0, "nothing is found")
    assert store.neighbour.lookup(store.neighbour.keys(TOKENS)).hit_blocks == BLOCKS, "the other namespace has everything"
    store.fill(store.engine)
    assert store.engine.lookup(store.keys).hit_blocks == BLOCKS
    store.http.post(f"/v1/namespaces/{'0' * 32}/invalidate", status=404)


def test_new_weights_epoch_registers_another_namespace(store: Store) -> None:
    store.fill(store.engine)
    path = f"/v1/namespaces/{store.namespace()}/weights-epoch"
    made = store.http.post(path, {"weights_epoch": "next"})
    after = CacheSpec(model="seen", block_tokens=16, layers=4, layer_block_bytes=4096, salt=b"pepper", weights_epoch="next")
    assert made["namespace_id"] == after.namespace.hex(), "what an engine with these weights computes"
    assert made["invalidated"]["complete"]
    assert store.http.get(f"/v1/namespaces/{made['namespace_id']}")["spec"]["weights_epoch"] == "next"
    wait_until(lambda: store.engine.lookup(store.keys).hit_blocks == 0, "the old weights' blocks are gone")
    again = store.http.post(f"/v1/namespaces/{made['namespace_id']}/weights-epoch", {"weights_epoch": "next"}, 409)
    assert again["kind"] == "conflict"
    store.http.post(path, {"weights_epoch": "a\nb"}, 400)
    store.fill(store.engine)


def test_path_policy_change_requires_current_etag(store: Store) -> None:
    seen = store.http.ask("GET", "/v1/path-policy")
    assert seen.json == {"policy": "split", "configured": "split"}
    store.http.put("/v1/path-policy", {"policy": "prefill_only"}, 428)
    changed = store.http.ask("PUT", "/v1/path-policy", {"policy": "prefill_only"}, if_match=seen.etag)
    assert (changed.status, changed.etag) == (200, '"prefill_only"')
    stale = store.http.put("/v1/path-policy", {"policy": "round_robin"}, 412, if_match=seen.etag)
    assert stale["fields"]["current"] == '"prefill_only"'
    assert store.http.get("/v1/cluster")["path_policy"] == "prefill_only"
    store.http.put("/v1/path-policy", {"policy": "oracle"}, 400, if_match="*")
    assert store.http.put("/v1/path-policy", {"policy": "split"}, if_match="*") == {"policy": "split", "configured": "split"}


def test_traffic_cap_change_requires_configured_cap(store: Store) -> None:
    seen = store.http.ask("GET", "/v1/nodes/a/traffic-cap")
    assert (seen.json["bytes_per_s"], seen.etag) == (10**10, '"10000000000"')
    changed = store.http.ask("PUT", "/v1/nodes/a/traffic-cap", {"bytes_per_s": 10**9}, if_match=seen.etag)
    assert (changed.status, changed.etag) == (200, '"1000000000"')
    store.http.put("/v1/nodes/a/traffic-cap", {"bytes_per_s": 1}, 412, if_match=seen.etag)
    assert store.http.put("/v1/nodes/a/traffic-cap", {"bytes_per_s": 0}, if_match=changed.etag)["bytes_per_s"] == 0
    without = store.http.get("/v1/nodes/b/traffic-cap", 409)
    assert "node.compute_cap" in without["detail"]
    store.http.put("/v1/nodes/a/traffic-cap", {"bytes_per_s": -1}, 400, if_match="*")


def test_index_rebuild_keeps_blocks_and_namespaces(store: Store) -> None:
    store.fill(store.engine)
    assert store.http.post("/v1/nodes/a/anti-entropy") == {"node_id": "a", "repaired_ranges": 0}
    index = store.http.ask("GET", "/v1/index")
    store.http.post("/v1/index/rebuild", status=428)
    store.http.post("/v1/index/rebuild", status=412, if_match=f'"{"0" * 32}"')
    done = store.http.ask("POST", "/v1/index/rebuild", if_match=index.etag)
    assert (done.status, done.json) == (202, {"dropped_epoch": index.json["epoch"]})

    def anew() -> bool:
        answer = store.http.ask("GET", "/v1/index")
        return answer.status == 200 and answer.etag != index.etag

    wait_until(anew, "the index has another epoch")
    store.http.post("/v1/index/rebuild", status=412, if_match=index.etag)
    wait_until(lambda: store.engine.lookup(store.keys).hit_blocks == BLOCKS, "the nodes told it everything")
    wait_until(
        lambda: {one["node_id"] for one in store.http.get("/v1/nodes")["items"]} == {"a", "b"}, "both nodes have registered"
    )
    assert len(store.http.get("/v1/namespaces")["items"]) >= 2, "specs are kept"


def test_changes_are_written_to_audit_log(store: Store) -> None:
    store.http.post("/v1/volumes/b/dram/evict", {"to_percent": 99}, x_request_id="audited-1")
    store.http.post("/v1/volumes/b/none/evict", {"to_percent": 99}, 404)
    log = store.cluster.node("admin").log_path.read_text()
    lines = [line for line in log.splitlines() if "kvstore.audit" in line and '"volume.evict", "target": "b/' in line]
    assert len(lines) == 2
    assert "request_id=audited-1" in lines[0]
    done = json.loads(lines[0][lines[0].index("{") : lines[0].rindex("}") + 1])
    assert (done["who"], done["role"], done["from"], done["outcome"]) == ("local", "operator", "127.0.0.1", "done")
    assert done["result"] == {"evicted_blocks": 0, "kept_blocks": 0}
    assert '"outcome": "not_found"' in lines[1]


def test_history_has_lookups_loads_and_fill_of_nodes(store: Store) -> None:
    def loaded() -> bool:
        out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        store.engine.load(store.engine.lookup(store.fill(store.engine)), out)
        points = store.http.get("/v1/history")["points"]
        return any(point["load"] and point["lookups"] and point["throughput"]["dram"] for point in points)

    def of_both_nodes() -> list[dict[str, Any]]:
        # a node that a busy machine delays by more than one interval is missing in the newest points
        return [point for point in store.http.get("/v1/history")["points"] if point["nodes"] == 2]

    wait_until(loaded, "loads are in the history", timeout_s=WAIT_S)
    wait_until(of_both_nodes, "both nodes are in the history", timeout_s=WAIT_S)
    last = of_both_nodes()[-1]
    assert last["dram"]["capacity_bytes"] == 64 << 20
    alone = store.http.get("/v1/history?node=a&step=60")
    assert alone["points"][-1]["nodes"] == 1
    assert alone["points"][-1]["at_s"] % 60 == 0
    assert store.http.get(f"/v1/history?since={last['at_s'] + 3600}")["points"] == []
    store.http.get("/v1/history?step=15", status=400)
    store.http.get("/v1/history?node=nobody", status=404)


def test_silent_node_is_reported_and_does_not_delay(own_store: Store) -> None:
    own_store.cluster.kill("b")
    wait_until(lambda: own_store.http.get("/v1/cluster")["nodes_silent"] == 1, "b is silent")
    found = own_store.http.get("/v1/cluster")
    assert found["health"] == "error"
    assert "Node b has not reported for" in found["findings"][0]["facts"]
    detail = own_store.http.get("/v1/nodes/b")
    assert (detail["process"], detail["unreached"]) == (None, "the node does not report to the metadata server")
    assert own_store.http.get("/v1/volumes/b/dram")["quarantined_blocks"] is None
    own_store.http.get("/v1/nodes/b/config", 503)
    keys = [key.hex() for key in own_store.neighbour.keys(TOKENS)]
    missed = own_store.http.post("/v1/blocks/lookup", {"namespace_id": own_store.namespace(OTHER), "keys": keys})
    assert (missed["hit_blocks"], missed["runs"][0]["state"]) == (0, "silent")
    assert missed["first_miss"] == "only on nodes without heartbeats: b"
    done = own_store.http.post(f"/v1/namespaces/{own_store.namespace(OTHER)}/invalidate")
    assert not done["complete"]
    assert [(one["node_id"], one["kind"]) for one in done["unreached"]] == [("b", "unavailable")]
