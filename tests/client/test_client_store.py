"""Stores against scripted nodes: prefix first, each block written once and completely."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, payloads

from kvclient import CacheSpec, KVClient, StoreOutcome
from kvclient.memory.arena import ClientArena
from kvproto.v1 import node_pb2
from kvstore.core.errors import Internal, InvalidArgument, LeaseLost, Unavailable
from kvstore.core.types import BlockKey, unpack_keys
from support.chains import token_chain

MakeClient = Callable[..., KVClient]
MakeNode = Callable[..., FakeNode]

STORED, EXISTS, IN_PROGRESS = StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS
SKIPPED, CORRUPT, LOST = StoreOutcome.SKIPPED, StoreOutcome.CORRUPT, StoreOutcome.LOST


def prepared(node: FakeNode) -> list[list[BlockKey]]:
    return [unpack_keys(request.blocks.keys) for name, request in node.calls if name == "Prepare"]


def completed(node: FakeNode) -> list[list[BlockKey]]:
    return [unpack_keys(request.keys) for name, request in node.calls if name == "Complete"]


def test_store_writes_blocks_once(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 9)
    data = payloads(keys, spec.shape)
    client = make_client(near)
    first = client.store(keys[:5], data[:5])
    assert (first.outcomes.tolist(), first.bytes_stored, first.error) == ([STORED] * 5, 5 * spec.block_bytes, None)
    second = client.store(keys, data)
    assert second.outcomes.tolist() == [EXISTS] * 5 + [STORED] * 4
    assert second.held_blocks == 9
    out = np.zeros_like(data)
    assert client.load(keys, out).hit_blocks == 9
    assert np.array_equal(out, data)
    assert completed(near) == [keys[:5], keys[5:]]


def test_store_large_goes_in_chunks(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 10)
    client = make_client(near, store_chunk_bytes=4 * spec.block_bytes)
    assert client.store(keys[1:], payloads(keys[1:], spec.shape), parent=keys[0], depth=1).held_blocks == 9
    runs = [request.blocks for name, request in near.calls if name == "Prepare"]
    assert [(run.parent, run.depth, unpack_keys(run.keys)) for run in runs] == [
        (keys[0], 1, keys[1:5]),
        (keys[4], 5, keys[5:9]),
        (keys[8], 9, keys[9:]),
    ]
    assert {run.namespace_id for run in runs} == {spec.namespace}


def test_store_heads_takes_one_call_per_chunk(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 6)
    client = make_client(near, store_chunk_bytes=4 * spec.block_bytes)
    assert client.store_heads(keys, payloads(keys, spec.shape)).held_blocks == 6
    asked = [request for name, request in near.calls if name == "Prepare"]
    assert [(one.heads, one.blocks.parent, one.blocks.depth, unpack_keys(one.blocks.keys)) for one in asked] == [
        (True, b"", 0, keys[:4]),
        (True, b"", 0, keys[4:]),
    ]


@pytest.mark.parametrize(
    ("answer", "written", "expected"),
    [
        ([STORED, EXISTS, IN_PROGRESS, STORED], [0, 3], [STORED, EXISTS, IN_PROGRESS, STORED]),
        ([STORED, STORED, SKIPPED, SKIPPED], [0, 1], [STORED, STORED, SKIPPED, SKIPPED]),
        ([STORED, SKIPPED, STORED, STORED], [0], [STORED, SKIPPED, SKIPPED, SKIPPED]),  # a node that forgot the rule
        ([SKIPPED, SKIPPED, SKIPPED, SKIPPED], None, [SKIPPED] * 4),
    ],
)
def test_store_skips_blocks_after_a_gap(
    spec: CacheSpec,
    near: FakeNode,
    make_client: MakeClient,
    answer: list[StoreOutcome],
    written: list[int] | None,
    expected: list[StoreOutcome],
) -> None:
    keys = token_chain(spec, 8)

    def script(request: node_pb2.PrepareRequest) -> node_pb2.PrepareResponse:
        if near.prepared:  # asked for the rest: there is no more space
            return node_pb2.PrepareResponse(outcomes=bytes([SKIPPED] * (len(request.blocks.keys) // 16)))
        slots = {keys[at]: near.place(bytes(spec.block_bytes)) for at, one in enumerate(answer) if one is STORED}
        near.prepared[request.operation_id] = slots
        return node_pb2.PrepareResponse(
            outcomes=bytes(answer), offsets=b"".join(at.to_bytes(8, "little") for at in slots.values())
        )

    near.prepare_script = script
    client = make_client(near, store_chunk_bytes=4 * spec.block_bytes)
    result = client.store(
        keys[:4] if all(one in (STORED, EXISTS, IN_PROGRESS) for one in answer) else keys,
        payloads(keys, spec.shape)[: 4 if all(one in (STORED, EXISTS, IN_PROGRESS) for one in answer) else 8],
    )
    assert result.outcomes.tolist()[:4] == expected
    assert set(result.outcomes.tolist()[4:]) <= {SKIPPED}
    gap = expected.index(SKIPPED) if SKIPPED in expected else 4
    asked = [keys.index(asked_keys[0]) for asked_keys in prepared(near)]
    assert asked == ([0, gap] if 0 < gap < 4 else [0])  # the rest is asked for once more, from the gap on
    assert completed(near) == ([] if written is None else [[keys[at] for at in written]])
    if answer.count(STORED) > len(written or []):
        near.wait_called("Abort")  # slots granted after the gap are freed


def test_store_asks_again_for_the_rest_of_a_chunk(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 5)

    def script(request: node_pb2.PrepareRequest) -> node_pb2.PrepareResponse:
        asked = [request.blocks.keys[at : at + 16] for at in range(0, len(request.blocks.keys), 16)]
        slots = {key: near.place(bytes(spec.block_bytes)) for key in asked[:2]}
        near.prepared[request.operation_id] = slots
        outcomes = [STORED] * len(slots) + [SKIPPED] * (len(asked) - len(slots))
        return node_pb2.PrepareResponse(
            outcomes=bytes(outcomes), offsets=b"".join(at.to_bytes(8, "little") for at in slots.values())
        )

    near.prepare_script = script
    result = make_client(near).store(keys, payloads(keys, spec.shape))
    assert result.outcomes.tolist() == [STORED] * 5
    assert completed(near) == [keys[:2], keys[2:4], keys[4:]]


def test_store_corrupt_block_ends_the_chain(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 4)
    near.complete_script = lambda request: node_pb2.CompleteResponse(outcomes=bytes([STORED, CORRUPT, STORED, STORED]))
    result = make_client(near).store(keys, payloads(keys, spec.shape))
    assert result.outcomes.tolist() == [STORED, CORRUPT, SKIPPED, SKIPPED]
    assert (result.held_blocks, result.bytes_stored) == (1, spec.block_bytes)


@pytest.mark.parametrize("response", [b"", bytes([1]), bytes([0, 0]), bytes([9, 9])])
def test_store_with_impossible_answers_stores_nothing(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, response: bytes
) -> None:
    keys = token_chain(spec, 2)
    client = make_client(near)
    near.prepare_script = lambda request: node_pb2.PrepareResponse(outcomes=response)
    result = client.store(keys, payloads(keys, spec.shape))
    assert result.outcomes.tolist() == [SKIPPED] * 2
    assert result.error is not None
    near.prepare_script = lambda request: node_pb2.PrepareResponse(outcomes=bytes([1, 1]), offsets=b"\xff" * 16)
    assert client.store(keys, payloads(keys, spec.shape)).error is not None
    near.prepare_script = lambda request: None
    near.complete_script = lambda request: node_pb2.CompleteResponse(outcomes=response)
    result = client.store(keys, payloads(keys, spec.shape))
    assert result.outcomes.tolist() == [LOST, SKIPPED]  # the outcome is unknown
    near.wait_called("Abort", 3)


def test_store_lost_session_gives_slots_back(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    client = make_client(near)
    near.fail["Prepare"] = LeaseLost("this session has ended")
    result = client.store(keys, payloads(keys, spec.shape))
    assert result.outcomes.tolist() == [SKIPPED] * 3
    assert isinstance(result.error, LeaseLost)
    with near.called:
        assert near.called.wait_for(lambda: near.left, 5)


def test_store_past_deadline_aborts(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 4)
    over = threading.Event()

    def script(request: node_pb2.PrepareRequest) -> None:
        assert 0 < request.wait_ms <= 300
        over.wait(10)

    near.prepare_script = script
    result = make_client(near).store(keys, payloads(keys, spec.shape), deadline_s=0.3)
    over.set()
    assert result.outcomes.tolist() == [SKIPPED] * 4
    assert result.seconds < 5
    assert completed(near) == []


def test_store_requests_visible_and_durable(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 2)
    result = make_client(near).store(keys, payloads(keys, spec.shape), wait_visible=True, durable=True)
    assert result.durable
    assert next(request for name, request in near.calls if name == "Complete").wait_visible_ms > 0
    assert "Flush" in near.names()


def test_store_without_local_node_uses_preferred_node(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    one, two = make_node("one"), make_node("two")
    keys = token_chain(spec, 6)
    data = payloads(keys, spec.shape)
    client = make_client(None, store_node="two", copy_chunk_bytes=4 * spec.block_bytes)
    result = client.store(keys, data)
    assert (result.outcomes.tolist(), result.error) == ([STORED] * 6, None)
    assert (len(two.blocks.held), len(one.blocks.held)) == (6, 0)
    assert client.store(keys, data).outcomes.tolist() == [EXISTS] * 6
    metadata.runs = [(0, 6, two)]
    out = np.zeros_like(data)
    assert client.load(client.lookup(keys), out).hit_blocks == 6
    assert np.array_equal(out, data)
    assert isinstance(make_client(None, store_node="three").store(keys, data).error, Unavailable)


# ---------------------------------------------------------------- layer by layer
@pytest.mark.parametrize("local", [True, False])
def test_layerwise_store_accepts_any_order(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient, local: bool
) -> None:
    node = make_node("near")
    keys = token_chain(spec, 5)
    data = payloads(keys, spec.shape)
    layers = data.reshape(5, spec.layers, -1)
    client = make_client(node if local else None)
    client.store(keys[:2], data[:2])
    with client.begin_store(keys) as handle:
        if local:
            assert handle.blocks_wanted.tolist() == [2, 3, 4]
        for layer in (2, 0, 1):
            handle.put_layer(layer, layers[:, layer] if layer else [bytes(one) for one in layers[:, layer]])
        result = handle.commit()
    assert result.outcomes.tolist() == [EXISTS] * 2 + [STORED] * 3
    assert result.bytes_stored == 3 * spec.block_bytes
    metadata.runs = [(0, 5, node)]
    out = np.zeros_like(data)
    assert client.load(client.lookup(keys), out, verify="always").hit_blocks == 5
    assert np.array_equal(out, data)


def test_layerwise_store_without_commit_stores_nothing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    layers = payloads(keys, spec.shape).reshape(3, spec.layers, -1)
    client = make_client(near)
    with client.begin_store(keys) as handle:
        handle.put_layer(0, layers[:, 0])
    near.wait_called("Abort")
    assert near.blocks.held == {}
    with pytest.raises(InvalidArgument):
        handle.put_layer(1, layers[:, 1])
    with pytest.raises(InvalidArgument):
        handle.commit()


def test_layerwise_store_wrong_use_raises(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    layers = payloads(keys, spec.shape).reshape(3, spec.layers, -1)
    with make_client(near).begin_store(keys) as handle:
        for wrong in (
            lambda: handle.put_layer(spec.layers, layers[:, 0]),
            lambda: handle.put_layer(0, layers[:2, 0]),
            lambda: handle.commit(),
        ):
            with pytest.raises(InvalidArgument):
                wrong()
        handle.put_layer(0, layers[:, 0])
        with pytest.raises(InvalidArgument, match="before"):
            handle.put_layer(0, layers[:, 0])


def test_layerwise_store_without_node_stores_nothing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    layers = payloads(keys, spec.shape).reshape(3, spec.layers, -1)
    client = make_client(near)
    near.fail["Prepare"] = Unavailable("going away")
    with client.begin_store(keys) as handle:
        for layer in range(spec.layers):
            handle.put_layer(layer, layers[:, layer])
        result = handle.commit()
    assert result.outcomes.tolist() == [SKIPPED] * 3
    assert isinstance(result.error, Unavailable)


def test_layerwise_store_failed_copy_stores_nothing(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("the arena is closed")

    keys = token_chain(spec, 3)
    layers = payloads(keys, spec.shape).reshape(3, spec.layers, -1)
    with make_client(near).begin_store(keys) as handle:
        handle.put_layer(0, layers[:, 0])
        monkeypatch.setattr(ClientArena, "copy_in", fail)
        for layer in range(1, spec.layers):
            handle.put_layer(layer, layers[:, layer])
        result = handle.commit()
    assert result.outcomes.tolist() == [SKIPPED] * 3
    assert isinstance(result.error, Unavailable)
    with near.called:
        assert near.called.wait_for(lambda: near.left, 5), "the end of the session gives the slots back"


@pytest.mark.parametrize("local", [True, False])
def test_layerwise_store_interrupted_copy_stores_nothing(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, *, local: bool
) -> None:
    """An engine that continues after an interrupt or a lack of memory publishes no half-written blocks."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    keys = token_chain(spec, 3)
    layers = payloads(keys, spec.shape).reshape(3, spec.layers, -1)
    with make_client(near if local else None).begin_store(keys) as handle:
        with monkeypatch.context() as patched:
            patched.setattr(ClientArena, "copy_in", fail)
            patched.setattr("kvclient.store.layerwise._gather", fail)
            with pytest.raises(KeyboardInterrupt):
                handle.put_layer(0, layers[:, 0])
        for layer in range(1, spec.layers):
            handle.put_layer(layer, layers[:, layer])
        with pytest.raises(InvalidArgument, match="layers are missing"):
            handle.commit()
        handle.put_layer(0, layers[:, 0])
        result = handle.commit()
    assert result.outcomes.tolist() == [SKIPPED] * 3
    assert isinstance(result.error, Internal)
    assert completed(near) == []


def test_layerwise_store_dropped_gives_slots_back(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    handle = make_client(near).begin_store(token_chain(spec, 3))
    assert len(handle.blocks_wanted) == 3
    del handle
    near.wait_called("Abort")


def test_close_aborts_layerwise_stores(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    client = make_client(near)
    handle = client.begin_store(keys)
    client.close()
    with near.called:
        assert near.called.wait_for(lambda: near.left, 5)  # the arena was let go
    with pytest.raises(InvalidArgument):
        handle.commit()
