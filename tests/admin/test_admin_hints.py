"""Hints about sessions over the admin REST API, in a store of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from admin_client import AdminHttp

from kvclient import CacheSpec, KVClient
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.node_stats import node_counter
from support.wait import wait_until

SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096, tenant="acme")
OTHER = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096, tenant="beta")
BLOCKS = 8
WAIT_S = 5.0
PATH = f"/v1/namespaces/{SPEC.namespace.hex()}/hints"


@dataclass
class Store:
    """Two nodes, with an engine on ``a`` and one of another tenant on ``b``, and a node ``off`` that ignores hints."""

    cluster: LocalCluster
    http: AdminHttp
    client: KVClient

    def keep(self, session: str) -> None:
        """Give a hint as an engine does, and wait until the node has applied it."""
        before = node_counter(self.cluster, "a", "node_hinted_protected_blocks_total")
        keys = list(self.client.keys(np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)))
        assert self.client.hints.keep(session, keys, keep_for_s=600.0)
        wait_until(lambda: node_counter(self.cluster, "a", "node_hinted_protected_blocks_total") == before + BLOCKS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    nodes = [NodeSpec(name, dram_bytes=16 << 20, settings=(("hint_share", 0.5),)) for name in ("a", "b")]
    nodes.append(NodeSpec("off", dram_bytes=16 << 20, settings=(("hint_share", 0.0), ("read_ahead", 0))))
    with LocalCluster(nodes, tmp_path_factory.mktemp("store")) as cluster:
        admin = cluster.start_admin()
        sockets = [cluster.node(name).local_socket for name in ("a", "b")]
        with (
            KVClient.connect(cluster.metadata_address, SPEC, node=sockets[0]) as client,
            KVClient.connect(cluster.metadata_address, OTHER, node=sockets[1]),
        ):
            keys = list(client.keys(np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)))
            client.store(keys, np.zeros((BLOCKS, SPEC.block_bytes), np.uint8), wait_visible=True)
            yield Store(cluster, AdminHttp(admin.address), client)


def test_rest_hint_of_known_session_reaches_its_node(store: Store) -> None:
    store.keep("chat")
    done = store.http.post(PATH, {"session": "chat", "keep_for_s": 60, "next_turn_s": 5.5, "priority": 3})
    assert done == {
        "namespace_id": SPEC.namespace.hex(), "session": "chat", "unreached": [],
        "nodes": [{"node_id": "a", "protected_blocks": BLOCKS, "dropped_blocks": 0}],
    }  # fmt: skip
    ended = store.http.post(PATH, {"session": "chat", "end": True})
    told = {one["node_id"]: one["hints"] for one in store.http.get("/v1/activity")["items"]}
    assert told == {
        "a": [
            {
                "tenant": "acme", "sessions": 0, "protected_bytes": 0, "keeps": 2, "ends": 1, "beyond_limit_blocks": 0,
                "dropped_blocks": BLOCKS,
            }
        ],
        "b": [],
        "off": [],
    }  # fmt: skip
    assert ended["nodes"] == [{"node_id": "a", "protected_blocks": 0, "dropped_blocks": BLOCKS}]
    unknown = store.http.post(PATH, {"session": "chat", "end": True}, 404)
    assert unknown["kind"] == "not_found"
    assert "node.hint_share = 0" in unknown["detail"]


def test_rest_nodes_say_whether_hints_and_reads_ahead_are_off(store: Store) -> None:
    said = {name: store.http.get(f"/v1/nodes/{name}")["process"] for name in ("a", "off")}
    found = {name: (process["hints_off"], process["read_ahead_off"]) for name, process in said.items()}
    assert found == {"a": (False, False), "off": (True, True)}


def test_rest_hint_reaches_no_other_namespace(store: Store) -> None:
    store.keep("mine")
    store.http.post(f"/v1/namespaces/{OTHER.namespace.hex()}/hints", {"session": "mine", "end": True}, 404)
    store.http.post(f"/v1/namespaces/{'0' * 32}/hints", {"session": "mine", "end": True}, 404)
    assert store.http.post(PATH, {"session": "mine"})["nodes"][0]["protected_blocks"] == BLOCKS


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"session": ""}, {"session": "x" * 65}, {"session": "\u00e9" * 33}, {"session": "a\nb"}, {"session": 7},
        {"keep_for_s": -1}, {"keep_for_s": 3601}, {"keep_for_s": "60"}, {"next_turn_s": 1e9}, {"priority": 10},
        {"priority": True}, {"end": 1}, {"other": 1},
    ],
)  # fmt: skip
def test_rest_hint_invalid_body_is_rejected(store: Store, wrong: dict[str, Any]) -> None:
    body = {"session": "chat", **wrong} if wrong else {}
    answer = store.http.ask("POST", PATH, body)
    assert (answer.status, answer.json["kind"]) == (400, "invalid_argument"), answer.raw


def test_rest_body_without_content_type_names_header(store: Store) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    answer = store.http.ask("POST", PATH, b'{"session": "chat"}', **form)
    assert (answer.status, answer.json["kind"]) == (400, "invalid_argument")
    assert "content-type: application/json" in answer.json["detail"]


def test_rest_hint_silent_node_is_left_out(store: Store) -> None:
    store.keep("chat")
    store.cluster.stop("b")
    done = store.http.post(PATH, {"session": "chat"})
    assert [node["node_id"] for node in done["nodes"]] == ["a"]
    store.cluster.stop("a")
    assert store.http.ask("POST", PATH, {"session": "chat"}).status in {404, 503}
