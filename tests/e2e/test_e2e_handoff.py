"""Handoff of a prompt from prefill to decode: bytes sent, bytes received, and the loss of either side."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from conftest import Engine, Store
from kvclient import CapacityExceeded, InvalidArgument, Outcome, Paths, StoreOutcome, StoreResult, Unavailable
from kvclient.handoff.sender import PromptSender
from kvclient.results import LoadResult
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import NodeSpec
from kvstore.transport.contract import LayerWrite, WriteRequest
from kvstore.transport.tcp.layer_write import TcpLayerWrite
from kvstore.transport.tcp.peer import TcpPeer
from support.client_parts import context_of
from support.wait import wait_until

LAYERS, LAYER_BYTES = 6, 8192


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store(
        NodeSpec("storage-0", ("storage",), dram_bytes=64 << 20, nvme_bytes=128 << 20),
        NodeSpec("prefill-0", ("prefill",), dram_bytes=64 << 20, settings=(("cache_loads", "false"),)),
        NodeSpec("decode-0", ("decode",), dram_bytes=64 << 20, write_back_to="storage-0"),
    )


def engine(store: Store, node: str) -> Engine:
    return store.engine(node, layers=LAYERS, layer_bytes=LAYER_BYTES)


class Prompt:
    """A prompt whose first ``hit`` blocks are in storage; the rest, and a partial block, are new."""

    def __init__(self, writer: Engine, name: str, hit: int, new: int) -> None:
        self.hit = hit
        tokens = np.random.default_rng(list(name.encode())).integers(0, 50_000, (hit + new) * 16 + 5, dtype=np.uint32)
        full = writer.client.keys(tokens)
        self.keys: list[BlockKey] = [*full, writer.client.tail_key(tokens[len(full) * 16 :], full[-1])]
        self.bytes = writer.allocate(len(self.keys))
        writer.payloads.fill(self.keys, self.bytes)
        stored = writer.client.store(self.keys[:hit], self.bytes[:hit], durable=True, wait_visible=True)
        assert stored.durable
        self.layers = self.bytes.reshape(len(self.keys), LAYERS, LAYER_BYTES)


@pytest.mark.parametrize(("policy", "sent"), [("prefill_only", 20), ("shorter_queue", None), ("split", None)])
@pytest.mark.parametrize("layer_group", [0, 2])
def test_handoff_sends_only_missing_blocks(store: Store, policy: str, sent: int | None, layer_group: int) -> None:
    writer, prefill, decode = (engine(store, node) for node in ("storage-0", "prefill-0", "decode-0"))
    prompt = Prompt(writer, f"{policy}{layer_group}", hit=16, new=3)
    store.empty_dram("storage-0")
    keys, space = prompt.keys, prefill.allocate(16)
    with decode.client.await_prompt(keys, deadline_s=20) as awaited:
        wait_until(lambda: prefill.client.lookup(keys[:16]).hit_blocks == 16, "the index shows what lies on NVMe")
        lookup = prefill.client.lookup(keys[:16])
        paths = Paths(decode_node="decode-0", policy=policy, layer_group=layer_group)
        with (
            prefill.client.start_load(lookup, space, paths=paths) as load,
            prefill.client.begin_handoff(keys, "decode-0", tail=True) as handoff,
        ):
            for layer in range(LAYERS):
                assert load.wait_layer(layer)
                computed = np.concatenate([space.reshape(16, LAYERS, LAYER_BYTES)[:, layer], prompt.layers[16:, layer]])
                handoff.put_layer(layer, computed)
                assert handoff.bytes_sent_a_layer <= 20 * LAYER_BYTES
            loaded = load.result()
            given = handoff.commit()
        assert loaded.hit_blocks == 16
        assert given.error is None
        over_decode = loaded.bytes_by_path.get("decode", 0) // prompt.bytes[0].nbytes
        assert int(np.count_nonzero(given.outcomes == StoreOutcome.STORED)) == 20 - over_decode
        assert sent is None or over_decode == 20 - sent
        assert awaited.wait(10)
        taken = decode.allocate(len(keys))
        result = awaited.take(taken, verify="always")
    assert result.hit_blocks == len(keys)
    assert (taken == prompt.bytes).all()


def test_handoff_decode_stores_new_full_blocks_only(store: Store) -> None:
    writer, prefill, decode = (engine(store, node) for node in ("storage-0", "prefill-0", "decode-0"))
    prompt = Prompt(writer, "kept", hit=2, new=4)
    awaited = decode.client.await_prompt(prompt.keys, deadline_s=20)
    handoff = prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True)
    for layer in reversed(range(LAYERS)):
        handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
    assert handoff.commit().error is None
    assert awaited.wait(10)
    taken = decode.allocate(len(prompt.keys) - 2)
    assert awaited.take(taken, skip=1, stop=len(prompt.keys) - 1).hit_blocks == len(prompt.keys)
    assert np.array_equal(taken, prompt.bytes[1:-1])
    assert decode.client.flush(10)
    wait_until(lambda: writer.load_keys(prompt.keys[:-1]).hit_blocks == 6, "the new blocks lie in storage")
    wait_until(lambda: decode.load_keys([*prompt.keys]).outcome(6) is Outcome.MISS, "the partial block is gone")


@pytest.mark.parametrize("end", ["close", "cancel", "take"])
def test_take_after_release_of_arrived_blocks_gives_no_hit(store: Store, end: str) -> None:
    writer, prefill, decode = (engine(store, node) for node in ("storage-0", "prefill-0", "decode-0"))
    prompt = Prompt(writer, end, hit=2, new=2)
    awaited = decode.client.await_prompt(prompt.keys, deadline_s=20)
    with prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True) as handoff:
        for layer in range(LAYERS):
            handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
        assert handoff.commit().error is None
    assert awaited.wait(10)
    taken = decode.allocate(len(prompt.keys))
    ends: dict[str, Callable[[], object]] = {
        "close": decode.client.close,
        "cancel": awaited.cancel,
        "take": lambda: awaited.take(taken),
    }
    earlier = ends[end]()
    taken[:] = 0
    result = awaited.take(taken)
    assert {result.outcome(at) for at in range(len(prompt.keys))} == {Outcome.UNAVAILABLE}
    assert not taken.any()
    assert not isinstance(earlier, LoadResult) or earlier.hit_blocks == len(prompt.keys)


def test_handoff_incomplete_prompt_names_missing_blocks(store: Store) -> None:
    writer, decode = engine(store, "storage-0"), engine(store, "decode-0")
    prompt = Prompt(writer, "incomplete", hit=2, new=2)
    decode.client.store(prompt.keys[:2], prompt.bytes[:2])
    awaited = decode.client.await_prompt(prompt.keys, deadline_s=0.5)
    assert not awaited.wait()
    taken = decode.allocate(len(prompt.keys))
    result = awaited.take(taken)
    assert [result.outcome(at) for at in range(2)] == [Outcome.HIT] * 2
    assert {result.outcome(at) for at in range(2, 5)} <= {Outcome.TIMEOUT, Outcome.UNAVAILABLE}
    assert (taken[:2] == prompt.bytes[:2]).all()


def test_handoff_prefill_dies_leaves_nothing(store: Store) -> None:
    writer, decode = engine(store, "storage-0"), engine(store, "decode-0")
    prefill = engine(store, "prefill-0")
    prompt = Prompt(writer, "dies", hit=1, new=5)
    handoff = prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True)
    handoff.put_layer(0, np.ascontiguousarray(prompt.layers[:, 0]))
    handoff.abort()
    assert decode.load_keys(prompt.keys[1:-1], parent=prompt.keys[0], depth=1).hit_blocks == 0

    def handed_over() -> bool:
        again = prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True)
        for layer in range(LAYERS):
            again.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
        return again.commit().held_blocks == len(prompt.keys)

    wait_until(handed_over, "slots of the handoff that was given up are free again")
    with decode.client.await_prompt(prompt.keys, deadline_s=10) as awaited:
        assert awaited.wait()
        taken = decode.allocate(len(prompt.keys))
        assert awaited.take(taken, verify="always").hit_blocks == len(prompt.keys)
    assert (taken == prompt.bytes).all()


def test_handoff_abandoned_by_other_sender_is_sent(store: Store) -> None:
    """As after a load over the decode host that is planned again over other hosts: its blocks will not arrive otherwise."""
    writer, decode = engine(store, "storage-0"), engine(store, "decode-0")
    one, other = engine(store, "prefill-0"), engine(store, "prefill-0")
    prompt = Prompt(writer, "left to another", hit=1, new=5)

    def handed_over(by: Engine, before_commit: Callable[[], None] = lambda: None) -> StoreResult:
        with by.client.begin_handoff(prompt.keys, "decode-0", tail=True) as handoff:
            for layer in range(LAYERS):
                handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
            before_commit()
            return handoff.commit()

    first = one.client.begin_handoff(prompt.keys, "decode-0", tail=True)
    first.put_layer(0, np.ascontiguousarray(prompt.layers[:, 0]))
    meanwhile = handed_over(other)
    assert meanwhile.count(StoreOutcome.IN_PROGRESS) == len(prompt.keys)
    assert meanwhile.error is None, "it may still arrive"

    def give_up() -> None:
        first.abort()
        wait_until(lambda: used_slots(store, prompt) == 0, "the decode host knows that the first was given up")

    told = handed_over(other, give_up)
    assert (told.held_blocks, told.skipped_blocks) == (0, len(prompt.keys))
    assert isinstance(told.error, Unavailable)
    assert handed_over(other).held_blocks == len(prompt.keys)
    with decode.client.await_prompt(prompt.keys, deadline_s=10) as awaited:
        assert awaited.wait()
        taken = decode.allocate(len(prompt.keys))
        assert awaited.take(taken, verify="always").hit_blocks == len(prompt.keys)
    assert (taken == prompt.bytes).all()


def test_handoff_block_counts_after_a_missing_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = engine(store, "storage-0")
    one, other = engine(store, "prefill-0"), engine(store, "prefill-0")
    prompt = Prompt(writer, "a gap", hit=1, new=5)
    size, rest = prompt.bytes[0].nbytes, len(prompt.keys) - 1

    def handed_over(before_commit: Callable[[], None] = lambda: None) -> StoreResult:
        with other.client.begin_handoff(prompt.keys, "decode-0", tail=True) as handoff:
            for layer in range(LAYERS):
                handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
            before_commit()
            return handoff.commit()

    first = one.client.begin_handoff(prompt.keys[:1], "decode-0")
    first.put_layer(0, np.ascontiguousarray(prompt.layers[:1, 0]))

    def give_up() -> None:
        first.abort()
        wait_until(lambda: used_slots(store, prompt) == rest, "the decode host knows that the first was given up")

    begin = TcpPeer.begin_write
    begun: list[WriteRequest] = []

    def only_once(self: TcpPeer, request: WriteRequest) -> LayerWrite:
        begun.append(request)
        if len(begun) > 1:
            raise Unavailable("the node does not answer")
        return begin(self, request)

    with monkeypatch.context() as deaf:
        deaf.setattr(TcpPeer, "begin_write", only_once)
        unsure = handed_over()
    assert len(begun) == 2
    assert (unsure.count(StoreOutcome.STORED), unsure.bytes_stored) == (rest, rest * size)
    assert unsure.outcome(0) == StoreOutcome.IN_PROGRESS
    assert isinstance(unsure.error, Unavailable), "the state of the first block is unknown"

    told = handed_over(give_up)
    assert (told.held_blocks, told.skipped_blocks, told.count(StoreOutcome.EXISTS)) == (0, 1, rest)
    assert isinstance(told.error, Unavailable)
    again = handed_over()
    assert (again.held_blocks, again.bytes_stored) == (len(prompt.keys), size)
    assert again.error is None


def test_handoff_taken_before_commit_is_complete(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from other senders may have left the decode host by then."""
    writer, decode = engine(store, "storage-0"), engine(store, "decode-0")
    one, other = engine(store, "prefill-0"), engine(store, "prefill-0")
    prompt = Prompt(writer, "taken", hit=1, new=4)

    def put(handoff: PromptSender, blocks: int, layers: range) -> None:
        for layer in layers:
            handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:blocks, layer]))

    with (
        decode.client.await_prompt(prompt.keys, deadline_s=30) as awaited,
        one.client.begin_handoff(prompt.keys[:3], "decode-0") as first,
        other.client.begin_handoff(prompt.keys, "decode-0", tail=True) as second,
    ):
        put(first, 3, range(1))
        put(second, len(prompt.keys), range(LAYERS))
        put(first, 3, range(1, LAYERS))
        assert first.commit().held_blocks == 3
        commit = TcpLayerWrite.commit
        heard: list[Sequence[StoreOutcome]] = []

        def hear_late(self: TcpLayerWrite) -> Sequence[StoreOutcome]:
            heard.append(commit(self))
            assert awaited.wait(30.0)
            taken = decode.allocate(len(prompt.keys))
            assert awaited.take(taken).hit_blocks == len(prompt.keys)
            assert (taken == prompt.bytes).all()
            assert store.flush("decode-0")
            store.evict("decode-0")
            wait_until(lambda: used_slots(store, prompt) == 0, "nothing of it is left")
            return heard[-1]

        monkeypatch.setattr(TcpLayerWrite, "commit", hear_late)
        result = second.commit()
    assert len(heard) == 1
    assert result.error is None
    assert (result.held_blocks, result.skipped_blocks) == (len(prompt.keys), 0)
    assert result.count(StoreOutcome.EXISTS) == 3


