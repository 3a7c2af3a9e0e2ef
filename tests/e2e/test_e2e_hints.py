"""Hints through the client in real processes: protected, ended, rejected, switched off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from conftest import Engine, Store
from kvclient import InvalidArgument, RequestHint
from kvclient.aio import AsyncKVClient
from kvproto.v1 import node_pb2
from kvstore.core.errors import KVStoreError
from kvstore.embedded.cluster import NodeSpec
from kvstore.rpc.client import call
from support.wait import wait_until

MIB = 1 << 20


def counter(store: Store, name: str, node: str = "n1") -> int:
    return int(store.node_stats(node).counters.get(name, 0))


def flood(engine: Engine, chains: int, blocks: int = 16) -> None:
    for number in range(chains):
        engine.store(f"other-{number}", blocks, wait_visible=True)


def chains_to_fill(engine: Engine, dram_bytes: int, blocks: int = 16) -> int:
    return 2 * dram_bytes // (blocks * engine.spec.block_bytes)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_hint_protects_a_session_between_turns(make_store: Callable[..., Store], share: float) -> None:
    store = make_store(NodeSpec("n1", dram_bytes=16 * MIB, settings=(("hint_share", share),)))
    engine = store.engine("n1")
    engine.store("chat", 16, wait_visible=True)
    keys = engine.keys("chat", 16)
    assert engine.client.hints.keep("chat", keys, keep_for_s=600.0, next_turn_s=30.0)
    wait_until(lambda: engine.client.stats().get("client_hints_total", 0) == 1)
    if share:
        wait_until(lambda: counter(store, "node_hinted_protected_blocks_total") == 16)
    flood(engine, chains_to_fill(engine, 16 * MIB))
    assert engine.load_keys(keys).hit_blocks == (16 if share else 0)
    assert asyncio.run(hint_async(engine, keys))
    if share:
        wait_until(lambda: counter(store, "node_hinted_dropped_blocks_total") == 16)
    else:
        wait_until(lambda: counter(store, "node_hints_off_total") == 2)


async def hint_async(engine: Engine, keys: list[object]) -> bool:
    return AsyncKVClient(engine.client).hints.end("chat", keys)  # type: ignore[arg-type]


def test_client_rejects_impossible_hints(make_store: Callable[..., Store]) -> None:
    hints = make_store(NodeSpec("n1", dram_bytes=16 * MIB)).engine("n1").client.hints
    wrong: list[dict[str, object]] = [
        {"session": ""}, {"session": "x" * 65}, {"session": "a\nb"}, {"session": "\ud800"}, {"session": 7}, {"keep_for_s": -1.0},
        {"keep_for_s": 3601.0}, {"keep_for_s": float("nan")}, {"next_turn_s": -1.0}, {"next_turn_s": 1e9}, {"priority": -1},
        {"priority": 10}, {"priority": True}, {"keys": bytes(15)}, {"keys": []},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(InvalidArgument):
            hints.keep(**{"session": "s", "keys": bytes(16), **one})  # type: ignore[arg-type]


def test_request_hint_without_keys_is_not_sent(make_store: Callable[..., Store]) -> None:
    hints = make_store(NodeSpec("n1", dram_bytes=16 * MIB)).engine("n1").client.hints
    assert not hints.give(RequestHint("s"), [])
    assert hints.give(RequestHint("s", end=True), [])


def test_node_rejects_hostile_hints(make_store: Callable[..., Store]) -> None:
    store = make_store(NodeSpec("n1", dram_bytes=16 * MIB))
    engine = store.engine("n1")
    session = engine.client.context.local.session()  # type: ignore[union-attr]
    assert session is not None
    keep = {"session_id": session.session_id, "session": "s", "kind": node_pb2.HINT_KIND_KEEP, "keys": bytes(16), "keep_ms": 1000}
    wrong: list[dict[str, object]] = [
        {"session": "x" * 65}, {"session": ""}, {"session": "\x00"}, {"kind": 0}, {"kind": 99}, {"keys": bytes(15)},
        {"keep_ms": 3_600_001}, {"next_turn_ms": 4_294_967_295}, {"priority": 10}, {"session_id": bytes(16)},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(KVStoreError):
            call(session.stub.Hint, node_pb2.HintRequest(**{**keep, **one}), 5.0)  # type: ignore[arg-type]
    assert counter(store, "node_hints_rejected_total") == len(wrong) - 1, "the last one has no session"
    assert counter(store, "node_hinted_protected_blocks_total") == 0
    assert call(session.stub.Hint, node_pb2.HintRequest(**keep), 5.0).protected_blocks == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("hint_nodes", [4, 0])
def test_hint_reaches_nodes_that_hold_the_session(make_store: Callable[..., Store], hint_nodes: int) -> None:
    store = make_store(
        NodeSpec("n1", dram_bytes=16 * MIB), NodeSpec("n2", roles=("storage",), dram_bytes=16 * MIB, nvme_bytes=32 * MIB)
    )
    store.engine("n2").store("chat", 16, durable=True, wait_visible=True)
    engine = store.engine("n1", hint_nodes=hint_nodes)
    keys = engine.keys("chat", 24)
    assert engine.load_keys(keys[:16]).hit_blocks == 16
    engine.client.hints.keep("chat", keys, keep_for_s=600.0, next_turn_s=1.0)
    if hint_nodes:
        wait_until(lambda: counter(store, "node_hinted_protected_blocks_total", "n2") == 24)
        wait_until(lambda: engine.client.stats().get("client_hints_to_other_nodes_total", 0) == 1)
    engine.client.hints.end("chat")
    if hint_nodes:
        wait_until(lambda: counter(store, "node_hinted_dropped_blocks_total", "n2") == 16, "the keys are remembered by name")
    wait_until(lambda: counter(store, "node_hints_end_total") == 1)
    assert counter(store, "node_hints_keep_total", "n2") == (1 if hint_nodes else 0)
    assert counter(store, "node_hinted_reads_ahead_total", "n2") == 0, "the engine is on another host"


def test_hint_to_a_dead_node_is_counted(make_store: Callable[..., Store]) -> None:
    store = make_store(NodeSpec("n1", dram_bytes=16 * MIB), NodeSpec("n2", dram_bytes=16 * MIB))
    store.engine("n2").store("chat", 16, wait_visible=True)
    engine = store.engine("n1")
    keys = engine.keys("chat", 16)
    assert engine.client.lookup(keys).hit_blocks == 16
    store.cluster.kill("n2")
    assert engine.client.hints.keep("chat", keys), "the own node has it"
    wait_until(lambda: engine.client.stats().get("client_hints_failed_total", 0) == 1)
    wait_until(lambda: counter(store, "node_hints_keep_total") == 1)
