"""A bad argument raises ``InvalidArgument`` before any server is called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, payloads

from kvclient import AsyncKVClient, CacheSpec, ClientOptions, KVClient, Paths
from kvclient.call.arguments import MAX_SECONDS, check_seconds
from kvstore.core.errors import DeadlineExceeded, InvalidArgument
from support.chains import token_chain

MakeClient = Callable[..., KVClient]

NO_SECONDS: list[Any] = [float("nan"), -1, -0.5, float("-inf"), "x", "1", b"1", 1j, True, [1], np.float64("nan")]
LONG: list[Any] = [float("inf"), 1e300, 10**400, np.float32("inf"), 86_401]


def test_seconds_are_cut_to_a_day() -> None:
    assert [check_seconds("t", seconds) for seconds in LONG] == [MAX_SECONDS] * len(LONG)
    assert [check_seconds("t", seconds) for seconds in (1, 2.5, np.float32(0.5), 86_400)] == [1.0, 2.5, 0.5, 86_400.0]
    assert check_seconds("t", 0, zero=True) == 0.0
    for seconds in (*NO_SECONDS, 0, None):
        with pytest.raises(InvalidArgument):
            check_seconds("t", seconds)


def test_options_with_bad_numbers_raise() -> None:
    spans = ("default_deadline_s", "lookup_deadline_s", "connect_deadline_s", "breaker_pause_s", "reopen_pause_s")
    for name in (*spans, "space_wait_s", "lease_margin_s", "log_interval_s"):
        assert getattr(ClientOptions(**{name: float("inf")}), name) == MAX_SECONDS
        for seconds in NO_SECONDS:
            with pytest.raises(InvalidArgument):
                ClientOptions(**{name: seconds})
    for number in (0, -1, "x", 1.5, float("inf"), None):
        with pytest.raises(InvalidArgument):
            ClientOptions(workers=number)  # type: ignore[arg-type]
    assert ClientOptions(space_wait_s=0).space_wait_s == 0


async def test_bad_deadlines_raise_and_keep_breaker_closed(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 2)
    data = payloads(keys, spec.shape)
    out = np.zeros_like(data)
    metadata.runs = [(0, 2, near)]
    client = make_client(near, breaker_pause_s=60.0)
    twin = AsyncKVClient(client)
    for bad in NO_SECONDS:
        for call in (
            lambda seconds: client.lookup(keys, deadline_s=seconds),
            lambda seconds: client.load(keys, out, deadline_s=seconds),
            lambda seconds: client.start_load(keys, out, deadline_s=seconds),
            lambda seconds: client.store(keys, data, deadline_s=seconds),
            lambda seconds: client.begin_store(keys, deadline_s=seconds),
            client.flush,
        ):
            with pytest.raises(InvalidArgument):
                call(bad)
        with pytest.raises(InvalidArgument):
            await twin.lookup(keys, deadline_s=bad)
        with pytest.raises(InvalidArgument):
            await twin.load(keys, out, deadline_s=bad)
        with pytest.raises(InvalidArgument):
            await twin.store(keys, data, deadline_s=bad)
        with pytest.raises(InvalidArgument):
            await twin.flush(bad)
    for tiny in [1e-300, 1e-9, 1e-4] * 3:  # no bad ones, but too short to say anything about the server
        assert isinstance(client.lookup(keys, deadline_s=tiny).error, DeadlineExceeded)
    assert client.lookup(keys).hit_blocks == 2


async def test_long_deadlines_are_cut_to_a_day(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    keys = token_chain(spec, 2)
    data = payloads(keys, spec.shape)
    metadata.runs = [(0, 2, near)]
    for client in (make_client(near, connect_deadline_s=float("inf"), space_wait_s=1e300), make_client(None)):
        twin = AsyncKVClient(client)
        for long in LONG:
            assert client.store(keys, data, deadline_s=long, wait_visible=True).held_blocks == 2
            assert (await twin.store(keys, data, deadline_s=long)).held_blocks == 2
            assert client.lookup(keys, deadline_s=long).hit_blocks == 2
            assert (await twin.lookup(keys, deadline_s=long)).hit_blocks == 2
            assert client.load(keys, out := np.zeros_like(data), deadline_s=long).hit_blocks == 2
            assert np.array_equal(out, data)
            assert (await twin.load(keys, out, deadline_s=long)).hit_blocks == 2
            handle = client.start_load(keys, np.zeros_like(data), deadline_s=long)
            assert handle.wait_layer(0, long)
            assert handle.result(long).hit_blocks == 2
            with client.begin_store(keys, deadline_s=long) as store:
                for layer in range(spec.layers):
                    store.put_layer(layer, data.reshape(2, spec.layers, -1)[:, layer])
                assert store.commit().held_blocks == 2
            if client.local_node is not None:
                assert client.flush(long)
                assert await twin.flush(long)


def test_wait_layer_with_bad_arguments_raises(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 1)
    near.blocks.hold(keys)
    handle = make_client(near).start_load(keys, np.zeros((1, spec.block_bytes), np.uint8))
    for wrong in (
        lambda: handle.wait_layer(0, float("nan")),
        lambda: handle.wait_layer(0, "x"),  # type: ignore[arg-type]
        lambda: handle.wait_layer(0.5),  # type: ignore[arg-type]
        lambda: handle.result(-1),
    ):
        with pytest.raises(InvalidArgument):
            wrong()
    assert handle.result().hit_blocks == 1


def test_load_into_overlapping_buffer_raises(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 10)
    near.blocks.hold(keys)
    client = make_client(near)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(10 * spec.block_bytes, np.uint8), (10, spec.block_bytes), (100, 1))
    for out in (overlapping, [bytearray(spec.block_bytes)] * 10):
        with pytest.raises(InvalidArgument, match="overlap"):
            client.load(keys, out)
        with pytest.raises(InvalidArgument, match="overlap"):
            client.start_load(keys, out)


def test_store_of_overlapping_buffer_succeeds(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    keys = token_chain(spec, 6)
    client = make_client(near)
    one = bytearray(np.random.default_rng(1).bytes(spec.block_bytes))
    assert client.store(keys[:3], [one] * 3).held_blocks == 3
    repeated = np.broadcast_to(np.frombuffer(one, np.uint8), (3, spec.block_bytes))
    assert client.store(keys[3:], repeated, parent=keys[2], depth=3).held_blocks == 3
    assert client.load(keys, out := np.zeros((6, spec.block_bytes), np.uint8), verify="always").hit_blocks == 6
    assert out.tobytes() == bytes(one) * 6


@pytest.mark.parametrize(
    "keys",
    [5, None, "x" * 16, ["x" * 16], [b"x" * 16, 7], {b"x" * 16}, bytearray(16), [bytearray(16)], [np.bytes_(b"x" * 16)], [None]],
)
def test_keys_of_another_type_raise(spec: CacheSpec, near: FakeNode, make_client: MakeClient, keys: Any) -> None:
    client = make_client(near)
    memory = bytearray(spec.block_bytes)
    for wrong in (
        lambda: client.lookup(keys),
        lambda: client.load(keys, memory),
        lambda: client.start_load(keys, memory),
        lambda: client.store(keys, memory),
        lambda: client.begin_store(keys),
    ):
        with pytest.raises(InvalidArgument):
            wrong()


@pytest.mark.parametrize(
    ("parent", "depth"),
    [
        (b"x" * 16, 1.5),
        ("x" * 16, 1),
        (bytearray(16), 1),
        (16, 1),
        (b"x" * 16, "1"),
        (b"x" * 16, None),
        (b"x" * 16, True),
        (b"x" * 16, 1 << 70),
    ],
)
def test_positions_of_another_type_raise(
    spec: CacheSpec, near: FakeNode, make_client: MakeClient, parent: Any, depth: Any
) -> None:
    client = make_client(near)
    keys, memory = token_chain(spec, 1), bytearray(spec.block_bytes)
    for wrong in (
        lambda: client.load(keys, memory, parent=parent, depth=depth),
        lambda: client.start_load(keys, memory, parent=parent, depth=depth),
        lambda: client.store(keys, memory, parent=parent, depth=depth),
        lambda: client.begin_store(keys, parent=parent, depth=depth),
        lambda: client.keys(range(4), parent=parent, first_block=depth),
    ):
        with pytest.raises(InvalidArgument):
            wrong()


def test_handoff_with_bad_names_raises(spec: CacheSpec, near: FakeNode, make_client: MakeClient) -> None:
    client = make_client(near)
    keys = token_chain(spec, 1)
    for node in (5, None, b"d", "d\udc80", "d\n", "x" * 513):
        for wrong in (lambda: client.begin_handoff(keys, node), lambda: client.abandon_prompt("id", node)):  # type: ignore[arg-type]  # noqa: B023
            with pytest.raises(InvalidArgument, match="decode_node"):
                wrong()
    for wrong in (lambda: client.await_prompt(keys, transfer_id="id\ud800"), lambda: client.abandon_prompt("id\ud800", "d")):
        with pytest.raises(InvalidArgument, match="transfer_id"):
            wrong()


def test_connect_with_bad_types_raises(spec: CacheSpec, metadata: FakeMetadata) -> None:
    for arguments, named in (
        ((5, spec), {}),
        ((metadata.address.encode(), spec), {}),
        ((metadata.address, "spec"), {}),
        ((metadata.address, spec), {"node": 5}),
        ((metadata.address, spec), {"tls": True}),
        ((metadata.address, spec), {"options": {"strict": True}}),
    ):
        with pytest.raises(InvalidArgument):
            KVClient.connect(*arguments, **named)  # type: ignore[arg-type]


def test_short_deadlines_do_not_open_breaker(spec: CacheSpec, metadata: FakeMetadata, make_client: MakeClient) -> None:
    answering = threading.Event()
    asked = metadata.Lookup

    def held_up(request: Any, context: Any) -> Any:
        answering.wait(10)
        return asked(request, context)

    metadata.Lookup = held_up  # type: ignore[method-assign]
    metadata.stop()
    metadata.start()
    client = make_client(None, breaker_pause_s=60.0, breaker_failures=2)
    for _ in range(4):
        assert isinstance(client.lookup(token_chain(spec, 1), deadline_s=0.02).error, DeadlineExceeded)
    answering.set()
    assert client.lookup(token_chain(spec, 1), deadline_s=10).error is None


async def test_paths_of_another_type_raise(
    spec: CacheSpec, metadata: FakeMetadata, near: FakeNode, make_client: MakeClient
) -> None:
    client, keys = make_client(near), token_chain(spec, 2)
    metadata.runs = [(0, 2, near)]
    out, lookup = np.zeros((2, spec.block_bytes), np.uint8), client.lookup(keys)
    wrong: list[Any] = ["prefill_only", 0, "", {}, Paths]
    for paths in wrong:
        for call in (
            lambda: ClientOptions(paths=paths),  # noqa: B023  # called at once
            lambda: client.load(lookup, out, paths=paths),  # noqa: B023
            lambda: client.start_load(lookup, out, paths=paths),  # noqa: B023
            lambda: client.read_ahead(lookup, paths=paths),  # noqa: B023
        ):
            with pytest.raises(InvalidArgument):
                call()
        with pytest.raises(InvalidArgument):
            await AsyncKVClient(client).load(lookup, out, paths=paths)
