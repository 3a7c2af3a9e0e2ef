"""Stores in the background: ``KVClient.start_store`` and its handle."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from client_fakes import FakeNode, payloads

from kvclient import CacheSpec, KVClient, StoreOutcome
from kvproto.v1 import node_pb2
from kvstore.core.errors import CapacityExceeded, DeadlineExceeded, InvalidArgument
from support.chains import token_chain

MakeClient = Callable[..., KVClient]


def hold_prepare(node: FakeNode) -> threading.Event:
    """Make ``Prepare`` wait for the event that is returned."""
    released = threading.Event()

    def wait_for_release(_: node_pb2.PrepareRequest) -> None:
        released.wait(20.0)

    node.prepare_script = wait_for_release
    return released


def test_start_store_stores_blocks(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys, client = token_chain(spec, 5), make_client(near)
    data = payloads(keys, spec.shape)
    with client.start_store(keys[:2], data[:2]) as head:
        assert head.result().held_blocks == 2
    tail = client.start_store(keys[2:], data[2:], parent=keys[1], depth=2)
    assert tail.result(10.0).held_blocks == 3
    assert tail.done
    assert not tail.cancelled
    out = np.zeros_like(data)
    assert client.load(keys, out).hit_blocks == 5
    assert np.array_equal(out, data)


def test_start_store_cancelled_gives_slots_back(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    released = hold_prepare(near)
    keys, client = token_chain(spec, 3), make_client(near)
    handle = client.start_store(keys, payloads(keys, spec.shape))
    near.wait_called("Prepare")
    result = handle.cancel()
    released.set()
    assert handle.cancelled
    assert result.outcomes.tolist() == [StoreOutcome.SKIPPED] * 3
    assert isinstance(result.error, DeadlineExceeded)
    near.wait_called("Abort")


def test_start_store_left_is_cancelled(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    released = hold_prepare(near)
    keys, client = token_chain(spec, 3), make_client(near)
    with client.start_store(keys, payloads(keys, spec.shape)) as handle:
        near.wait_called("Prepare")
    released.set()
    assert handle.cancelled
    assert handle.result().held_blocks == 0


def test_start_store_result_timeout_cancels(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    released = hold_prepare(near)
    keys, client = token_chain(spec, 3), make_client(near)
    handle = client.start_store(keys, payloads(keys, spec.shape))
    assert handle.result(0.05).held_blocks == 0
    released.set()
    assert handle.cancelled
    with pytest.raises(InvalidArgument):
        handle.result(float("nan"))


def test_start_store_beyond_max_pending_is_skipped(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    released = hold_prepare(near)
    keys, client = token_chain(spec, 3), make_client(near, max_pending=1)
    first = client.start_store(keys, payloads(keys, spec.shape))
    second = client.start_store(keys, payloads(keys, spec.shape))
    assert second.done
    assert isinstance(second.result().error, CapacityExceeded)
    released.set()
    assert first.result().held_blocks == 3


def test_close_cancels_background_stores(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    released = hold_prepare(near)
    keys, client = token_chain(spec, 3), make_client(near)
    handle = client.start_store(keys, payloads(keys, spec.shape))
    near.wait_called("Prepare")
    client.close()
    released.set()
    assert handle.result().held_blocks == 0