def used_slots(store: Store, prompt: Prompt) -> int:
    """Blocks that the decode host holds or reserved slots for. A handoff would change them, so it cannot be used to ask."""
    (dram,) = store.node_stats("decode-0").tiers
    return dram.used_bytes // prompt.bytes[0].nbytes


def test_handoff_absent_decode_node_costs_nothing(store: Store) -> None:
    writer, prefill = engine(store, "storage-0"), engine(store, "prefill-0")
    prompt = Prompt(writer, "nobody", hit=1, new=1)
    handoff = prefill.client.begin_handoff(prompt.keys, "nobody", tail=True)
    for layer in range(LAYERS):
        handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
    result = handoff.commit()
    assert result.error is not None
    assert result.held_blocks == 0


def test_store_passing_through_node_is_durable_there(make_store: Callable[..., Store]) -> None:
    store = make_store(
        NodeSpec("storage-0", ("storage",), dram_bytes=64 << 20, nvme_bytes=128 << 20),
        NodeSpec(
            "prefill-0",
            ("prefill",),
            dram_bytes=64 << 20,
            write_back_to="storage-0",
            settings=(("cache_loads", "false"),),
        ),
    )
    writer = engine(store, "prefill-0")
    for number in range(5):
        result = writer.store(f"chain{number}", 20, durable=True)
        assert result.durable, result.error
    wait_until(lambda: store.node_stats("prefill-0").tiers[0].blocks == 0, "blocks leave a node that only stages them")
    # its own node reports their removal before the other node reports its copies
    wait_until(lambda: writer.client.lookup(writer.keys("chain3", 20)).hit_blocks == 20, "lookups show where the blocks went")
    assert writer.load("chain3", 20).hit_blocks == 20


