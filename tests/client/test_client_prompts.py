"""Prompts that are awaited and never arrive: cancelled while they wait, also for a thread, and ended when the client closes.

A wait that fails raises nothing in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, SkewedClock, abort, payloads

from kvclient import CacheSpec, DeadlineExceeded, KVClient, Outcome
from kvclient.nodes.local_session import Session
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.errors import CapacityExceeded, Internal, KVStoreError, LeaseLost
from kvstore.rpc.client import ChannelBroken
from support.chains import token_chain
from support.wait import wait_until

NoCallThreads = Callable[[], AbstractContextManager[None]]
MakeClient = Callable[..., KVClient]

LONG_S = 25.0


def test_prompt_cancelled_without_a_thread_ends_at_once(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, prompt_workers=1)
    first = client.await_prompt(token_chain(spec, 2), transfer_id="first", deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    queued = client.await_prompt(token_chain(spec, 2), transfer_id="queued", deadline_s=LONG_S)
    queued.cancel()
    assert queued.done
    assert not queued.wait()
    assert not first.done, "the prompt before it is still awaited"
    first.cancel()
    assert near.names().count("AwaitPrompt") == 1, "a cancelled prompt is never asked for"


def test_prompt_taken_without_a_thread_is_missing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, prompt_workers=1)
    first = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    queued = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    result = queued.take(np.zeros((2, spec.block_bytes), np.uint8))
    assert (result.outcomes == Outcome.UNAVAILABLE).all()
    assert not first.done


def test_closed_client_cancels_awaited_prompts(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near, prompt_workers=1)
    prompts = [client.await_prompt(token_chain(spec, 2), transfer_id=f"t{at}", deadline_s=LONG_S) for at in range(3)]
    near.wait_called("AwaitPrompt")
    client.close()
    assert all(prompt.done for prompt in prompts)
    for prompt in prompts:
        result = prompt.take(np.zeros((2, spec.block_bytes), np.uint8))
        assert isinstance(result.error, DeadlineExceeded)
        assert "cancelled by the caller" in str(result.error)


def close_channel(session: Session, near: FakeNode) -> None:
    """As when the node returns under another address."""
    channel = grpc.insecure_channel(near.address)
    session.stub = node_pb2_grpc.NodeStub(channel)
    channel.close()


def test_prompt_whose_channel_was_closed_is_missing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near)
    close_channel(session_of(client), near)
    missing_prompt(client, spec, LeaseLost)


def test_prompt_whose_wait_has_a_bug_is_missing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("a bug")

    client = make_client(near)
    session_of(client).stub = SimpleNamespace(AwaitPrompt=fail)  # type: ignore[assignment]
    missing_prompt(client, spec, Internal)
    assert client.stats()["client_bugs_total"] == 1


def test_prompt_without_call_thread_replaces_the_channel(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, no_call_threads: NoCallThreads
) -> None:
    client = make_client(near)
    with no_call_threads():
        missing_prompt(client, spec, ChannelBroken)
    next_prompt = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    near.wait_called("AwaitPrompt")
    next_prompt.cancel()
    client.close()  # does not hang


def test_load_without_call_thread_replaces_the_channel(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient, no_call_threads: NoCallThreads
) -> None:
    client, keys = make_client(near), token_chain(spec, 2)
    metadata.runs = [(0, 2, near)]
    near.blocks.hold(keys)
    lookup, buffer = client.lookup(keys), np.zeros((2, spec.block_bytes), np.uint8)
    with no_call_threads():
        client.load(lookup, buffer)
    assert client.stats()["client_session_lost_total"] == 1
    wait_until(lambda: client.context.local is not None and client.context.local.session() is not None, "a session is open")
    assert (client.load(lookup, buffer).outcomes == Outcome.HIT).all()
    client.close()  # does not hang


def session_of(client: KVClient) -> Session:
    """Return the session with the node of this host."""
    session = client.context.local.session() if client.context.local is not None else None
    assert session is not None
    return session


def missing_prompt(client: KVClient, spec: CacheSpec, error: type[KVStoreError]) -> None:
    """Await a prompt whose wait fails with an error, until the client has another session."""
    prompt = client.await_prompt(token_chain(spec, 2), deadline_s=LONG_S)
    assert not prompt.wait()
    result = prompt.take(np.zeros((2, spec.block_bytes), np.uint8))
    assert (result.outcomes == Outcome.UNAVAILABLE).all()
    assert isinstance(result.error, error)
    prompt.cancel()
    local = client.context.local
    assert local is not None
    wait_until(lambda: local.session() is not None, "a session is open")


def test_prompt_answer_invalid_is_missing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    """The offset of the second block is outside of the arena, so the answer names no bytes that could be copied."""
    client, keys = make_client(near), token_chain(spec, 2)
    near.blocks.hold(keys)

    def answer(_request: node_pb2.AwaitPromptRequest, _context: grpc.ServicerContext) -> Iterator[node_pb2.LoadProgress]:
        yield near.progress(keys[:1], checksums=True)
        wrong = near.progress(keys[1:], 1, checksums=True)
        wrong.runs[0].offsets = near.arena.size().to_bytes(8, "little")
        yield wrong

    near.prompt_script = answer
    prompt = client.await_prompt(keys, deadline_s=LONG_S)
    assert not prompt.wait()
    buffer = np.zeros((2, spec.block_bytes), np.uint8)
    result = prompt.take(buffer)
    assert result.outcomes.tolist() == [Outcome.HIT, Outcome.UNAVAILABLE]
    assert isinstance(result.error, Internal)
    assert (buffer == payloads(keys, spec.shape) * np.array([[1], [0]], np.uint8)).all()


def test_prompt_lease_outlasts_a_late_message(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, clock: SkewedClock
) -> None:
    """A message without blocks, sent while the call ends, says nothing about the lease of the blocks before."""
    client, keys = make_client(near), token_chain(spec, 2)
    near.blocks.hold(keys)

    def answer(_request: node_pb2.AwaitPromptRequest, _context: grpc.ServicerContext) -> Iterator[node_pb2.LoadProgress]:
        clock.ahead_s += 2 * near.lease_ms / 1000  # the prompt comes late
        arrived = near.progress(keys, checksums=True)
        arrived.granted_ms = 2 * near.lease_ms
        yield arrived
        yield node_pb2.LoadProgress()

    near.prompt_script = answer
    prompt = client.await_prompt(keys, deadline_s=LONG_S)
    assert prompt.wait()
    assert prompt.take(np.zeros((2, spec.block_bytes), np.uint8)).outcomes.tolist() == [Outcome.HIT] * 2


@pytest.mark.parametrize("limit", ["passes", "lasts"])
def test_prompt_is_awaited_again_after_a_refusal(limit: str, spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    """Each rank and group of pages makes a call of its own, and a node has a limit of calls."""
    client, keys, refused = make_client(near), token_chain(spec, 2), 0
    near.blocks.hold(keys)

    def answer(_request: node_pb2.AwaitPromptRequest, context: grpc.ServicerContext) -> Iterator[node_pb2.LoadProgress]:
        nonlocal refused
        if refused < 2 or limit == "lasts":
            refused += 1
            abort(CapacityExceeded("too many calls wait on this node"), context)
        yield near.progress(keys, checksums=True)

    near.prompt_script = answer
    prompt = client.await_prompt(keys, deadline_s=LONG_S if limit == "passes" else 0.4)
    assert prompt.wait() == (limit == "passes")
    result = prompt.take(np.zeros((2, spec.block_bytes), np.uint8))
    assert result.hit_blocks == (2 if limit == "passes" else 0)
    assert isinstance(result.error, type(None) if limit == "passes" else CapacityExceeded | DeadlineExceeded)
    assert client.stats()["client_prompt_waits_refused_total"] >= 2
