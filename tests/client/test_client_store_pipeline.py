"""Stores of a device's pages: copies overlap, end in any order, and fail; the node answers anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_fakes import FakeNode, SkewedClock, payloads
from late_pages import LateDevice, LatePages

from kvclient import CacheSpec, KVClient, StoreHandle
from kvclient.results import HELD
from kvproto.v1 import node_pb2
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, StoreOutcome, unpack_keys
from samples import sample
from support.chains import token_chain
from support.client_parts import session_of
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
Rows = np.ndarray[Any, np.dtype[np.uint8]]
STORED, EXISTS, SKIPPED = StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.SKIPPED
FAULTS = ("none", "none", "prepare", "complete", "lost", "device", "cancel", "deadline")


def pages_of(spec: CacheSpec, device: LateDevice, rows: Rows) -> LatePages:
    return LatePages(device, rows.reshape(len(rows), spec.layers, spec.layer_block_bytes).copy())


class Space:
    """A node that has slots for some blocks at a time. A block leaves the arena once it is stored."""

    def __init__(self, near: FakeNode, slots: int) -> None:
        self.near = near
        self.free = slots
        self.waits: list[tuple[int, int]] = []
        """Per ``Prepare``: how long it may wait, and the slots that other grants hold."""
        self._slots = slots
        near.prepare_script, near.complete_script = self.prepare, self.complete

    def prepare(self, request: node_pb2.PrepareRequest) -> node_pb2.PrepareResponse:
        self.waits.append((request.wait_ms, self._slots - self.free))
        slots: dict[BlockKey, int] = {}
        outcomes = []
        for key in unpack_keys(request.blocks.keys):
            if key in self.near.blocks.held:
                outcomes.append(EXISTS)
            elif len(slots) == self.free or SKIPPED in outcomes:
                outcomes.append(SKIPPED)
            else:
                outcomes.append(STORED)
                slots[key] = self.near.place(bytes(self.near.spec.block_bytes))
        self.free -= len(slots)
        self.near.prepared[request.operation_id] = slots
        offsets = b"".join(at.to_bytes(8, "little") for at in slots.values())
        return node_pb2.PrepareResponse(outcomes=bytes(outcomes), offsets=offsets)

    def complete(self, request: node_pb2.CompleteRequest) -> None:
        self.free += len(request.keys) // 16


@pytest.mark.parametrize("seed", range(sample(10, 300)))
def test_pipelined_store_keeps_rules_under_faults(
    spec: CacheSpec, clock: SkewedClock, near: FakeNode, make_client: MakeClient, seed: int
) -> None:
    rng = random.Random(seed)
    pieces, block = rng.randint(1, 4), spec.block_bytes
    keys = token_chain(spec, rng.randint(1, 16))
    client = make_client(
        near,
        pieces_in_flight=pieces,
        store_chunk_bytes=rng.randint(1, 5) * block,
        copy_chunk_bytes=rng.randint(1, 3) * block,
        default_deadline_s=20.0,
    )
    near.blocks.hold(keys[: rng.choice((0, 0, 3))])
    space = Space(near, rng.randint(1, 8))
    device, fault, nth = LateDevice(seed), rng.choice(FAULTS), rng.randint(1, 4)
    expected = payloads(keys, spec.shape)
    pages = pages_of(spec, device, expected)
    session = session_of(client)
    unsafe: list[int] = []
    """Slots that were given back under a copy."""
    abort = session.releaser.abort

    def watched_abort(operation_id: bytes) -> None:
        unsafe.extend(at for copy in device.under_way for at in copy.offsets if at in granted.get(operation_id, ()))
        abort(operation_id)

    session.releaser.abort = watched_abort  # type: ignore[method-assign]
    calls = {"prepare": 0, "complete": 0}
    granted: dict[bytes, list[int]] = {}

    def prepare(request: node_pb2.PrepareRequest) -> node_pb2.PrepareResponse:
        calls["prepare"] += 1
        if fault == "prepare" and calls["prepare"] >= nth:
            near.fail["Prepare"] = Unavailable("going away")
        answer = space.prepare(request)
        granted[request.operation_id] = list(near.prepared[request.operation_id].values())
        return answer

    def complete(request: node_pb2.CompleteRequest) -> node_pb2.CompleteResponse | None:
        calls["complete"] += 1
        if fault == "complete" and calls["complete"] >= nth:
            near.fail["Complete"] = Unavailable("going away")
        if fault == "lost" and calls["complete"] == nth:
            return node_pb2.CompleteResponse(outcomes=bytes([StoreOutcome.LOST] * (len(request.keys) // 16)))
        space.complete(request)
        return None

    near.prepare_script, near.complete_script = prepare, complete
    if fault == "device":
        device.fail_at = nth
    handles: list[StoreHandle] = []

    def interrupt() -> None:
        if device.begun + 1 == nth and fault == "deadline":
            clock.ahead_s += 1000.0
        if device.begun + 1 == nth and fault == "cancel":
            wait_until(lambda: handles)
            handles[0].request_cancel()

    device.before_copy = interrupt
    handles.append(client.start_store(keys, pages))
    result = handles[0].result()

    assert device.under_way == [], "a copy that nobody waited for"
    assert device.most_under_way <= pieces
    assert unsafe == []
    held = HELD[result.outcomes]
    assert not held[result.held_blocks :].any(), "a block is held behind a gap"
    for key, row in zip(keys[: result.held_blocks], expected, strict=False):
        assert near.blocks.held[key] == row.tobytes()
    assert all(others == 0 or not wait_ms for wait_ms, others in space.waits), "waits for space that it holds itself"
    asked = list(dict.fromkeys(request.operation_id for name, request in near.calls if name == "Prepare"))
    completed = list(dict.fromkeys(request.operation_id for name, request in near.calls if name == "Complete"))
    assert completed == [one for one in asked if one in completed], "chunks were completed out of order"
    if fault == "lost":
        assert calls["complete"] <= nth, "a chunk was completed after one that is not held"
    if not session.arena.stuck:
        kept = {one for one in asked if near.prepared.get(one)}

        def given_back() -> bool:
            returned = {request.operation_id for name, request in near.calls if name == "Abort"}
            return kept <= {*returned, *completed} or session.session_id in near.left

        wait_until(given_back)
    if fault == "none":
        assert (result.held_blocks, result.error) == (len(keys), None)
    else:
        assert result.error is None or isinstance(result.error, KVStoreError)


def test_pipelined_store_asks_while_pieces_are_copied(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 8)
    device = LateDevice()
    under_way: list[tuple[str, int]] = []

    def prepare(_: node_pb2.PrepareRequest) -> None:
        under_way.append(("prepare", len(device.under_way)))

    def complete(_: node_pb2.CompleteRequest) -> None:
        under_way.append(("complete", len(device.under_way)))

    near.prepare_script, near.complete_script = prepare, complete
    client = make_client(near, pieces_in_flight=2, store_chunk_bytes=4 * spec.block_bytes, copy_chunk_bytes=2 * spec.block_bytes)
    assert client.store(keys, pages_of(spec, device, payloads(keys, spec.shape))).held_blocks == 8
    assert under_way == [("prepare", 0), ("prepare", 1), ("complete", 1), ("complete", 0)]
    assert client.stats()["client_pieces_ahead_total"] == 3


def test_pipelined_store_ends_at_a_lost_chunk(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 8)
    near.complete_script = lambda _: node_pb2.CompleteResponse(outcomes=bytes([STORED, StoreOutcome.LOST]))
    client = make_client(near, store_chunk_bytes=2 * spec.block_bytes, copy_chunk_bytes=2 * spec.block_bytes)
    result = client.store(keys, pages_of(spec, LateDevice(), payloads(keys, spec.shape)))
    assert result.outcomes.tolist() == [STORED, StoreOutcome.LOST, *[SKIPPED] * 6]
    assert near.names().count("Complete") == 1
    near.wait_called("Abort", near.names().count("Prepare") - 1)


def test_store_with_one_piece_in_flight_waits_for_each(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 8)
    device = LateDevice()
    client = make_client(near, pieces_in_flight=1, store_chunk_bytes=4 * spec.block_bytes, copy_chunk_bytes=2 * spec.block_bytes)
    assert client.store(keys, pages_of(spec, device, payloads(keys, spec.shape))).held_blocks == 8
    assert device.most_under_way == 1
    assert "client_pieces_ahead_total" not in client.stats()
    assert [name for name in near.names() if name in ("Prepare", "Complete")] == ["Prepare", "Complete"] * 2