def test_handoff_blocks_on_decode_disk_are_not_sent(
    make_store: Callable[..., Store],
) -> None:
    store = make_store(
        NodeSpec("prefill-0", ("prefill",), dram_bytes=64 << 20),
        NodeSpec("decode-0", ("decode",), dram_bytes=64 << 20, nvme_bytes=128 << 20),
    )
    prefill, decode = engine(store, "prefill-0"), engine(store, "decode-0")
    prompt = Prompt(decode, "disk", hit=6, new=2)
    store.empty_dram("decode-0")
    with decode.client.await_prompt(prompt.keys, deadline_s=20) as awaited:
        handoff = prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True)
        for layer in range(LAYERS):
            handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
        assert handoff.bytes_sent_a_layer == 3 * LAYER_BYTES
        assert handoff.commit().held_blocks == len(prompt.keys)
        assert awaited.wait()
        taken = decode.allocate(len(prompt.keys))
        assert awaited.take(taken, verify="always").hit_blocks == len(prompt.keys)
    assert (taken == prompt.bytes).all()


def test_await_cancelled_frees_the_decode_buffer(make_store: Callable[..., Store]) -> None:
    """The decode buffer holds one prompt. Earlier waits are cancelled long before their deadlines."""
    block_bytes = LAYERS * LAYER_BYTES
    store = make_store(
        NodeSpec("decode-0", ("decode",), dram_bytes=64 << 20, settings=(("decode_buffer", str(20 * block_bytes)),)),
    )
    decode = engine(store, "decode-0")
    left = [decode.client.await_prompt(decode.keys(f"left{number}", 20), deadline_s=100.0) for number in range(8)]
    page = f"http://{store.cluster.node('decode-0').metrics_address}/metrics"

    def waiting() -> float:
        with urllib.request.urlopen(page, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if "staging_waiting_loads" in line and "decode_buffer" in line[:120])

    wait_until(lambda: waiting() > 0, "prompts wait for space")
    for prompt in left:
        prompt.cancel()
    stored = decode.store("wanted", 20)
    assert stored.held_blocks == 20, stored.error
    with decode.client.await_prompt(decode.keys("wanted", 20), deadline_s=100.0) as wanted:
        assert wanted.wait(timeout_s=30.0)


