"""Loads against scripted nodes: right bytes and outcomes, bounded time, and no writes to the buffer afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, payloads

from kvclient import CacheSpec, KVClient, Outcome, Tier
from kvclient.results import PATH_LOCAL, PATH_PREFILL
from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.checksum import layer_checksums
from kvstore.core.errors import InvalidArgument, KVStoreError, LeaseLost, Unavailable
from kvstore.core.types import unpack_keys
from kvstore.transport.contract import ReadRequest
from support.chains import token_chain
from support.client_parts import session_of
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
MakeNode = Callable[..., FakeNode]
Progress = Iterator[node_pb2.LoadProgress]


def fresh(spec: CacheSpec, blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.zeros((blocks, spec.block_bytes), np.uint8)


# ---------------------------------------------------------------- with a local node
@pytest.mark.parametrize("verify", ["auto", "always", "never"])
def test_load_hit_comes_from_arena(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient, verify: str
) -> None:
    keys = token_chain(spec, 20)
    near.blocks.hold(keys[:15])
    metadata.runs = [(0, 15, near)]
    client = make_client(near)
    lookup = client.lookup(keys)
    assert (lookup.hit_blocks, lookup.runs[0].node_id, lookup.runs[0].tier) == (15, "near", Tier.DRAM)
    out = fresh(spec, 15)
    result = client.load(lookup, out, verify=verify)  # type: ignore[arg-type]
    assert (result.hit_blocks, result.error) == (15, None)
    assert np.array_equal(out, payloads(keys[:15], spec.shape))
    size = 15 * spec.block_bytes
    assert (result.bytes_by_path, result.bytes_by_node, result.bytes_by_tier) == (
        {PATH_LOCAL: size},
        {"near": size},
        {Tier.DRAM: size},
    )
    near.wait_called("Release")


def test_load_by_keys_finds_unpublished_blocks(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 10)
    near.blocks.hold([*keys[:4], *keys[6:8]])
    out = fresh(spec, 10)
    result = make_client(near).load(b"".join(keys), out)
    assert result.hit_blocks == 4
    assert [result.outcome(block) is Outcome.HIT for block in range(10)] == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 2
    assert np.array_equal(out[:4], payloads(keys[:4], spec.shape))
    assert not out[4:6].any()


def test_load_middle_of_chain(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    far = make_node("far")
    keys = token_chain(spec, 10)
    near.blocks.hold(keys)
    metadata.runs = [(0, 10, near), (2, 5, far)]
    client = make_client(near)
    out = fresh(spec, 3)
    assert client.load(client.lookup(keys).part(4, 7), out).hit_blocks == 3
    assert np.array_equal(out, payloads(keys[4:7], spec.shape))
    request = next(request for name, request in near.calls if name == "Load")
    assert (request.parent, request.depth, unpack_keys(request.keys)) == (keys[3], 4, keys[4:7])
    assert [(source.start, source.count, source.node_id) for source in request.sources] == [(0, 3, "far")]
    lookups = metadata.calls.count("Lookup")
    assert client.load(keys[4:7], out, parent=keys[3], depth=4).hit_blocks == 3
    assert metadata.calls.count("Lookup") == lookups  # the index knows chains from their head only
    with pytest.raises(InvalidArgument, match="parent"):
        client.load(keys[4:7], out, depth=4)


def test_load_of_resident_blocks_is_one_call(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    near.all_resident = True
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    out = fresh(spec, 6)
    assert client.load(client.lookup(keys), out).hit_blocks == 6
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert "Load" not in near.names()
    near.wait_called("Release")


def test_load_of_evicted_blocks_continues_with_stream(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    near.all_resident = True
    keys = token_chain(spec, 6)
    near.blocks.hold(keys[:5])  # the last one has left the arena since the lookup
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    out = fresh(spec, 6)
    assert client.load(client.lookup(keys), out).hit_blocks == 5
    assert np.array_equal(out[:5], payloads(keys[:5], spec.shape))
    loads = [name for name in near.names() if name.startswith("Load")]
    assert loads == ["LoadResident", "Load"]


def test_load_resident_refused_is_a_miss(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    near.fail["LoadResident"] = Unavailable("going away")
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    result = client.load(client.lookup(keys), fresh(spec, 6))
    assert result.hit_blocks == 0
    assert isinstance(result.error, Unavailable)


def test_load_verify_always_finds_corrupt_bytes(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> Progress:
        message = near.progress(keys, checksums=True)
        at = int.from_bytes(message.runs[3].offsets, "little") + spec.block_bytes - 1
        near.arena[at : at + 1] = bytes([near.arena[at] ^ 1])
        yield message

    near.load_script = script
    client = make_client(near)
    for load in (
        lambda out: client.load(keys, out, verify="always"),
        lambda out: client.start_load(keys, out, verify="always").result(),
    ):
        result = load(fresh(spec, 6))
        assert (result.hit_blocks, result.count(Outcome.CORRUPT), result.outcome(3)) == (3, 1, Outcome.CORRUPT)
        assert result.count(Outcome.HIT) == 5
    assert client.stats()["client_missed_corrupt_blocks_total"] == 2


def test_load_copied_after_lease_is_requested_again(
    spec: CacheSpec, make_node: MakeNode, make_client: MakeClient, clock: SkewedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node("short", lease_ms=1_000)
    keys = token_chain(spec, 8)
    node.blocks.hold(keys)
    client = make_client(node)
    session = session_of(client)
    copy_out, slow = session.arena.begin_copy_out, [5]  # type: ignore[union-attr]

    def copying(offsets: object, buffer: object, first: int, *further: object) -> object:
        good = copy_out(offsets, buffer, first, *further)  # type: ignore[arg-type]
        if first in slow:
            slow.remove(first)
            clock.ahead_s += 1.0
        return good

    monkeypatch.setattr(session.arena, "begin_copy_out", copying)  # type: ignore[union-attr]
    out = fresh(spec, 8)
    result = client.load(keys, out)
    assert result.hit_blocks == 8
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert client.stats()["client_lease_expired_blocks_total"] == 3
    again = [unpack_keys(request.keys) for name, request in node.calls if name == "Load"]
    assert again == [keys, keys[5:]]


def test_load_with_too_short_leases_has_no_hits(spec: CacheSpec, make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("short", lease_ms=40)  # less than the margin
    keys = token_chain(spec, 4)
    node.blocks.hold(keys)
    client = make_client(node)
    for result in (client.load(keys, fresh(spec, 4)), client.start_load(keys, fresh(spec, 4)).result()):
        assert (result.hit_blocks, result.count(Outcome.UNAVAILABLE)) == (0, 4)


IMPOSSIBLE = pytest.mark.parametrize(
    "run",
    [
        node_pb2.LoadedRun(start=3, count=2, outcome=common_pb2.OUTCOME_MISS),
        node_pb2.LoadedRun(start=0, count=0, outcome=common_pb2.OUTCOME_MISS),
        node_pb2.LoadedRun(start=0, count=1, outcome=common_pb2.OUTCOME_UNSPECIFIED),
        node_pb2.LoadedRun(start=0, count=1, outcome=common_pb2.OUTCOME_HIT, tier=common_pb2.TIER_DRAM, offsets=b"\xff" * 8),
        node_pb2.LoadedRun(
            start=0, count=1, outcome=common_pb2.OUTCOME_HIT, tier=common_pb2.TIER_DRAM, offsets=(8 << 20).to_bytes(8, "little")
        ),
        node_pb2.LoadedRun(start=0, count=2, outcome=common_pb2.OUTCOME_HIT, tier=common_pb2.TIER_DRAM, offsets=bytes(8)),
        node_pb2.LoadedRun(start=0, count=1, outcome=common_pb2.OUTCOME_HIT, tier=common_pb2.TIER_UNSPECIFIED, offsets=bytes(8)),
    ],
)
"""Answers for four blocks: ranges outside the request, and hits outside the arena, without an offset or without a tier."""


@IMPOSSIBLE
def test_load_with_impossible_answers_misses(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, run: node_pb2.LoadedRun
) -> None:
    near.load_script = lambda request, context: iter([node_pb2.LoadProgress(runs=[run], lease_id=1)])
    out = fresh(spec, 4)
    result = make_client(near).load(token_chain(spec, 4), out)
    assert result.count(Outcome.HIT) == 0
    assert isinstance(result.error, KVStoreError)
    assert not out.any()


@IMPOSSIBLE
def test_load_resident_with_impossible_answers_misses(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient, run: node_pb2.LoadedRun
) -> None:
    keys = token_chain(spec, 4)
    near.resident_script = lambda request, context: node_pb2.LoadProgress(runs=[run], lease_id=1)
    metadata.runs = [(0, 4, near)]
    client = make_client(near)
    out = fresh(spec, 4)
    result = client.load(client.lookup(keys), out)
    assert "LoadResident" in near.names()
    assert result.count(Outcome.HIT) == 0
    assert isinstance(result.error, KVStoreError)
    assert not out.any()


def test_load_resident_partial_answer_gives_no_other_hits(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    near.resident_script = lambda request, context: near.progress(keys[:2])
    near.load_script = lambda request, context: iter(())
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    out = fresh(spec, 6)
    result = client.load(client.lookup(keys), out)
    assert "LoadResident" in near.names()
    assert (result.hit_blocks, result.count(Outcome.HIT)) == (2, 2)
    assert np.array_equal(out[:2], payloads(keys[:2], spec.shape))
    assert not out[2:].any()


def test_load_resident_copied_after_lease_has_no_hits(
    spec: CacheSpec,
    make_node: MakeNode,
    metadata: FakeMetadata,
    make_client: MakeClient,
    clock: SkewedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = make_node("short", lease_ms=1_000)
    node.all_resident = True
    keys = token_chain(spec, 8)
    node.blocks.hold(keys)
    metadata.runs = [(0, 8, node)]
    client = make_client(node)
    lookup = client.lookup(keys)
    arena = session_of(client).arena
    copy_out, copied = arena.begin_copy_out, []  # type: ignore[union-attr]

    def copying(*arguments: object) -> object:
        good = copy_out(*arguments)  # type: ignore[arg-type]
        copied.append(arguments)
        clock.ahead_s += 1.0  # the lease ends before the copy does
        return good

    monkeypatch.setattr(arena, "begin_copy_out", copying)
    result = client.load(lookup, fresh(spec, 8))
    assert copied
    assert "LoadResident" in node.names()
    assert (result.hit_blocks, result.count(Outcome.HIT)) == (0, 0)
    assert client.stats()["client_lease_expired_blocks_total"] >= 8


def test_load_resident_verify_always_finds_corrupt_bytes(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> node_pb2.LoadProgress:
        message = near.progress(keys, checksums=request.want_checksums)
        at = int.from_bytes(message.runs[3].offsets, "little") + spec.block_bytes - 1
        near.arena[at : at + 1] = bytes([near.arena[at] ^ 1])
        return message

    near.resident_script = script
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    result = client.load(client.lookup(keys), fresh(spec, 6), verify="always")
    assert (result.hit_blocks, result.count(Outcome.HIT), result.outcome(3)) == (3, 5, Outcome.CORRUPT)
    assert [name for name in near.names() if name.startswith("Load")] == ["LoadResident"]


def test_load_resident_from_hung_node_misses_at_deadline(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    over = threading.Event()

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> node_pb2.LoadProgress:
        over.wait(10)
        return near.progress(keys)

    near.resident_script = script
    metadata.runs = [(0, 6, near)]
    client = make_client(near)
    out = fresh(spec, 6)
    try:
        result = client.load(client.lookup(keys), out, deadline_s=0.3)
        assert (result.hit_blocks, result.count(Outcome.HIT)) == (0, 0)
        assert 0.25 < result.seconds < 5
        assert "LoadResident" in near.names()
    finally:
        over.set()
    assert not out.any()


def test_load_blocks_before_node_death_count(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 10)
    near.blocks.hold(keys)

    def script(request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Progress:
        yield near.progress(keys[:4])
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    near.load_script = script
    client = make_client(near)
    out = fresh(spec, 10)
    result = client.load(keys, out)
    assert (result.hit_blocks, result.count(Outcome.UNAVAILABLE)) == (4, 6)
    assert isinstance(result.error, Unavailable)
    assert np.array_equal(out[:4], payloads(keys[:4], spec.shape))


def test_load_from_stalled_node_ends_at_deadline(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    ended = threading.Event()

    def script(request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Progress:
        yield near.progress(keys[:2])
        context.add_callback(ended.set)
        ended.wait(10)

    near.load_script = script
    client = make_client(near)
    result = client.load(keys, fresh(spec, 6), deadline_s=0.3)
    assert (result.hit_blocks, result.count(Outcome.TIMEOUT)) == (2, 4)
    assert 0.25 < result.seconds < 5
    assert ended.wait(5)  # the node received the order to stop


def test_load_cancel_returns_and_leaves_buffer_alone(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    ended = threading.Event()

    def script(request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Progress:
        context.add_callback(ended.set)
        yield near.progress(keys[:2])
        ended.wait(10)
        yield near.progress(keys[2:], 2)

    near.load_script = script
    out = fresh(spec, 6)
    handle = make_client(near).start_load(keys, out, layerwise=False)
    near.wait_called("Load")
    assert not handle.done
    result = handle.result(0.05)  # not there in time: cancelled
    assert handle.done
    assert result.hit_blocks <= 2
    assert result.count(Outcome.TIMEOUT) >= 4
    before = out.copy()
    assert ended.wait(5)
    assert np.array_equal(out, before)


def test_load_with_bad_arguments_raises(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near)
    keys = token_chain(spec, 2)
    for wrong in (
        lambda: client.load(keys, bytearray(1)),
        lambda: client.load(keys, bytes(2 * spec.block_bytes)),
        lambda: client.load(b"odd", bytearray()),
        lambda: client.load([b"short"], bytearray(spec.block_bytes)),
        lambda: client.load(["text"], bytearray(spec.block_bytes)),  # type: ignore[list-item]
        lambda: client.load(keys, bytearray(2 * spec.block_bytes), deadline_s=0),
        lambda: client.load(keys, bytearray(2 * spec.block_bytes), verify="sometimes"),  # type: ignore[arg-type]
        lambda: client.lookup([b"short"]),
        lambda: client.lookup(bytes(16 * 65_537)),
        lambda: client.lookup(keys).part(0, 3),
    ):
        with pytest.raises(InvalidArgument):
            wrong()
    assert client.load([], bytearray()).hit_blocks == 0


# ---------------------------------------------------------------- layer by layer
def test_layerwise_load_announces_layers_in_order(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 30)
    near.blocks.hold(keys)
    metadata.runs = [(0, 30, near)]
    near.load_script = lambda request, _: iter([near.progress(keys[:10]), near.progress(keys[10:], 10)])
    out = np.zeros((spec.layers, 30, spec.layer_block_bytes), np.uint8)  # a layer-major cache
    expected = payloads(keys, spec.shape).reshape(30, spec.layers, -1)
    client = make_client(near)
    with client.start_load(client.lookup(keys), out.transpose(1, 0, 2)) as handle:
        for layer in range(spec.layers):
            assert handle.wait_layer(layer)
            assert handle.promised_blocks == 30
            assert np.array_equal(out[layer], expected[:, layer])
        assert handle.result().hit_blocks == 30
        with pytest.raises(InvalidArgument):
            handle.wait_layer(spec.layers)


def test_layerwise_load_announces_first_layer_early(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = token_chain(spec, 8)
    near.blocks.hold(keys)
    client = make_client(near)
    session = session_of(client)
    copy_out, may_go_on = session.arena.begin_copy_out, threading.Event()  # type: ignore[union-attr]

    def paused(offsets: object, buffer: object, first: int, first_layer: int, *further: object) -> object:
        assert first_layer == 0 or may_go_on.wait(10)
        return copy_out(offsets, buffer, first, first_layer, *further)  # type: ignore[arg-type]

    monkeypatch.setattr(session.arena, "begin_copy_out", paused)  # type: ignore[union-attr]
    out = fresh(spec, 8)
    handle = client.start_load(keys, out)
    assert handle.wait_layer(0, 5)
    size = spec.layer_block_bytes
    assert np.array_equal(out[:, :size], payloads(keys, spec.shape)[:, :size])
    assert not handle.wait_layer(1, 0.05)
    may_go_on.set()
    assert handle.wait_layer(2, 5)
    assert handle.result().hit_blocks == 8


def test_layerwise_load_broken_shrinks_its_promise(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 8)
    near.blocks.hold(keys[:5])
    client = make_client(near)
    handle = client.start_load(keys, fresh(spec, 8))
    assert handle.wait_layer(0, 5)
    assert handle.promised_blocks == 5
    assert handle.result().hit_blocks == 5


def test_layerwise_load_larger_than_arena_completes(spec: CacheSpec, make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("small", arena_bytes=128 << 10)
    keys = token_chain(spec, 60)
    node.blocks.hold(keys)
    released = 0

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> Progress:
        nonlocal released
        for at in range(0, 60, 10):
            yield node.progress(keys[at : at + 10], at)
            released += 1
            node.wait_called("Release", released)  # no space for more before it

    node.load_script = script
    client = make_client(node)
    out = fresh(spec, 60)
    result = client.start_load(keys, out).result()
    assert result.hit_blocks == 60
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert client.stats()["client_layerwise_too_large_total"] == 1


def test_load_releases_leases_while_it_waits(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 12)
    near.blocks.hold(keys)

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> Progress:
        for at in range(12):  # far less than a sixteenth of the arena, and yet what comes needs its space
            yield near.progress(keys[at : at + 1], at)
            near.wait_called("Release", at + 1)

    near.load_script = script
    out = fresh(spec, 12)
    assert make_client(near).load(keys, out).hit_blocks == 12
    assert np.array_equal(out, payloads(keys, spec.shape))


@pytest.mark.parametrize("waits", [False, True])
def test_layerwise_load_waiting_releases_its_leases(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, waits: bool
) -> None:
    keys = token_chain(spec, 12)
    near.blocks.hold(keys)

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> Progress:
        yield node_pb2.LoadProgress()  # nothing is held yet
        yield near.progress(keys[:4], 0)
        yield near.progress(keys[4:8], 4)
        if waits:
            yield node_pb2.LoadProgress()
            near.wait_called("Release", 1)
        yield near.progress(keys[8:], 8)

    near.load_script = script
    client = make_client(near)
    out = fresh(spec, 12)
    assert client.start_load(keys, out).result().hit_blocks == 12
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert client.stats().get("client_layerwise_held_up_total", 0) == waits


# ---------------------------------------------------------------- other nodes
def test_load_without_local_node_uses_tcp(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    one, two = make_node("one"), make_node("two")
    keys = token_chain(spec, 12)
    one.blocks.hold(keys[:7])
    two.blocks.hold(keys[7:])
    metadata.runs = [(0, 7, one), (7, 5, two)]
    client = make_client(None)
    for layerwise in (False, True):
        out = fresh(spec, 12)
        handle = client.start_load(client.lookup(keys), out, layerwise=layerwise)
        assert all(handle.wait_layer(layer) for layer in range(spec.layers))
        result = handle.result()
        assert (result.hit_blocks, result.error) == (12, None)
        assert np.array_equal(out, payloads(keys, spec.shape))
        assert result.bytes_by_node == {"one": 7 * spec.block_bytes, "two": 5 * spec.block_bytes}
        assert result.bytes_by_path == {PATH_PREFILL: 12 * spec.block_bytes}
    assert "OpenSession" not in one.names()


def test_load_dead_source_uses_another_replica(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    dead, stale, good = make_node("dead"), make_node("stale"), make_node("good")
    keys = token_chain(spec, 10)
    good.blocks.hold(keys)
    stale.blocks.hold(keys[:2])
    metadata.runs = [(0, 5, dead), (5, 5, stale), (0, 10, good)]
    client = make_client(None)
    lookup = client.lookup(keys)
    dead.stop()
    out = fresh(spec, 10)
    result = client.load(lookup, out)
    assert result.hit_blocks == 10
    assert result.bytes_by_node == {"good": 10 * spec.block_bytes}
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert client.stats()["client_fallback_blocks_total"] == 10


def test_load_slow_source_leaves_time_for_another(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    slow, good = make_node("slow"), make_node("good")
    keys = token_chain(spec, 4)
    good.blocks.hold(keys)
    over = threading.Event()
    slow.provider.before_read = lambda _: (over.wait(10), None)[1]
    metadata.runs = [(0, 4, slow), (0, 4, good)]
    client = make_client(None)
    out = fresh(spec, 4)
    try:
        result = client.load(client.lookup(keys), out, deadline_s=1.0)
    finally:
        over.set()
    assert result.hit_blocks == 4
    assert result.bytes_by_node == {"good": 4 * spec.block_bytes}
    assert np.array_equal(out, payloads(keys, spec.shape))


def test_load_without_sources_misses_in_bounded_time(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    node = make_node("dead")
    metadata.runs = [(0, 4, node)]
    client = make_client(None)
    lookup = client.lookup(token_chain(spec, 4))
    node.stop()
    result = client.load(lookup, fresh(spec, 4), deadline_s=2.0)
    assert (result.hit_blocks, result.count(Outcome.UNAVAILABLE)) == (0, 4)
    assert isinstance(result.error, KVStoreError)


def test_load_falls_back_from_local_node_to_holder(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    far = make_node("far")
    keys = token_chain(spec, 9)
    near.blocks.hold(keys[:3])
    far.blocks.hold(keys)
    metadata.runs = [(0, 3, near), (0, 9, far)]

    def script(request: node_pb2.LoadRequest, _: grpc.ServicerContext) -> Progress:
        yield near.progress(keys[:3])
        yield node_pb2.LoadProgress(runs=[node_pb2.LoadedRun(start=3, count=6, outcome=common_pb2.OUTCOME_NO_SPACE)])

    near.load_script = script
    client = make_client(near)
    for out, start in ((fresh(spec, 9), client.load), (fresh(spec, 9), client.start_load)):
        answer = start(client.lookup(keys), out)  # type: ignore[operator]
        result = answer if hasattr(answer, "outcomes") else answer.result()
        assert result.hit_blocks == 9
        assert np.array_equal(out, payloads(keys, spec.shape))
        assert result.bytes_by_path == {PATH_LOCAL: 3 * spec.block_bytes, PATH_PREFILL: 6 * spec.block_bytes}


def test_load_of_bytes_damaged_on_wire_misses(
    spec: CacheSpec, metadata: FakeMetadata, make_node: MakeNode, make_client: MakeClient
) -> None:
    node = make_node("liar")
    keys = token_chain(spec, 3)
    node.blocks.hold(keys)
    metadata.runs = [(0, 3, node)]
    read = node.provider.read

    def lying(request: ReadRequest) -> Iterator[object]:
        for part in read(request):
            part.checksums = part.checksums.copy()
            part.checksums[1, 2] ^= np.uint64(1)
            yield part

    node.provider.read = lying  # type: ignore[assignment,method-assign]
    client = make_client(None)
    lookup = client.lookup(keys)
    assert [client.load(lookup, fresh(spec, 3)).outcome(block) for block in range(3)] == [
        Outcome.HIT,
        Outcome.CORRUPT,
        Outcome.HIT,
    ]
    assert client.load(lookup, fresh(spec, 3), verify="never").hit_blocks == 3


def test_lost_session_is_opened_again(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 3)
    near.blocks.hold(keys)
    client = make_client(near)
    near.fail["Load"] = LeaseLost("this session has ended")
    result = client.load(keys, fresh(spec, 3))
    assert (result.hit_blocks, client.local_node) == (0, None)
    assert isinstance(result.error, LeaseLost)
    del near.fail["Load"]
    near.wait_called("OpenSession", 1)
    out = fresh(spec, 3)
    wait_until(lambda: client.load(keys, out).hit_blocks == 3)
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert near.names().count("OpenSession") == 2
    assert len(near.left) == 1  # the lost session's connection was let go


def test_checksums_of_tests_match_the_product(spec: CacheSpec) -> None:
    data = payloads(token_chain(spec, 1), spec.shape)[0]
    assert len(layer_checksums(memoryview(data), spec.shape)) == 8 * spec.layers
