"""Loads of several calls into a device's pages: copies overlap, end in any order, and fail; leases end under them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, payloads
from late_pages import LateDevice, LatePages

from kvclient import CacheSpec, KVClient, LoadHandle, Outcome
from kvproto.v1 import node_pb2
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, unpack_keys
from kvstore.rpc.errors import abort_arguments
from samples import sample
from support.chains import token_chain
from support.client_parts import session_of
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
Progress = Iterator[node_pb2.LoadProgress]
FAULTS = ("none", "none", "misses", "node", "device", "lease", "cancel")
GARBAGE = 0xEE


def empty_pages(spec: CacheSpec, device: LateDevice, blocks: int) -> LatePages:
    return LatePages(device, np.zeros((blocks, spec.layers, spec.layer_block_bytes), np.uint8))


class Leases:
    """The leases of a node. The bytes of a block change as soon as its lease has ended."""

    def __init__(self, near: FakeNode, client: KVClient) -> None:
        self.near = near
        self.held: dict[int, list[int]] = {}
        self.most_held = 0
        self.granted = 0
        self._lock = threading.Lock()
        releaser = session_of(client).releaser
        release = releaser.release

        def watched(lease_ids: list[int], nbytes: int = 0, *, urgent: bool = False) -> None:
            self.end(lease_ids)
            release(lease_ids, nbytes, urgent=urgent)

        releaser.release = watched  # type: ignore[method-assign]

    def progress(self, keys: list[BlockKey], start: int) -> node_pb2.LoadProgress:
        """One message, leased."""
        message = self.near.progress(keys, start)
        offsets = [int.from_bytes(run.offsets, "little") for run in message.runs if run.outcome == Outcome.HIT]
        with self._lock:
            self.granted += 1
            self.held[message.lease_id] = offsets
            self.most_held = max(self.most_held, len(self.held))
        return message

    def end(self, lease_ids: list[int] | None = None) -> None:
        """End leases, or all of them."""
        with self._lock:
            for lease_id in list(self.held) if lease_ids is None else lease_ids:
                for at in self.held.pop(lease_id, []):
                    self.near.arena[at : at + self.near.spec.block_bytes] = bytes([GARBAGE]) * self.near.spec.block_bytes


@pytest.mark.parametrize("seed", range(sample(10, 300)))
def test_pipelined_load_brings_no_wrong_byte(
    spec: CacheSpec, clock: SkewedClock, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient, seed: int
) -> None:
    rng = random.Random(seed)
    keys = token_chain(spec, rng.randint(1, 20))
    count, pieces, fault, nth = len(keys), rng.randint(1, 3), rng.choice(FAULTS), rng.randint(1, 6)
    near.blocks.hold(keys if fault != "misses" else [key for key in keys if rng.random() < 0.8])
    metadata.runs = [(0, count, near)]
    client = make_client(near, pieces_in_flight=pieces, load_chunk_bytes=rng.randint(1, 6) * spec.block_bytes)
    leases, several = Leases(near, client), rng.random() < 0.4
    calls = 0

    def script(request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Progress:
        nonlocal calls
        calls += 1
        if fault == "node" and calls == nth:
            code, message, trailing = abort_arguments(Unavailable("going away"))
            context.set_trailing_metadata(trailing)
            context.abort(code, message)
        asked = unpack_keys(request.keys)
        step = rng.randint(1, len(asked)) if several else len(asked)
        for at in range(0, len(asked), step):
            if several and rng.random() < 0.3:
                yield node_pb2.LoadProgress()
            yield leases.progress(asked[at : at + step], at)

    near.load_script = script
    if rng.random() < 0.5:  # the client knows how fast this node is: later loads may be layer-wise
        client.load(keys, np.zeros((count, spec.block_bytes), np.uint8))
    calls = 0
    device, handles = LateDevice(seed), list[LoadHandle]()

    def interrupt() -> None:
        if device.begun + 1 != nth:
            return
        if fault == "lease":
            clock.ahead_s += 1000.0
            leases.end()
        if fault == "cancel":
            wait_until(lambda: handles)
            handles[0].request_cancel()

    device.before_copy = interrupt
    if fault == "device":
        device.fail_at = nth
    pages = empty_pages(spec, device, count)
    lookup = client.lookup(keys)
    deadline_s = 2000.0 if fault == "lease" else 20.0
    handles.append(client.start_load(lookup, pages, layerwise=rng.random() < 0.4, deadline_s=deadline_s))
    result = handles[0].result()

    assert device.under_way == [], "a copy that nobody waited for"
    expected = payloads(keys, spec.shape)
    for position in np.flatnonzero(result.outcomes == Outcome.HIT).tolist():
        assert np.array_equal(pages.pages[position].reshape(-1), expected[position]), position
    kept = [at for offsets in leases.held.values() for at in offsets]  # by messages that a cancelled load did not read
    assert not device.used.intersection(kept), "a lease that nobody released"
    if not several:
        assert leases.most_held <= min(pieces, 2)
    if fault == "none":
        assert (result.hit_blocks, result.error) == (count, None)
    elif fault == "misses":
        assert result.error is None
        assert (result.outcomes == Outcome.HIT).sum() == sum(key in near.blocks.held for key in keys)
    else:
        assert result.error is None or isinstance(result.error, KVStoreError)


@pytest.mark.parametrize(("pieces", "requested"), [(1, 1), (2, 2), (4, 2)])
def test_pipelined_load_requests_while_copies_run(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient, pieces: int, requested: int
) -> None:
    keys = token_chain(spec, 8)
    near.blocks.hold(keys)
    metadata.runs = [(0, 8, near)]
    device = LateDevice()
    calls_at_wait: list[int] = []
    wait = device.wait

    def watched(copies: Any) -> None:
        calls_at_wait.append(near.names().count("Load"))
        wait(copies)

    device.wait = watched  # type: ignore[method-assign]
    client = make_client(near, pieces_in_flight=pieces, load_chunk_bytes=2 * spec.block_bytes)
    pages = empty_pages(spec, device, 8)
    assert client.start_load(client.lookup(keys), pages, layerwise=False).result().hit_blocks == 8
    assert calls_at_wait[0] == requested
    assert client.stats().get("client_pieces_ahead_total", 0) == (3 if pieces > 1 else 0)
    assert np.array_equal(pages.pages.reshape(8, -1), payloads(keys, spec.shape))


def test_pipelined_load_from_elsewhere_releases_first(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 4)
    near.blocks.hold(keys)
    metadata.runs = [(0, 2, near)]  # the others may need the space of these
    device = LateDevice()
    client = make_client(near, load_chunk_bytes=2 * spec.block_bytes)
    leases = Leases(near, client)
    near.load_script = lambda request, _: iter([leases.progress(unpack_keys(request.keys), 0)])
    assert client.load(keys, empty_pages(spec, device, 4)).hit_blocks == 4
    assert (leases.granted, leases.most_held) == (2, 1)


def test_layerwise_load_of_several_leases_stays_layerwise(
    spec: CacheSpec, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = token_chain(spec, 12)
    near.blocks.hold(keys)
    metadata.runs = [(0, 12, near)]
    client = make_client(near, load_chunk_bytes=2 * spec.block_bytes)
    arena, may_go_on = session_of(client).arena, threading.Event()
    lookup, out = client.lookup(keys), np.zeros((12, spec.block_bytes), np.uint8)
    assert client.start_load(lookup, out).result().hit_blocks == 12
    assert client.stats()["client_layerwise_too_large_total"] == 1  # it is not known yet how long this takes
    copy_out = arena.begin_copy_out

    def paused(offsets: Any, buffer: Any, first: int, first_layer: int, *further: Any) -> Any:
        assert first_layer == 0 or may_go_on.wait(10)
        return copy_out(offsets, buffer, first, first_layer, *further)

    monkeypatch.setattr(arena, "begin_copy_out", paused)
    out.fill(0)
    handle = client.start_load(lookup, out)
    assert handle.wait_layer(0, 5)
    size = spec.layer_block_bytes
    assert np.array_equal(out[:, :size], payloads(keys, spec.shape)[:, :size])
    assert not handle.wait_layer(1, 0.05)
    may_go_on.set()
    assert handle.result().hit_blocks == 12
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert client.stats()["client_layerwise_too_large_total"] == 1


def test_layerwise_load_slower_than_lease_is_blockwise(
    spec: CacheSpec, clock: SkewedClock, near: FakeNode, metadata: FakeMetadata, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 12)
    near.blocks.hold(keys)
    metadata.runs = [(0, 12, near)]
    client = make_client(near, load_chunk_bytes=2 * spec.block_bytes, default_deadline_s=100.0)
    near.load_script = lambda request, _: iter([slow(request)])

    def slow(request: node_pb2.LoadRequest) -> node_pb2.LoadProgress:
        clock.ahead_s += 1.0  # 6 s for all, and a lease lasts 5 s
        message = near.progress(unpack_keys(request.keys))
        message.granted_ms = 1000
        return message

    out = np.zeros((12, spec.block_bytes), np.uint8)
    for loads in (1, 2):
        assert client.start_load(client.lookup(keys), out).result().hit_blocks == 12
        assert client.stats()["client_layerwise_too_large_total"] == loads
