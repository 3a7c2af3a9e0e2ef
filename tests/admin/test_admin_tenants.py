"""Quotas and retention rules in a store of real processes: set over HTTP or by command, kept, enforced and shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp
from click.testing import CliRunner

from kvclient import CacheSpec, KVClient, StoreResult
from kvstore.cli.app import root
from kvstore.config.metadata import MetadataConfig
from kvstore.core.types import NamespaceId
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.metadata.retention.settings_store import FileSettings, RuleSetting
from support.wait import wait_until

WAIT_S = 30.0
MIB = 1 << 20


def spec_of(tenant: str) -> CacheSpec:
    return CacheSpec(model="m", block_tokens=16, layers=4, layer_block_bytes=16 << 10, tenant=tenant)


BLOCK = spec_of("").block_bytes


@dataclass
class Store:
    """Two nodes with one volume each; an engine of one tenant on each node, and an engine of another tenant."""

    cluster: LocalCluster
    http: AdminHttp
    log: Path
    acme: KVClient
    far: KVClient
    """Engine of the same tenant on the other node."""
    beta: KVClient

    def keys(self, client: KVClient, chain: int, blocks: int) -> list[Any]:
        tokens = np.random.default_rng(chain).integers(0, 50_000, blocks * 16, dtype=np.uint32)
        return list(client.keys(tokens))

    def fill(self, client: KVClient, chain: int, blocks: int, *, durable: bool = True) -> StoreResult:
        keys = self.keys(client, chain, blocks)
        return client.store(keys, np.full((blocks, BLOCK), chain, np.uint8), wait_visible=True, durable=durable)

    def hits(self, client: KVClient, chain: int, blocks: int) -> int:
        data = np.zeros((blocks, BLOCK), np.uint8)
        found = client.load(self.keys(client, chain, blocks), data)
        assert (data[: found.hit_blocks] == chain).all()
        return found.hit_blocks

    def tenant(self, name: str) -> Any:
        found = [one for one in self.http.get("/v1/tenants")["items"] if one["tenant"] == name]
        return found[0] if found else None

    def command(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(root, [*arguments, "--metadata", self.cluster.metadata_address])
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return done.output

    def audited(self, action: str) -> list[dict[str, Any]]:
        lines = [line[line.index("{") :] for line in self.log.read_text().splitlines() if "kvstore.audit" in line and "{" in line]
        return [found for line in lines if (found := json.JSONDecoder().raw_decode(line)[0])["action"] == action]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    specs = [NodeSpec(name, dram_bytes=16 * MIB, nvme_bytes=32 * MIB) for name in ("a", "b")]
    folder = tmp_path_factory.mktemp("store")
    with LocalCluster(specs, folder) as cluster:
        admin = cluster.start_admin()

        def engine(tenant: str, node: str) -> KVClient:
            return KVClient.connect(cluster.metadata_address, spec_of(tenant), node=cluster.node(node).local_socket)

        with engine("acme", "a") as acme, engine("acme", "b") as far, engine("beta", "a") as beta:
            yield Store(cluster, AdminHttp(admin.address), admin.log_path, acme, far, beta)


def test_quota_spans_nodes_and_restarts_for_one_tenant(store: Store) -> None:
    http, quota = store.http, "/v1/tenants/quota?tenant=acme"
    assert store.fill(store.beta, 1, 60).durable
    assert store.fill(store.acme, 2, 60).durable
    wait_until(lambda: (store.tenant("acme") or {"nvme": {"held_bytes": 0}})["nvme"]["held_bytes"] == 60 * BLOCK, "usage is told")
    shown = http.ask("GET", quota)
    assert (shown.status, shown.json, shown.etag) == (
        200, {"tenant": "acme", "dram_bytes": None, "nvme_bytes": None}, '"dram=any,nvme=any"',
    )  # fmt: skip
    assert http.ask("PUT", quota, {"nvme_bytes": 1}).status == 428
    assert http.ask("PUT", quota, {"nvme_bytes": 1}, if_match='"dram=any,nvme=3"').status == 412
    wanted = {"dram_bytes": 40 * BLOCK, "nvme_bytes": 40 * BLOCK}
    done = http.ask("PUT", quota, wanted, if_match=shown.etag)
    assert (done.status, done.json["nvme_bytes"], done.etag) == (200, 40 * BLOCK, f'"dram={40 * BLOCK},nvme={40 * BLOCK}"')

    def within() -> bool:
        held = store.tenant("acme")
        return bool(held["dram"]["held_bytes"] <= 40 * BLOCK and held["nvme"]["held_bytes"] <= 40 * BLOCK)

    wait_until(within, "what is beyond it leaves")
    assert 0 < store.hits(store.acme, 2, 60) <= 40, "the head of the prompt is still there"
    assert store.hits(store.beta, 1, 60) == 60
    for chain in range(3, 8):  # beyond the quota on both nodes: the newest blocks stay, and no store fails
        for client in (store.acme, store.far):
            assert store.fill(client, chain, 15, durable=False).error is None
    wait_until(within, "both nodes together")
    assert store.hits(store.beta, 1, 60) == 60

    store.cluster.stop("metadata")
    store.cluster.start_metadata()
    wait_until(lambda: store.http.ask("GET", quota).status == 200, "the metadata server is back")
    assert http.get(quota) == {"tenant": "acme", **wanted}
    for action, count in (("tenant.quota.set", 3), ("tenant.quota.unset", 0)):
        assert len(store.audited(action)) == count
    last = store.audited("tenant.quota.set")[-1]
    assert (last["target"], last["outcome"], last["asked"]["nvme_bytes"]) == ("acme", "done", 40 * BLOCK)


def test_quota_restarted_node_enforces_before_engines_connect(store: Store) -> None:
    http, quota = store.http, "/v1/tenants/quota?tenant=beta"
    assert store.fill(store.beta, 1, 60).durable
    store.cluster.stop("a")
    assert http.ask("PUT", quota, {"nvme_bytes": 30 * BLOCK}, if_match="*").status == 200
    store.cluster.start_node("a")

    def held() -> int:
        volumes = {one["volume_id"]: one for one in http.get("/v1/volumes")["items"]}
        tenants = volumes["a/nvme0"]["tenants"] or []
        return sum(one["bytes"] for one in tenants if one["tenant"] == "beta")

    wait_until(lambda: 0 < held() <= 30 * BLOCK, "its volume's blocks are known for whose they are, and brought down")
    assert http.ask("DELETE", quota, if_match="*").json["nvme_bytes"] is None
    assert store.tenant("beta")["nvme"]["quota_bytes"] is None


def test_quota_commands_set_show_and_remove(store: Store) -> None:
    store.command("tenants", "set", "gamma", "--nvme", "1GiB")
    listed = json.loads(store.command("tenants", "-o", "json"))["items"]
    (gamma,) = [one for one in listed if one["tenant"] == "gamma"]
    assert (gamma["nvme"], gamma["nodes"]) == ({"held_bytes": 0, "quota_bytes": 1 << 30}, 0)
    assert "dram 5.0MiB, nvme 1.0GiB" in store.command("tenants", "set", "gamma", "--dram", "5MiB")
    assert "dram any, nvme 1.0GiB" in store.command("tenants", "set", "gamma", "--dram", "any")
    assert "gamma" in store.command("tenants")
    wait_until(lambda: store.tenant("acme")["nvme"]["held_bytes"] > 0, "something to lose")
    assert "confirm with --yes" in store.command("tenants", "set", "acme", "--nvme", "0", code=3)
    store.command("tenants", "set", "gamma", code=2)
    store.command("tenants", "unset", "gamma")
    wait_until(lambda: store.tenant("gamma") is None, "what is asked again and again may be told from a moment ago")
    assert "nothing changed" in store.command("tenants", "unset", "gamma")
    assert "default tenant" in store.command("tenants", "set", "", "--dram", "1TiB")
    store.command("tenants", "unset", "")


def test_rule_ttl_evicts_unused_and_kept_blocks_stay(store: Store) -> None:
    http = store.http
    old, kept = spec_of("acme").namespace.hex(), spec_of("beta").namespace.hex()
    for client, chain in ((store.acme, 21), (store.beta, 22)):  # the node may have restarted
        wait_until(lambda client=client, chain=chain: store.fill(client, chain, 10).held_blocks == 10, "there is a session")  # type: ignore[misc]
    path = f"/v1/namespaces/{old}/rule"
    shown = http.ask("GET", path)
    assert (shown.json, shown.etag) == (
        {"namespace_id": old, "ttl_s": None, "kept": False, "copies": 1},
        '"ttl=0,kept=no,copies=1"',
    )
    assert http.ask("PUT", path, {"ttl_s": 1}).status == 428
    assert http.ask("PUT", path, {"ttl_s": 1}, if_match='"ttl=5,kept=no,copies=1"').status == 412
    assert http.ask("PUT", path, {"ttl_s": 0}, if_match="*").status == 400
    assert http.ask("PUT", f"/v1/namespaces/{'0' * 32}/rule", {"ttl_s": 1}, if_match="*").status == 404
    assert ", kept," in store.command("namespaces", "keep", kept)
    done = http.ask("PUT", path, {"ttl_s": 1.5}, if_match=shown.etag)
    assert (done.status, done.etag, done.json["ttl_s"]) == (200, '"ttl=1500,kept=no,copies=1"', 1.5)

    def blocks(namespace: str) -> int:
        return sum(one["blocks"] for one in http.get(f"/v1/namespaces/{namespace}/usage")["tiers"])

    wait_until(lambda: blocks(old) == 0, "nobody uses it")
    assert store.hits(store.beta, 22, 10) == 10
    (listed,) = [one for one in http.get("/v1/namespaces")["items"] if one["namespace_id"] == kept]
    assert (listed["ttl_s"], listed["kept"]) == (None, True)

    # a kept namespace is protected from eviction, but not invalidation
    assert http.ask("POST", f"/v1/namespaces/{kept}/evict", {}).status == 409
    assert "kvstore namespaces unkeep" in store.command("namespaces", "evict", kept, "--yes", code=3)
    http.post("/v1/volumes/a/nvme0/evict", {"to_percent": 0})
    http.post("/v1/volumes/a/dram/evict", {"to_percent": 0})
    assert store.hits(store.beta, 22, 10) == 10
    assert http.post(f"/v1/namespaces/{kept}/invalidate")["complete"]
    assert blocks(kept) == 0
    assert "not kept" in store.command("namespaces", "unkeep", kept)
    assert "time to live 2h" in store.command("namespaces", "ttl", old, "2h")
    assert "no time to live" in store.command("namespaces", "ttl", old, "none")
    assert "not kept, 2 copies of each durable block" in store.command("namespaces", "copies", old, "2")
    assert http.ask("GET", path).json["copies"] == 2
    assert http.ask("PUT", path, {"copies": 3}, if_match="*").status == 400
    assert "2 copies" in store.command("namespaces", "keep", old), "other parts of the rule stay"
    assert "1 copy" in store.command("namespaces", "copies", old, "1")
    assert [one["outcome"] for one in store.audited("namespace.rule")][-1] == "done"


def test_rule_of_forgotten_namespace_is_listed_and_removed(store: Store) -> None:
    """The state after an index rebuild, before an engine has opened the namespace again."""
    http, orders = store.http, FileSettings(MetadataConfig(index_path=store.cluster.index_path).settings_path)
    gone, path = "ab" * 16, f"/v1/namespaces/{'ab' * 16}/rule"
    asyncio.run(orders.change(lambda known: known.with_rule(NamespaceId(bytes.fromhex(gone)), RuleSetting(60_000, True))))
    rule = {"namespace_id": gone, "ttl_s": 60.0, "kept": True, "copies": 1}
    assert rule in http.get("/v1/rules")["items"]
    assert http.get(path) == rule
    assert gone in store.command("namespaces", "rules")
    assert "time to live 2min, kept" in store.command("namespaces", "ttl", gone, "2m")
    assert "time to live 2min, not kept" in store.command("namespaces", "unkeep", "abababab")
    assert http.ask("PUT", path, {"ttl_s": 5}, if_match="*").json["ttl_s"] == 5
    assert "no time to live" in store.command("namespaces", "ttl", gone, "none")
    assert gone not in {one["namespace_id"] for one in json.loads(store.command("namespaces", "rules", "-o", "json"))["items"]}
    assert http.ask("GET", path).status == http.ask("PUT", path, {"ttl_s": 5}, if_match="*").status == 404
    store.command("namespaces", "keep", gone, code=3)