def test_abandoned_prompt_ends_the_wait(store: Store) -> None:
    """Abandoned during the wait, and before it. The blocks that arrived are taken."""
    writer, prefill, decode = (engine(store, node) for node in ("storage-0", "prefill-0", "decode-0"))
    prompt = Prompt(writer, "abandoned", hit=2, new=2)
    decode.client.store(prompt.keys[:2], prompt.bytes[:2])
    for early in (False, True):
        told = early and prefill.client.abandon_prompt(f"t{early}", "decode-0")
        awaited = decode.client.await_prompt(prompt.keys, transfer_id=f"t{early}", deadline_s=1000.0)
        assert early == told
        assert early or prefill.client.abandon_prompt(f"t{early}", "decode-0")
        assert not awaited.wait(30.0)
        assert awaited.done
        taken = decode.allocate(len(prompt.keys))
        result = awaited.take(taken)
        assert [result.outcome(at) for at in range(5)] == [Outcome.HIT] * 2 + [Outcome.UNAVAILABLE] * 3
        assert (taken[:2] == prompt.bytes[:2]).all()
    assert store.node_stats("decode-0").counters["prompts_abandoned_total"] == 2


@pytest.mark.parametrize("transfer_id", ["", "x" * 65, "\u00e9" * 40, 7])
def test_handoff_transfers_are_distinct(store: Store, transfer_id: str) -> None:
    prefill, decode = engine(store, "prefill-0"), engine(store, "decode-0")
    with pytest.raises(InvalidArgument):
        prefill.client.abandon_prompt(transfer_id, "decode-0")
    if transfer_id != "":
        with pytest.raises(InvalidArgument):
            decode.client.await_prompt(decode.keys("named", 1), transfer_id=transfer_id)
    with grpc.insecure_channel(store.cluster.node("decode-0").address) as channel, pytest.raises(grpc.RpcError) as refused:
        node_pb2_grpc.NodeStub(channel).AbandonPrompt(node_pb2.AbandonPromptRequest(transfer_id=str(transfer_id) * 65), timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_abandon_reaches_restarted_decode_node(store: Store) -> None:
    prefill, decode = engine(store, "prefill-0"), engine(store, "decode-0")
    keys = decode.keys("stopped", 2)
    awaited = decode.client.await_prompt(keys, transfer_id="stopped", deadline_s=1000.0)
    process = store.cluster.node("decode-0").process
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: "decode-0" not in {one.node_id for one in context_of(prefill.client).metadata.nodes(5.0)},
            "the node is missed",
        )
        with ThreadPoolExecutor(1) as pool:
            telling = pool.submit(prefill.client.abandon_prompt, "stopped", "decode-0", deadline_s=30.0)
            time.sleep(0.1)
            process.send_signal(signal.SIGCONT)
            assert telling.result(30.0)
    finally:
        process.send_signal(signal.SIGCONT)
    assert not awaited.wait(30.0)
    assert awaited.done
    awaited.take(decode.allocate(2))


def test_abandon_unreachable_decode_node_costs_nothing(store: Store) -> None:
    assert not engine(store, "prefill-0").client.abandon_prompt("t", "nobody", deadline_s=0.5)


def test_handoff_without_space_reports_skipped_blocks(make_store: Callable[..., Store]) -> None:
    store = make_store(
        NodeSpec("prefill-0", ("prefill",), dram_bytes=64 << 20),
        NodeSpec("decode-0", ("decode",), dram_bytes=8 << 20),
    )
    prefill = engine(store, "prefill-0")
    prompt = Prompt(prefill, "large", hit=0, new=300)  # 14 MB
    handoff = prefill.client.begin_handoff(prompt.keys, "decode-0", tail=True)
    for layer in range(LAYERS):
        handoff.put_layer(layer, np.ascontiguousarray(prompt.layers[:, layer]))
    result = handoff.commit()
    assert 0 < result.skipped_blocks == len(prompt.keys) - result.held_blocks
    assert isinstance(result.error, CapacityExceeded)
    assert prefill.client.counters.snapshot()["client_handoff_skipped_blocks_total"] == result.skipped_blocks
