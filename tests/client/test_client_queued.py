"""Waits for a thread of the client, or for a ticket, end with their call: at the deadline, and at once if it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, found, payloads, plan_of

from kvclient import CacheSpec, DeadlineExceeded, KVClient, Outcome, Paths
from kvclient.aio import AsyncKVClient
from kvclient.nodes import peers
from kvclient.store.handle import StoreHandle
from kvproto.v1 import metadata_pb2, node_pb2
from kvstore.core.types import BlockKey
from support.chains import token_chain
from support.wait import wait_until

MakeClient = Callable[..., KVClient]
MakeNode = Callable[..., FakeNode]

PATHS = Paths(decode_node="far")
LONG_S = 25.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Occupies a thread until the test sets it, so that other work waits."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_planned_load_without_threads_ends_at_deadline(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_node: MakeNode, make_client: MakeClient, gate: threading.Event
) -> None:
    client, far = make_client(near, part_workers=1), make_node("far")
    metadata.plan_script = lambda request: plan_of(far, request.blocks)
    busy = client.context.part_threads.submit(gate.wait, LONG_S)
    lookup = found(spec, 4, (0, 2, near), (2, 2, far))
    result = client.load(lookup, np.zeros((4, spec.block_bytes), np.uint8), deadline_s=0.2, paths=PATHS)
    assert not busy.done()
    assert (result.outcomes == Outcome.TIMEOUT).all()
    assert isinstance(result.error, DeadlineExceeded)
    assert near.names().count("Load") == 0


def test_planned_load_without_threads_is_cancelled(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_node: MakeNode, make_client: MakeClient, gate: threading.Event
) -> None:
    client, far, planned = make_client(near, part_workers=1), make_node("far"), threading.Event()

    def plan(request: metadata_pb2.PlanLoadRequest) -> metadata_pb2.LoadPlan:
        planned.set()
        return plan_of(far, request.blocks)

    metadata.plan_script = plan
    busy = client.context.part_threads.submit(gate.wait, LONG_S)
    lookup = found(spec, 4, (0, 2, near), (2, 2, far))
    handle = client.start_load(lookup, np.zeros((4, spec.block_bytes), np.uint8), deadline_s=LONG_S, paths=PATHS)
    assert planned.wait(10)
    result = handle.cancel()
    assert not busy.done()
    assert result.hit_blocks == 0
    assert "cancelled by the caller" in str(result.error)


def test_awaited_prompt_occupies_no_thread_of_loads(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_node: MakeNode, make_client: MakeClient
) -> None:
    client, far, keys = make_client(near, part_workers=1, prompt_workers=1), make_node("far"), token_chain(spec, 4)
    near.blocks.hold(keys)  # this host reads
    metadata.plan_script = lambda request: plan_of(near, request.blocks)
    prompt = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    out = np.zeros((4, spec.block_bytes), np.uint8)
    assert client.load(found(spec, 4, (0, 4, far)), out, paths=PATHS).hit_blocks == 4
    assert np.array_equal(out, payloads(keys, spec.shape))
    assert not prompt.done


@dataclass
class TwoNodes:
    """Two nodes with one chain, and a client whose only thread for further reads is busy."""

    client: KVClient
    first: FakeNode
    second: FakeNode
    keys: Sequence[BlockKey]
    busy: Future[bool]


@pytest.fixture
def two_nodes(spec: CacheSpec, make_node: MakeNode, make_client: MakeClient, gate: threading.Event) -> TwoNodes:
    client, first, second, keys = make_client(None, read_streams=1), make_node("first"), make_node("second"), token_chain(spec, 4)
    for node in (first, second):
        node.blocks.hold(keys)
    return TwoNodes(client, first, second, keys, client.context.peers.submit(gate.wait, LONG_S))


def test_read_without_thread_ends_at_deadline(spec: CacheSpec, clock: SkewedClock, two_nodes: TwoNodes) -> None:
    first, second = two_nodes.first, two_nodes.second

    def pass_deadline(_: object) -> None:
        clock.ahead_s = 2 * LONG_S

    first.provider.before_read = pass_deadline
    lookup = found(spec, 4, (0, 2, first), (2, 2, second))
    result = two_nodes.client.load(lookup, np.zeros((4, spec.block_bytes), np.uint8), deadline_s=LONG_S)
    assert not two_nodes.busy.done()
    assert result.outcomes.tolist() == [Outcome.HIT] * 2 + [Outcome.TIMEOUT] * 2
    assert "read_streams" in str(result.error)
    assert second.provider.reads == 0


def test_read_without_thread_is_read_from_other_node(spec: CacheSpec, clock: SkewedClock, two_nodes: TwoNodes) -> None:
    first, second = two_nodes.first, two_nodes.second

    def pass_first_try(_: object) -> None:
        clock.ahead_s = 1.3 * LONG_S

    first.provider.before_read = pass_first_try
    lookup = found(spec, 4, (0, 2, first), (2, 2, second), (2, 2, first))
    out = np.zeros((4, spec.block_bytes), np.uint8)
    result = two_nodes.client.load(lookup, out, deadline_s=2 * LONG_S)
    assert not two_nodes.busy.done()
    assert result.bytes_by_node == {"first": 4 * spec.block_bytes}
    assert np.array_equal(out, payloads(two_nodes.keys, spec.shape))


@pytest.mark.parametrize("cancelled", [True, False])
def test_wait_for_ticket_ends_with_the_load(
    spec: CacheSpec,
    make_node: MakeNode,
    make_client: MakeClient,
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cancelled: bool,
) -> None:
    asked, waited = threading.Event(), threading.Event()

    def issue(*_: object) -> node_pb2.IssueTicketResponse:
        asked.set()
        if not gate.wait(LONG_S):
            waited.set()
        return node_pb2.IssueTicketResponse()

    monkeypatch.setattr(FakeNode, "IssueTicket", issue)
    monkeypatch.setattr(peers, "_TICKET_TIMEOUT_S", 2 * LONG_S)
    client, lookup = make_client(None), found(spec, 2, (0, 2, make_node("far")))
    handle = client.start_load(lookup, np.zeros((2, spec.block_bytes), np.uint8), deadline_s=2 * LONG_S if cancelled else 0.3)
    assert not cancelled or asked.wait(10)  # the deadline counts from the start, whether or not the node was asked before it
    result = handle.cancel() if cancelled else handle.result(2 * LONG_S)
    assert not waited.is_set()
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * 2
    assert client.stats().get("transport_peer_connect_failures_total", 0) == 0


@pytest.fixture
def busy_client(near: FakeNode, make_client: MakeClient, gate: threading.Event) -> tuple[KVClient, StoreHandle]:
    """A client whose only background thread is occupied by a store, and that store."""
    near.prepare_script = lambda _: (gate.wait(LONG_S), None)[1]
    client = make_client(near, workers=1, default_deadline_s=LONG_S)
    keys = token_chain(client.spec, 3)
    store = client.start_store(keys, payloads(keys, client.spec.shape))
    near.wait_called("Prepare")
    return client, store


def test_queued_call_cancelled_ends_at_once(spec: CacheSpec, busy_client: tuple[KVClient, StoreHandle]) -> None:
    client, busy = busy_client
    handle = client.start_load(token_chain(spec, 2), np.zeros((2, spec.block_bytes), np.uint8))
    result = handle.cancel()
    assert not busy.done
    assert isinstance(result.error, DeadlineExceeded)
    assert handle.result() is result
    assert not handle.wait_layer(0, 0.0) or handle.promised_blocks == 0


@pytest.mark.parametrize("polled", [True, False])
def test_queued_call_ends_after_its_deadline(spec: CacheSpec, busy_client: tuple[KVClient, StoreHandle], *, polled: bool) -> None:
    client, busy = busy_client
    handle = client.start_load(token_chain(spec, 2), np.zeros((2, spec.block_bytes), np.uint8), deadline_s=0.05)
    if polled:
        wait_until(lambda: handle.done)
    assert isinstance(handle.result().error, DeadlineExceeded)
    assert not busy.done


async def test_queued_call_of_asyncio_ends(spec: CacheSpec, busy_client: tuple[KVClient, StoreHandle]) -> None:
    blocking, busy = busy_client
    client, buffer = AsyncKVClient(blocking), np.zeros((2, spec.block_bytes), np.uint8)
    late = await client.load(token_chain(spec, 2), buffer, deadline_s=0.05)
    assert isinstance(late.error, DeadlineExceeded)
    load = asyncio.create_task(client.load(token_chain(spec, 2), buffer))
    await asyncio.sleep(0)  # the call is in the queue
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert not busy.done
