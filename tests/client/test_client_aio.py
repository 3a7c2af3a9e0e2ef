"""The asyncio client: the same results, and a cancelled await that leaves the buffer alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, payloads

from kvclient import AsyncKVClient, CacheSpec, KVClient
from kvproto.v1 import node_pb2
from kvstore.core.errors import InvalidArgument
from support.chains import token_chain
from support.client_parts import session_of

MakeClient = Callable[..., KVClient]


async def test_lookup_load_and_store(spec: CacheSpec, metadata: FakeMetadata, near: FakeNode) -> None:
    tokens = np.arange(5 * spec.block_tokens, dtype=np.uint32)
    async with await AsyncKVClient.connect(metadata.address, spec, node=near.address) as client:
        keys = client.keys(tokens)
        data = payloads(keys, spec.shape)
        assert (await client.store(keys, data)).held_blocks == 5
        metadata.runs = [(0, 5, near)]
        lookup = await client.lookup(keys)
        out = np.zeros_like(data)
        results = await asyncio.gather(client.load(lookup, out), client.load(keys, np.zeros_like(data)))
        assert [result.hit_blocks for result in results] == [5, 5]
        assert np.array_equal(out, data)
        assert await client.flush()
        assert client.stats()["client_load_hit_blocks_total"] == 10
        with pytest.raises(InvalidArgument):
            await client.load(keys, bytearray(1))
    assert (await client.lookup(keys)).hit_blocks == 0


async def test_load_cancelled_leaves_buffer_alone(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An await that is cancelled during a copy ends after the copy."""
    keys = token_chain(spec, 6)
    near.blocks.hold(keys)
    blocking = make_client(near, copy_chunk_bytes=2 * spec.block_bytes)
    session = session_of(blocking)
    copying, go_on, copied = threading.Event(), threading.Event(), []
    copy_out = session.arena.begin_copy_out  # type: ignore[union-attr]

    def slow(offsets: object, buffer: object, first: int, *further: object) -> object:
        copying.set()
        assert go_on.wait(10)
        good = copy_out(offsets, buffer, first, *further)  # type: ignore[arg-type]
        copied.append(first)
        return good

    monkeypatch.setattr(session.arena, "begin_copy_out", slow)  # type: ignore[union-attr]
    near.load_script = lambda request, _: iter([near.progress(keys)])
    out = np.zeros((6, spec.block_bytes), np.uint8)
    task = asyncio.create_task(AsyncKVClient(blocking).load(keys, out))
    assert await asyncio.to_thread(copying.wait, 10)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=0.1)
    assert not done  # another writer has not completed
    task.cancel()  # impatience changes nothing
    done, _ = await asyncio.wait((task,), timeout=0.05)
    assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    before, number = out.copy(), len(copied)
    near.wait_called("Release")
    assert (len(copied), number) == (1, 1)  # the piece under way was the last
    assert np.array_equal(out, before)


async def test_load_cancelled_while_waiting_for_node_ends(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    ended = threading.Event()

    def script(request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Iterator[node_pb2.LoadProgress]:
        context.add_callback(ended.set)
        ended.wait(10)
        yield near.progress([])

    near.load_script = script
    client = AsyncKVClient(make_client(near))
    load = asyncio.create_task(client.load(token_chain(spec, 2), bytearray(2 * spec.block_bytes)))
    await asyncio.to_thread(near.wait_called, "Load")
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert await asyncio.to_thread(ended.wait, 5)


async def test_store_cancelled_stores_nothing(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    """The caller may write to the buffer at once, so nothing of it may be stored afterwards."""
    keys = token_chain(spec, 4)
    asked, go_on = threading.Event(), threading.Event()

    def script(request: node_pb2.PrepareRequest) -> None:
        asked.set()
        go_on.wait(10)

    near.prepare_script = script
    client = AsyncKVClient(make_client(near))
    task = asyncio.create_task(client.store(keys, payloads(keys, spec.shape)))
    assert await asyncio.to_thread(asked.wait, 10)
    task.cancel()
    await asyncio.wait((task,), timeout=0.05)  # lets the cancellation arrive; it waits for the thread, if for anything
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "Complete" not in near.names()
    await asyncio.to_thread(near.wait_called, "Abort")
